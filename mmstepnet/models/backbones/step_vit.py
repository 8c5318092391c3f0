"""A vision transformer whose tokens take learned steps. Importing this needs MMPretrain.

Huang et al.: Understanding Self-attention Mechanism via Dynamical System Perspective, ICCV 2023,
https://arxiv.org/abs/2308.09939, appendix G.
"""

import torch
from mmpretrain.models.backbones.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mmstepnet.models.layers.residual_step import ResidualStep
from mmstepnet.registry import MODELS


class StepEncoderLayer(nn.Module):
    r"""An encoder layer whose attention is a step of learned size:
    :math:`x \leftarrow x + V(\mathrm{LN}(x)) \cdot dt(x, V)`, then the MLP as before.

    V is the value projection alone: no query, no key, no output projection. Tokens meet only in the
    step size, which pools over them.

    Args:
        layer: ``TransformerEncoderLayer`` of MMPretrain to take over; its ``ln1``, ``ln2`` and
            ``ffn`` keep their names.
        step_size: ``(identity, residual) -> dt`` on maps (N, C, L, 1).

    Shape:
        - x: (N, L, C)
        - returns: (N, L, C)
    """

    def __init__(self, layer: nn.Module, step_size: nn.Module):
        super().__init__()
        self.ln1, self.ln2, self.ffn = layer.ln1, layer.ln2, layer.ffn
        dims = layer.embed_dims
        self.value = nn.Linear(dims, dims, bias=layer.attn.qkv.bias is not None)
        # Layer scale and stochastic depth, which MMPretrain keeps inside its attention.
        self.value_scale, self.value_drop = layer.attn.gamma1, layer.attn.out_drop
        self.step = ResidualStep(step_size)
        self.ffn_step = ResidualStep()
        self.ffn.add_identity = False
        self.register_load_state_dict_pre_hook(_take_over_value)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.value_drop(self.value_scale(self.value(self.ln1(x))))
        x = _as_tokens(self.step(_as_maps(x), _as_maps(residual)))
        return self.ffn_step(x, self.ffn(self.ln2(x)))

    def init_weights(self) -> None:
        """As MMPretrain's layer: Xavier for the MLP, the rest as its constructor left it."""
        for module in self.ffn.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=1e-6)


def _as_maps(x: Tensor) -> Tensor:
    """(N, L, C) to (N, C, L, 1)."""
    return x.transpose(1, 2).unsqueeze(-1)


def _as_tokens(x: Tensor) -> Tensor:
    """(N, C, L, 1) to (N, L, C)."""
    return x.squeeze(-1).transpose(1, 2)


def _take_over_value(layer, state_dict, prefix, *_) -> None:
    """Read MMPretrain's checkpoints: the values of its attention."""
    for kind in ('weight', 'bias'):
        qkv = state_dict.pop(f'{prefix}attn.qkv.{kind}', None)
        if qkv is not None:
            state_dict[f'{prefix}value.{kind}'] = qkv[-len(layer.value.weight) :]


class StepVisionTransformer(VisionTransformer):
    """``mmpretrain.VisionTransformer`` with :class:`StepEncoderLayer` in place of every layer.

    The twin without step sizes is MMPretrain's own class, or ``MetricVisionTransformer`` with
    ``kernel='dot'``, which computes the same and whose sums can be recorded one by one as here.

    A class token would learn of the picture through the step sizes alone, so read out the mean of
    the patches: ``with_cls_token=False, out_type='avg_featmap'``.

    Args:
        step_size: Config of a step size that works on maps of any shape.
        **kwargs: As MMPretrain's class takes them. ``num_heads`` of ``arch`` has no effect.

    Raises:
        ValueError: ``step_size`` is recurrent (DIA), which layers of a transformer do not support.
    """

    def __init__(self, *args, step_size: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        cfg = step_size or dict(type='mmstepnet.StepNetAdaptor')
        for i, layer in enumerate(self.layers):
            module = MODELS.build(dict(cfg, in_channels=self.embed_dims))
            if module.recurrent:
                raise ValueError(f'step_size={cfg["type"]!r} is recurrent; choose one that is not')
            self.layers[i] = StepEncoderLayer(layer, module)
        if self.frozen_stages > 0:
            self._freeze_stages()

    def train(self, mode: bool = True):
        """Set the mode; frozen layers stay in evaluation, with the statistics of their norms."""
        super().train(mode)
        if self.frozen_stages > 0:
            self._freeze_stages()
        return self

    @torch.no_grad()
    def switch_to_deploy(self) -> None:
        """Fold step sizes that can be folded, in place; a second call changes nothing.

        Raises:
            RuntimeError: In training mode.
        """
        if self.training:
            raise RuntimeError('switch_to_deploy() needs evaluation mode: call eval() first')
        for layer in self.layers:
            if hasattr(layer.step.step_size, 'switch_to_deploy'):
                layer.step.step_size.switch_to_deploy()
