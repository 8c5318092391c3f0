"""The residual step with its batch norm and ReLU as one autograd function.

Written as single operations, a step size costs a training step more than its arithmetic: autograd
keeps one more map a block (f, for the gradient of dt) and runs over maps again and again (the
pooled means' gradients become maps of constants that are added to others). Here

- the only map kept is the norm's input, which the norm keeps anyway: with :math:`f = a y + b` per
  channel, :math:`\\sum g f = a \\sum g y + b \\sum g`;
- the pooled means' gradient is a constant per sample and channel and joins
  :math:`\\mathrm{grad} f = g \\cdot dt + k_f` and :math:`\\mathrm{grad} x = g + k_x` in the pass
  that writes them;
- the sum overwrites f.

g is the gradient behind the ReLU.
"""

from collections.abc import Callable

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


def batch_norm(x: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor]:
    """``norm(x)`` with the mean and inverse deviation used, each (C,), without a graph."""
    if norm.training:
        norm.num_batches_tracked.add_(1)
    out, mean, inverse_deviation = torch.native_batch_norm(
        x,
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
    return out, mean, inverse_deviation


def _per_map(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype)[:, :, None, None]


def _through_batch_norm(
    g: Tensor,
    y: Tensor,
    dt: Tensor,
    k_f: Tensor | None,
    total: Tensor,
    centred: Tensor,
    per_channel: tuple[Tensor, Tensor, Tensor],
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
        per_channel: Weight, mean and inverse deviation, each (C,).
        batch_statistics: Whether mean and deviation are those of y.
        out: (N, C, H, W), overwritten.
    """
    weight, mean, inverse_deviation = per_channel
    size = g.shape[2] * g.shape[3]
    gate = dt[:, :, 0, 0]
    grad_bias = (gate * total).sum(0)
    grad_weight = (gate * centred).sum(0)
    gain = weight * inverse_deviation
    constant = torch.zeros_like(gate)
    if k_f is not None:
        constant = k_f
        grad_bias = grad_bias + size * k_f.sum(0)
        normalised = inverse_deviation * (spatial_mean(y) - mean)
        grad_weight = grad_weight + size * (k_f * normalised).sum(0)
    scale = dt * gain[:, None, None]
    if not batch_statistics:
        return (
            torch.addcmul(_per_map(gain * constant, g), g, scale, out=out),
            grad_weight,
            grad_bias,
        )
    count = len(g) * size
    slope = gain * inverse_deviation * grad_weight / -count
    constant = gain * (constant - grad_bias / count) - slope * mean
    torch.addcmul(_per_map(constant, g), g, scale, out=out)
    return out.addcmul_(y, slope[:, None, None]), grad_weight, grad_bias


class FusedStep(torch.autograd.Function):
    r"""``relu(identity + norm(residual) * dt)`` with ``dt`` from spatial means.

    Called by :func:`fused_step`. First derivatives only: a second one is refused.
    """

    @staticmethod
    def forward(ctx, identity, residual, weight, bias, norm, step_size, relu, record, *parameters):
        if norm is None:
            f, mean, inverse_deviation = residual, None, None
        else:
            f, mean, inverse_deviation = batch_norm(residual, norm)
        # The gate keeps a graph of its own, of (N, C) tensors. Hooks that pack saved tensors, those
        # of activation checkpointing among them, must not take it apart: it is needed within
        # another backward pass than theirs. Detached, since an operation that saves its own output
        # would otherwise own itself and never be freed.
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda x: x):
            means = [
                spatial_mean(x).requires_grad_() if used else None
                for x, used in zip((identity, f), step_size.means, strict=True)
            ]
            gate = step_size.gate_of_means(*means)
        dt = _per_map(gate.detach(), f)
        record(identity, f, dt)
        # Not into f where f is saved.
        out = torch.addcmul(identity, f, dt, out=None if norm is None else f)
        if relu:
            out.relu_()
        ctx.save_for_backward(
            residual, weight, bias, mean, inverse_deviation, out if relu else None, dt
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
        residual, weight, bias, mean, inverse_deviation, out, dt = ctx.saved_tensors
        g = grad if out is None else torch.ops.aten.threshold_backward(grad, out, 0)
        wide = torch.promote_types(g.dtype, torch.float32)
        # Large new tensors cost page faults: the product's is used again for grad f.
        buffer = g * residual
        grad_dt = buffer.sum((2, 3), dtype=wide)
        if ctx.norm is not None:
            total = g.sum((2, 3), dtype=wide)
            centred = inverse_deviation * (grad_dt - mean * total)
            grad_dt = weight * centred + bias * total

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
        size = g.shape[2] * g.shape[3]
        k_x, k_f = (None if m is None else next(grads) / size for m in ctx.means)
        parameter_grads = [next(grads) if p.requires_grad else None for p in ctx.parameters]

        grad_residual = grad_weight = grad_bias = None
        if any(ctx.needs_input_grad[1:4]):
            if ctx.norm is not None and g.dtype == wide:
                per_channel = weight, mean, inverse_deviation
                grad_residual, grad_weight, grad_bias = _through_batch_norm(
                    g, residual, dt, k_f, total, centred, per_channel, ctx.batch_statistics, buffer
                )
            elif k_f is None:
                grad_residual = torch.mul(g, dt, out=buffer)
            else:
                grad_residual = torch.addcmul(_per_map(k_f, g), g, dt, out=buffer)
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
    record: Callable[[Tensor, Tensor, Tensor], None],
) -> Tensor:
    """``relu(identity + norm(residual) * dt)`` in few passes over maps, for training.

    Args:
        identity: (N, C, H, W).
        residual: (N, C, H, W), the input of ``norm``, or f itself where that is None.
        norm: A batch norm that :func:`can_absorb` takes, or None.
        step_size: A :class:`~mmstepnet.models.step_sizes.StepSize` with ``means``.
        relu: Whether the ReLU follows.
        record: Called with identity, f and dt before the sum overwrites f.

    Returns:
        Tensor: (N, C, H, W).
    """
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    return FusedStep.apply(
        identity, residual, weight, bias, norm, step_size, relu, record, *step_size.parameters()
    )
