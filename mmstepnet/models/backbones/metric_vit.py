"""MMPretrain's vision transformer with another self-attention. Importing this needs MMPretrain."""

from mmpretrain.models.backbones.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mmstepnet.models.layers.metric_attention import MetricAttention
from mmstepnet.models.layers.residual_step import ResidualStep


class MetricEncoderLayer(nn.Module):
    """An encoder layer of MMPretrain whose attention is :class:`MetricAttention`.

    Both sums are taken in a :class:`ResidualStep`. ``ln1``, ``ln2`` and ``ffn`` are the layer's
    own, under the same names.

    Args:
        layer: ``TransformerEncoderLayer`` to take over.
        attn: What attends in its place.

    Shape:
        - x: (N, L, C)
        - returns: (N, L, C)
    """

    def __init__(self, layer: nn.Module, attn: MetricAttention):
        super().__init__()
        self.ln1, self.ln2, self.ffn = layer.ln1, layer.ln2, layer.ffn
        self.attn = attn
        # Stochastic depth and layer scale, which MMPretrain keeps inside its attention.
        self.attn_scale, self.attn_drop = layer.attn.gamma1, layer.attn.out_drop
        self.attn_step = ResidualStep()
        self.ffn_step = ResidualStep()
        self.ffn.add_identity = False
        self.register_load_state_dict_pre_hook(_take_over_qkv)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn_step(x, self.attn_drop(self.attn_scale(self.attn(self.ln1(x)))))
        return self.ffn_step(x, self.ffn(self.ln2(x)))

    def init_weights(self) -> None:
        """As MMPretrain's layer: Xavier for the MLP, the attention as its constructor left it."""
        for module in self.ffn.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=1e-6)


def _take_over_qkv(layer, state_dict, prefix, *_) -> None:
    """Read MMPretrain's checkpoints: values, and queries and keys where the kernel has them."""
    for kind in ('weight', 'bias'):
        qkv = state_dict.pop(f'{prefix}attn.qkv.{kind}', None)
        if qkv is None:
            continue
        dims = layer.attn.embed_dims
        state_dict[f'{prefix}attn.value.{kind}'] = qkv[2 * dims :]
        if layer.attn.kernel == 'dot':
            state_dict[f'{prefix}attn.query_key.{kind}'] = qkv[: 2 * dims]


class MetricVisionTransformer(VisionTransformer):
    """``mmpretrain.VisionTransformer`` whose layers attend by :class:`MetricAttention`.

    Args:
        kernel: ``'metric'``, ``'l2'`` or ``'dot'``. With ``'dot'`` it computes what MMPretrain's
            own class does, with both sums recordable.
        attention: Further arguments of :class:`MetricAttention`, ``hidden_dims`` or ``scale`` for
            instance.
        **kwargs: As MMPretrain's class takes them.
    """

    def __init__(self, *args, kernel: str = 'metric', attention: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        for i, layer in enumerate(self.layers):
            old = layer.attn
            options = dict(
                attn_drop=old.attn_drop,
                proj_drop=old.proj_drop.p,
                bias=old.qkv.bias is not None,
                kernel=kernel,
            )
            attn = MetricAttention(old.embed_dims, old.num_heads, **options | (attention or {}))
            self.layers[i] = MetricEncoderLayer(layer, attn)
        if self.frozen_stages > 0:
            self._freeze_stages()
