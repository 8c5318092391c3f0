"""The residual step with its batch norm and ReLU as one autograd function.

Written as single operations, a step size costs a training step more than its arithmetic: autograd
keeps one more map a block (f, for the gradient of dt) and runs over maps again and again (the
pooled means' gradients become maps of constants that are added to others). Here

- f is never written: a batch norm is :math:`f = a y + b` per channel, so that
  :math:`x + f \\cdot dt` is one product of y, and the mean of f is :math:`a \\bar y + b`;
- the only map kept is y, which the norm keeps anyway: :math:`\\sum g f = a \\sum g y + b \\sum g`;
- the pooled means' gradient is a constant per sample and channel and joins
  :math:`\\mathrm{grad} f = g \\cdot dt + k_f` and :math:`\\mathrm{grad} x = g + k_x` in the passes
  that write them.

g is the gradient behind the ReLU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import _has_any_global_hook

from mmstepnet.models.step_sizes.base import spatial_mean

_HOOKS = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')


def has_hooks(module: nn.Module) -> bool:
    """Whether someone listens to this module, and it has to be called as a module then."""
    return _has_any_global_hook() or any(getattr(module, name) for name in _HOOKS)


def is_transformed(x: Tensor) -> bool:
    """Whether something other than plain autograd looks at ``x``, and needs single operations.

    That is a compiler, an exporter or tracer, ``torch.func``, forward-mode AD, or a tensor
    subclass.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad.unpack_dual(x).tangent is not None
    )


def can_absorb(norm: nn.Module | None, x: Tensor) -> bool:
    """Whether :class:`FusedStep` computes this norm of ``x`` itself."""
    return (
        type(norm) is nn.BatchNorm2d
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and not has_hooks(norm)
        # The norm itself refuses this, with torch's own message.
        and not (norm.training and x.numel() == x.shape[1])
    )


class Normed(NamedTuple):
    """What a norm makes of its input, ``f = base * gain + offset``.

    Attributes:
        base: (N, C, H, W).
        fresh: Whether ``base`` may be overwritten.
        gain: (C,) or (N, C), None for 1.
        offset: (C,) or (N, C), None for 0.
        pooled: (N, C), the spatial means of the normalised input, before weight and bias.
        mean: (C,), subtracted by the norm.
        inverse_deviation: (C,), multiplied with by the norm.
    """

    base: Tensor
    fresh: bool = False
    gain: Tensor | None = None
    offset: Tensor | None = None
    pooled: Tensor | None = None
    mean: Tensor | None = None
    inverse_deviation: Tensor | None = None


def batch_norm(y: Tensor, norm: nn.BatchNorm2d) -> Normed:
    """``norm(y)`` without a graph, in as few passes over the map as the device allows."""
    if norm.training:
        norm.num_batches_tracked.add_(1)
        return _by_instances(y, norm) if _takes_instances(y, norm) else _native(y, norm)
    if y.dtype.itemsize < 4 or y.dtype != norm.weight.dtype:
        # A gain and an offset in half precision would not be precise.
        return _native(y, norm)
    inverse_deviation = (norm.running_var + norm.eps).rsqrt()
    gain = norm.weight * inverse_deviation
    return Normed(
        y,
        gain=gain,
        offset=torch.addcmul(norm.bias, norm.running_mean, gain, value=-1),
        pooled=(spatial_mean(y) - norm.running_mean).mul_(inverse_deviation),
        mean=norm.running_mean,
        inverse_deviation=inverse_deviation,
    )


def _native(y: Tensor, norm: nn.BatchNorm2d) -> Normed:
    f, mean, inverse_deviation = torch.native_batch_norm(
        y,
        norm.weight,
        norm.bias,
        norm.running_mean,
        norm.running_var,
        norm.training,
        norm.momentum,
        norm.eps,
    )
    if not norm.training:
        mean, inverse_deviation = norm.running_mean, (norm.running_var + norm.eps).rsqrt()
    pooled = (spatial_mean(y) - mean).mul_(inverse_deviation)
    return Normed(f, True, pooled=pooled, mean=mean, inverse_deviation=inverse_deviation)


def _takes_instances(y: Tensor, norm: nn.BatchNorm2d) -> bool:
    # Torch's kernel for the statistics of a batch is slow in just this case, an addition at a time.
    return (
        y.device.type == 'cpu'
        and y.dtype == norm.weight.dtype
        and y.dtype.itemsize >= 4
        and y.is_contiguous()
        and y.shape[2] * y.shape[3] > 1
    )


def _by_instances(y: Tensor, norm: nn.BatchNorm2d) -> Normed:
    r"""Batch norm from the moments of each sample's channels, in one pass over the map.

    That pass writes them normalised, :math:`h = (y - \bar y) / s`, and with
    :math:`\mathrm{mean} = \mathrm{E}\,\bar y` and
    :math:`\mathrm{var} = \mathrm{E}\,s^2 + \mathrm{E}\,(\bar y - \mathrm{mean})^2` over the samples
    the batch norm is a gain and an offset of h: nothing cancels in these sums.
    """
    n, c, height, width = y.shape
    # No more than what keeps a constant channel's 1 / s finite.
    eps = 1e-30
    h, means, inverse = torch.native_group_norm(y, None, None, n, c, height * width, c, eps)
    deviations = inverse.reciprocal_()
    mean = means.mean(0)
    centred = means.sub_(mean)
    var = torch.addcmul(centred.square(), deviations, deviations).mean(0)
    count = n * height * width
    norm.running_mean.lerp_(mean, norm.momentum)
    norm.running_var.lerp_(var * (count / (count - 1)), norm.momentum)
    inverse_deviation = var.add_(norm.eps).rsqrt_()
    pooled = centred.mul_(inverse_deviation)
    return Normed(
        h,
        True,
        gain=deviations.mul_(norm.weight * inverse_deviation),
        offset=torch.addcmul(norm.bias, pooled, norm.weight),
        pooled=pooled,
        mean=mean,
        inverse_deviation=inverse_deviation,
    )


def _per_map(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype)[..., None, None]


def _means(
    identity: Tensor, f: Normed, norm: nn.BatchNorm2d | None, used: tuple[bool, bool]
) -> list[Tensor | None]:
    """Spatial means of state and residual, (N, C), those that are used."""
    of_identity = spatial_mean(identity) if used[0] else None
    if not used[1]:
        return [of_identity, None]
    if norm is None:
        return [of_identity, spatial_mean(f.base)]
    return [of_identity, torch.addcmul(norm.bias, f.pooled, norm.weight)]


def _materialised(f: Normed) -> Tensor:
    if f.gain is None:
        return f.base
    return torch.addcmul(_per_map(f.offset, f.base), f.base, _per_map(f.gain, f.base))


def _sum(identity: Tensor, f: Normed, dt: Tensor, relu: bool) -> Tensor:
    """``relu(identity + f * dt)``, into ``f.base`` where that is fresh."""
    scale = dt if f.gain is None else dt * f.gain
    out = torch.addcmul(identity, f.base, _per_map(scale, f.base), out=f.base if f.fresh else None)
    if f.offset is not None:
        out.add_(_per_map(dt * f.offset, out))
    return out.relu_() if relu else out


def _through_batch_norm(
    g: Tensor,
    y: Tensor,
    dt: Tensor,
    k_f: Tensor | None,
    total: Tensor,
    centred: Tensor,
    weight: Tensor,
    mean: Tensor,
    inverse_deviation: Tensor,
    pooled: Tensor,
    batch_statistics: bool,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Gradients of y, weight and bias where that of f is :math:`g \cdot dt + k_f`.

    The sums that a batch norm's backward pass takes over maps are sums of the (N, C) sums known
    already, and what is left of it is linear in g and y: one pass, written into ``out``.

    Args:
        g: (N, C, H, W), behind the ReLU.
        y: (N, C, H, W), the norm's input.
        dt: (N, C, 1, 1).
        k_f: (N, C), or None for 0.
        total: (N, C), the sums of g.
        centred: (N, C), the sums of g times the normalised y.
        weight: (C,).
        mean: (C,), subtracted by the norm.
        inverse_deviation: (C,), multiplied with by the norm.
        pooled: (N, C), spatial means of the normalised y.
        batch_statistics: Whether mean and deviation are those of y.
        out: (N, C, H, W), overwritten.
    """
    gate = dt[:, :, 0, 0]
    # Sums over maps of the gradient of f, and of that times the normalised y.
    sums, products = gate * total, gate * centred
    if k_f is not None:
        size = g.shape[2] * g.shape[3]
        sums.add_(k_f, alpha=size)
        products.addcmul_(k_f, pooled, value=size)
    grad_bias, grad_weight = sums.sum(0), products.sum(0)
    gain = weight * inverse_deviation
    # Two broadcast operands in one addcmul would not be vectorised.
    torch.mul(g, _per_map(gate * gain, g), out=out)
    constant = None if k_f is None else gain * k_f
    if batch_statistics:
        count = g.numel() // g.shape[1]
        slope = (gain * inverse_deviation).mul_(grad_weight).mul_(-1 / count)
        out.addcmul_(y, _per_map(slope, y))
        shift = torch.addcmul(slope * mean, gain, grad_bias, value=1 / count)
        constant = -shift if constant is None else constant.sub_(shift)
    if constant is not None:
        out.add_(_per_map(constant, out))
    return out, grad_weight, grad_bias


class FusedStep(torch.autograd.Function):
    r"""``relu(identity + norm(residual) * dt)`` with ``dt`` from spatial means.

    Called by :func:`fused_step`. First derivatives only: a second one is refused.
    """

    @staticmethod
    def forward(ctx, identity, residual, weight, bias, norm, step_size, relu, record, *parameters):
        f = Normed(residual) if norm is None else batch_norm(residual, norm)
        means = _means(identity, f, norm, step_size.means)
        # The gate keeps a graph of its own, of (N, C) tensors. Hooks that pack saved tensors, those
        # of activation checkpointing among them, must not take it apart: it is needed within
        # another backward pass than theirs. Detached, since an operation that saves its own output
        # would otherwise own itself and never be freed.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        unpacked = saved_tensors_hooks(Tensor.detach, lambda x: x) if hooked else nullcontext()
        with torch.enable_grad(), unpacked:
            for mean in means:
                if mean is not None:
                    mean.requires_grad_()
            gate = step_size.gate_of_means(*means)
        dt = gate.detach()
        if record is not None:
            record(identity, _materialised(f), _per_map(dt, residual))
        out = _sum(identity, f, dt, relu)
        ctx.save_for_backward(
            residual,
            weight,
            bias,
            f.mean,
            f.inverse_deviation,
            f.pooled,
            out if relu else None,
            _per_map(dt, residual),
        )
        ctx.norm, ctx.gate, ctx.means, ctx.parameters = norm, gate, means, parameters
        # As they were: a later train() or eval() must not change this pass.
        ctx.batch_statistics = norm is not None and norm.training
        return out

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError(
                'the fused residual step has first derivatives only, but create_graph=True asks '
                'for more: run the forward pass within mmstepnet.models.layers.plain_steps()'
            )
        residual, weight, bias, mean, inverse_deviation, pooled, out, dt = ctx.saved_tensors
        g = grad if out is None else torch.ops.aten.threshold_backward(grad, out, 0)
        wide = torch.promote_types(g.dtype, torch.float32)
        # Large new tensors cost page faults: the product's is used again for grad f.
        buffer = g * residual
        grad_dt = buffer.sum((2, 3), dtype=wide)
        if ctx.norm is not None:
            total = g.sum((2, 3), dtype=wide)
            centred = torch.addcmul(grad_dt, mean, total, value=-1).mul_(inverse_deviation)
            grad_dt = torch.addcmul(weight * centred, bias, total)

        means = [m for m in ctx.means if m is not None]
        parameters = [p for p in ctx.parameters if p.requires_grad]
        grads = iter(
            torch.autograd.grad(
                ctx.gate,
                [*means, *parameters],
                grad_dt.to(ctx.gate.dtype),
                retain_graph=True,
                allow_unused=True,
            )
        )
        per_pixel = 1 / (g.shape[2] * g.shape[3])
        grad_means = [None if m is None else next(grads) for m in ctx.means]
        k_x, k_f = (None if grad is None else grad * per_pixel for grad in grad_means)
        parameter_grads = [next(grads) if p.requires_grad else None for p in ctx.parameters]

        grad_residual = grad_weight = grad_bias = None
        if any(ctx.needs_input_grad[1:4]):
            if ctx.norm is not None and g.dtype == wide:
                grad_residual, grad_weight, grad_bias = _through_batch_norm(
                    g,
                    residual,
                    dt,
                    k_f,
                    total,
                    centred,
                    weight,
                    mean,
                    inverse_deviation,
                    pooled,
                    ctx.batch_statistics,
                    buffer,
                )
            elif k_f is None:
                grad_residual = torch.mul(g, dt, out=buffer)
            else:
                grad_residual = torch.mul(g, dt, out=buffer).add_(_per_map(k_f, g))
            if ctx.norm is not None and g.dtype != wide:
                # It computes in float32, where coefficients of half precision would add up errors.
                grad_residual, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                    grad_residual,
                    residual,
                    weight,
                    ctx.norm.running_mean,
                    ctx.norm.running_var,
                    mean,
                    inverse_deviation,
                    ctx.batch_statistics,
                    ctx.norm.eps,
                    ctx.needs_input_grad[1:4],
                )
        grad_identity = None
        if ctx.needs_input_grad[0]:
            grad_identity = g
            if k_x is not None:
                # In place unless g is the caller's own gradient.
                grad_identity = torch.add(g, _per_map(k_x, g), out=None if g is grad else g)
        return (
            grad_identity,
            grad_residual,
            grad_weight,
            grad_bias,
            *(None,) * 4,
            *parameter_grads,
        )


def fused_step(
    identity: Tensor,
    residual: Tensor,
    norm: nn.BatchNorm2d | None,
    step_size: nn.Module,
    relu: bool,
    record: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> Tensor:
    """``relu(identity + norm(residual) * dt)`` in few passes over maps.

    Args:
        identity: (N, C, H, W).
        residual: (N, C, H, W), the input of ``norm``, or f itself where that is None.
        norm: A batch norm that :func:`can_absorb` takes, or None.
        step_size: A :class:`~mmstepnet.models.step_sizes.StepSize` with ``means``.
        relu: Whether the ReLU follows.
        record: Called with identity, f and dt before the sum.

    Returns:
        Tensor: (N, C, H, W).
    """
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    return FusedStep.apply(
        identity, residual, weight, bias, norm, step_size, relu, record, *step_size.parameters()
    )
