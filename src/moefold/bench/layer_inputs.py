"""The mixture that every contestant of `bench layer` computes: sizes, weights, inputs, and the exact answer.

T tokens, D width, F an expert's hidden width, E experts, K choices per token, S the shared expert's hidden width.

Scores are a softmax over all experts, the K best are chosen and their weights made to sum to one, experts are SwiGLU,
and no token is dropped. Weights and inputs follow from seeds, so contestants in separate processes compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.bench.layer_shapes import LayerShape

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# How much all tokens have in common: the fullest expert then has 1.2 to 1.9 times the mean.
_SKEW = 0.1
_FIRST_INPUT, _OUTPUT_GRADIENT = 1000, 7


@dataclass(frozen=True)
class SharedWeights:
    gate_DS: Tensor
    up_DS: Tensor
    down_SD: Tensor


@dataclass(frozen=True)
class Weights:
    """The last two letters of a name: from which width to which."""

    router_DE: Tensor
    gate_EDF: Tensor
    up_EDF: Tensor
    down_EFD: Tensor
    shared: SharedWeights | None


def draw_weights(shape: LayerShape, dtype: torch.dtype) -> Weights:
    draws = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=draws) / sizes[-2] ** 0.5).to(dtype)

    E, D, hidden, S = shape.experts, shape.dim, shape.hidden, shape.shared
    routed = (draw(D, E), draw(E, D, hidden), draw(E, D, hidden), draw(E, hidden, D))
    return Weights(*routed, SharedWeights(draw(D, S), draw(D, S), draw(S, D)) if S else None)


def draw_input(shape: LayerShape, dtype: torch.dtype, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(_FIRST_INPUT + seed)
    own_TD = torch.randn(shape.tokens, shape.dim, generator=draws)
    return (own_TD + _SKEW * torch.randn(1, shape.dim, generator=draws)).to(dtype)


def draw_gradient(shape: LayerShape, dtype: torch.dtype) -> Tensor:
    """Of the layer's output."""
    draws = torch.Generator().manual_seed(_OUTPUT_GRADIENT)
    return torch.randn(shape.tokens, shape.dim, generator=draws).to(dtype)


def choices(shape: LayerShape, weights: Weights, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, experts) of each token's choices, in float32."""
    scores_TE = torch.softmax(x_TD.float() @ weights.router_DE.float(), dim=-1)
    weight_TK, expert_TK = scores_TE.topk(shape.top_k, dim=-1)
    return weight_TK / weight_TK.sum(dim=-1, keepdim=True), expert_TK


@torch.no_grad()
def exact_answer(shape: LayerShape, weights: Weights, x_TD: Tensor) -> Tensor:
    """In float32, expert by expert."""
    weight_TK, expert_TK = choices(shape, weights, x_TD)
    x_TD = x_TD.float()
    y_TD = torch.zeros_like(x_TD)
    for expert, (gate, up, down) in enumerate(_experts(weights)):
        token, place = (expert_TK == expert).nonzero(as_tuple=True)
        y_TD.index_add_(0, token, swiglu(x_TD[token], gate, up, down) * weight_TK[token, place, None])
    if weights.shared is not None:
        y_TD += swiglu(x_TD, *(weight.float() for weight in vars(weights.shared).values()))
    return y_TD


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


def _experts(weights: Weights) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for gate, up, down in zip(weights.gate_EDF, weights.up_EDF, weights.down_EFD):
        yield gate.float(), up.float(), down.float()
