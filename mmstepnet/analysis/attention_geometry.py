r"""What a trained attention layer measures and what it spreads.

Ruan, Zhang: Towards understanding how attention mechanism works in deep learning, 2024,
https://arxiv.org/abs/2412.18288, takes attention apart into a similarity of tokens and a
propagation of their values by it. Here the similarity is turned into the squared distance that it
implies, so that any kernel can be asked how much of a metric it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmstepnet.models.layers.metric_attention import MetricAttention


def implied_squared_distances(scores: Tensor) -> Tensor:
    r""":math:`D_{ij} = s_{ii} - s_{ij}`, the squared distance that attention scores imply.

    The weights are :math:`\mathrm{softmax}_j(s_{ij}) = \mathrm{softmax}_j(-D_{ij})`, and
    :math:`D_{ii} = 0`. Scores of a distance give that squared distance back; scores of a dot
    product give numbers that need be neither symmetric nor positive.

    Args:
        scores: What the softmax takes, or the logarithm of what it returns, (..., L, L).

    Returns:
        Tensor: (..., L, L).
    """
    return scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) - scores


@dataclass(frozen=True)
class AttentionGeometry:
    """What :func:`attention_geometry` finds, each (...,), one value a sample and head.

    Attributes:
        asymmetry: ``|D - D^T| / |D + D^T|`` in the Frobenius norm; 0 for a metric.
        negative: Fraction of pairs i != j with D_ij < 0: another token is nearer than the token
            itself.
        triangle: Fraction of ordered triples of different tokens with
            d_ik > d_ij + d_jk, where d is the root of D, negative D counting as 0.
        neighbours: Effective number of tokens that a query listens to, exp of the weights' entropy,
            mean over queries; between 1 and L.
        spread: Second largest modulus of the weights' eigenvalues: what one step of propagation
            leaves of the slowest difference between tokens. 1 if information stays apart, 0 if
            one step makes all tokens equal.
    """

    asymmetry: Tensor
    negative: Tensor
    triangle: Tensor
    neighbours: Tensor
    spread: Tensor


def attention_geometry(scores: Tensor, tolerance: float = 1e-6) -> AttentionGeometry:
    """Take attention apart into the pseudo-metric it implies and the propagation it makes.

    Args:
        scores: What the softmax takes, (..., L, L), as :meth:`MetricAttention.scores` gives it;
            finite.
        tolerance: Violations smaller than this times the largest distance are rounding and don't
            count.

    Raises:
        ValueError: ``scores`` are not square, not finite, or for fewer than three tokens.
    """
    length = scores.shape[-1]
    if scores.ndim < 2 or scores.shape[-2] != length or length < 3:
        raise ValueError(
            f'scores must be (..., L, L) with L >= 3 tokens, got {tuple(scores.shape)}'
        )
    if not scores.isfinite().all():
        raise ValueError('scores must be finite: leave masked tokens out')
    scores = scores.detach().double()
    squared = implied_squared_distances(scores)
    transposed = squared.transpose(-2, -1)
    total = torch.linalg.matrix_norm(squared + transposed)
    asymmetry = torch.linalg.matrix_norm(squared - transposed) / total.clamp(min=1e-300)

    pairs = length * (length - 1)
    largest = squared.abs().amax((-2, -1))
    # The diagonal is exactly 0.
    negative = (squared < -tolerance * largest[..., None, None]).sum((-2, -1)) / pairs

    distances = squared.clamp(min=0).sqrt()
    slack = tolerance * distances.amax((-2, -1))[..., None, None]
    violated = torch.zeros(scores.shape[:-2], dtype=torch.long, device=scores.device)
    for j in range(length):
        # Where i = j or j = k both sides are equal, where i = k the left one is 0.
        around = distances[..., :, j, None] + distances[..., None, j, :]
        violated += (distances > around + slack).sum((-2, -1))
    triangle = violated / (pairs * (length - 2))

    weights = scores.softmax(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    moduli = torch.linalg.eigvals(weights).abs().sort(-1, descending=True).values
    return AttentionGeometry(asymmetry, negative, triangle, entropy.exp().mean(-1), moduli[..., 1])


@dataclass(frozen=True)
class TokenClustering:
    """What :func:`token_clustering` finds, each (layers, N).

    Attributes:
        similarity: Mean cosine similarity of different tokens.
        spread: ``|h - mean|^2 / |h|^2`` over all tokens: 0 if all are equal, 1 if their mean is 0.
        rank: Effective rank of the tokens around their mean, exp of the entropy of the normalised
            squared singular values; 0 if all are equal.
        clusters: Number of groups when tokens nearer than ``radius`` x their root mean square
            norm are joined.
    """

    similarity: Tensor
    spread: Tensor
    rank: Tensor
    clusters: Tensor


def token_clustering(states: Sequence[Tensor], radius: float = 0.5) -> TokenClustering:
    """How the tokens of a network draw together along its depth.

    Args:
        states: Tokens before the first layer and after each, (N, L, C).
        radius: For ``clusters``, relative to the tokens' norm.

    Raises:
        ValueError: ``states`` is empty, or holds fewer than two tokens, or tokens that are not
            finite.
    """
    if not states:
        raise ValueError('states must hold at least one tensor (N, L, C), got none')
    rows = [_cluster(state.detach().double(), radius) for state in states]
    return TokenClustering(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _cluster(tokens: Tensor, radius: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if tokens.ndim != 3 or tokens.shape[1] < 2:
        raise ValueError(f'states must be (N, L, C) with L >= 2, got {tuple(tokens.shape)}')
    if not tokens.isfinite().all():
        raise ValueError('states must be finite')
    length = tokens.shape[1]
    units = torch.nn.functional.normalize(tokens, dim=-1)
    products = units @ units.transpose(-2, -1)
    own = products.diagonal(dim1=-2, dim2=-1).sum(-1)
    similarity = (products.sum((-2, -1)) - own) / (length * (length - 1))

    power = tokens.square().sum((-2, -1))
    centred = tokens - tokens.mean(1, keepdim=True)
    spread = centred.square().sum((-2, -1)) / power.clamp(min=1e-300)

    energy = torch.linalg.svdvals(centred).square()
    total = energy.sum(-1, keepdim=True)
    shares = energy / total.clamp(min=1e-300)
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    # Rounding leaves equal tokens an energy of about eps^2.
    rank = torch.where(spread > 1e-24, entropy.exp(), 0.0)

    reach = radius * (power / length).sqrt()
    near = torch.cdist(tokens, tokens) <= reach[:, None, None]
    return similarity, spread, rank, _components(near)


def _components(near: Tensor) -> Tensor:
    """Connected components of each graph (N, L, L), as many float numbers."""
    from scipy.sparse.csgraph import connected_components

    counts = [connected_components(graph, directed=False)[0] for graph in near.cpu().numpy()]
    return torch.tensor(counts, dtype=torch.float64)


@torch.no_grad()
def trace_layers(
    model: nn.Module, layers: Sequence[nn.Module], inputs: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a network and note what its attention layers see.

    Args:
        model: Called with ``inputs``.
        layers: Its encoder layers in order, each of one :class:`MetricAttention` (or being one)
            that maps tokens (N, L, C) to tokens.
        inputs: A batch.

    Returns:
        tuple[list[Tensor], list[Tensor]]: Scores of each layer, (N, heads, L, L), and the tokens
            before the first layer and after each, (N, L, C).
    """
    scores: list[Tensor] = []
    states: list[Tensor] = []
    handles = []

    def note_scores(layer, args):
        scores.append(layer.scores(args[0]))

    def note_state(layer, args, output):
        if not states:
            states.append(args[0])
        states.append(output)

    try:
        for layer in layers:
            handles.append(layer.register_forward_hook(note_state))
            attention = [m for m in layer.modules() if isinstance(m, MetricAttention)]
            handles += [m.register_forward_pre_hook(note_scores) for m in attention]
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return scores, states
