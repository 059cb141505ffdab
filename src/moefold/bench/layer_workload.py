"""The MoE layer that is timed: sizes, weights, inputs, and its exact output.

T tokens, D model dim, F expert hidden dim, E experts, K experts per token, S hidden dim of the shared expert.

Probs are a softmax over all experts; the top K are kept and normalised to sum to one. Experts are SwiGLU and no token
is dropped. Weights and inputs follow from seeds, so separate processes compute the same function.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.errors import ConfigError, Problem

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Weight of a component that all tokens share: the fullest expert then gets 1.2 to 1.9 times the mean load.
_SKEW = 0.1
_INPUT_SEED, _OUTPUT_GRAD_SEED = 1000, 7


@dataclass(frozen=True)
class LayerShape:
    """``shared`` is the hidden dim of the shared expert; 0 means none."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    shared: int = 0

    def __str__(self) -> str:
        shared = f" shared={self.shared}" if self.shared else ""
        return f"T={self.tokens} D={self.dim} F={self.hidden} E={self.experts} K={self.top_k}{shared}"

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    def flops(self) -> int:
        """Of the experts' matmuls, forward and backward."""
        return 3 * 6 * self.dim * (self.rows * self.hidden + self.tokens * self.shared)


# Few large experts; many small ones with a shared expert; very many very small ones.
SHAPES = {
    "a": LayerShape(tokens=2048, dim=1024, hidden=3584, experts=8, top_k=2),
    "b": LayerShape(tokens=4096, dim=1024, hidden=256, experts=64, top_k=8, shared=256),
    "c": LayerShape(tokens=4096, dim=512, hidden=128, experts=256, top_k=8),
}


def checked(shape: LayerShape) -> LayerShape:
    """The shape itself; raises if no layer can have it."""
    problems = [
        Problem(f"--{name.replace('_', '-')}", f"is {value}", "use 1 or more")
        for name, value in vars(shape).items()
        if value < 1 and name != "shared"
    ]
    if shape.shared < 0:
        problems.append(Problem("--shared", f"is {shape.shared}", "use 0 for no shared expert, or its hidden dim"))
    if shape.top_k > shape.experts:
        problems.append(Problem("--top-k", f"{shape.top_k} of {shape.experts} experts", "use at most --experts"))
    if problems:
        raise ConfigError(*problems)
    return shape


@dataclass(frozen=True)
class SharedWeights:
    gate_DS: Tensor
    up_DS: Tensor
    down_SD: Tensor


@dataclass(frozen=True)
class Weights:
    """Input dim before output dim: x @ weight."""

    router_DE: Tensor
    gate_EDF: Tensor
    up_EDF: Tensor
    down_EFD: Tensor
    shared: SharedWeights | None


def draw_weights(shape: LayerShape, dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return (torch.randn(*sizes, generator=generator) / sizes[-2] ** 0.5).to(dtype)

    E, D, hidden, S = shape.experts, shape.dim, shape.hidden, shape.shared
    routed = (draw(D, E), draw(E, D, hidden), draw(E, D, hidden), draw(E, hidden, D))
    return Weights(*routed, SharedWeights(draw(D, S), draw(D, S), draw(S, D)) if S else None)


def draw_input(shape: LayerShape, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(_INPUT_SEED + seed)
    own_TD = torch.randn(shape.tokens, shape.dim, generator=generator)
    return (own_TD + _SKEW * torch.randn(1, shape.dim, generator=generator)).to(dtype)


def draw_output_grad(shape: LayerShape, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(_OUTPUT_GRAD_SEED)
    return torch.randn(shape.tokens, shape.dim, generator=generator).to(dtype)


def route(shape: LayerShape, weights: Weights, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """(probs, experts), both [T, K], in float32."""
    probs_TE = torch.softmax(x_TD.float() @ weights.router_DE.float(), dim=-1)
    prob_TK, expert_TK = probs_TE.topk(shape.top_k, dim=-1)
    return prob_TK / prob_TK.sum(dim=-1, keepdim=True), expert_TK


@torch.no_grad()
def exact_output(shape: LayerShape, weights: Weights, x_TD: Tensor) -> Tensor:
    """In float32, expert by expert."""
    prob_TK, expert_TK = route(shape, weights, x_TD)
    x_TD = x_TD.float()
    y_TD = torch.zeros_like(x_TD)
    for expert, (gate, up, down) in enumerate(_experts(weights)):
        token, slot = (expert_TK == expert).nonzero(as_tuple=True)
        y_TD.index_add_(0, token, swiglu(x_TD[token], gate, up, down) * prob_TK[token, slot, None])
    if weights.shared is not None:
        y_TD += swiglu(x_TD, *(weight.float() for weight in vars(weights.shared).values()))
    return y_TD


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def relative_error(output: Tensor, exact: Tensor) -> float:
    return float((output.float() - exact).norm() / exact.norm())


def _experts(weights: Weights) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for gate, up, down in zip(weights.gate_EDF, weights.up_EDF, weights.down_EFD):
        yield gate.float(), up.float(), down.float()
