"""Candidates of `benchmarks.attention`: torch's fused call, its matmuls alone, and moefold's operation.

T tokens in documents of equal length n, B documents, H query heads, C head dim.

moefold's operation takes packed documents, [T, H, C], and finds itself which of them make one call. The fused call is
given [B, H, n, C] of exactly those blocks. The matmuls alone compute every score and nothing else: two forward and four
backward, including the half that a causal kernel skips.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.runner import Builder, Options
from benchmarks.timed_layer import saved_for_backward
from moefold.attention.sdpa import attend, attend_reference
from moefold.bench.layer_workload import DTYPES, relative_error
from moefold.errors import ConfigError, Problem

_INPUT_SEED = 5000


@dataclass(frozen=True)
class AttentionShape:
    """Attention over packed documents of equal length; ``dim`` is the head dim."""

    tokens: int = 4096
    length: int = 1024
    heads: int = 16
    kv_heads: int = 4
    dim: int = 64

    def __str__(self) -> str:
        return f"T={self.tokens} documents of {self.length}, H={self.heads}, {self.kv_heads} KV heads, C={self.dim}"

    @property
    def documents(self) -> int:
        return self.tokens // self.length

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length,) * self.documents

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


def checked(shape: AttentionShape) -> AttentionShape:
    """The shape itself; raises if attention cannot have it."""
    problems = [
        Problem(f"--{name.replace('_', '-')}", f"is {value}", "use 1 or more")
        for name, value in vars(shape).items()
        if value < 1
    ]
    if not problems and shape.tokens % shape.length:
        problems.append(Problem("--tokens", f"{shape.tokens} in documents of {shape.length}", "use a multiple"))
    if not problems and shape.heads % shape.kv_heads:
        problems.append(Problem("--heads", f"{shape.heads} over {shape.kv_heads}", "use a multiple of --kv-heads"))
    if problems:
        raise ConfigError(*problems)
    return shape


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor


class _Attention:
    """Inputs from a seed, in the layout that the candidate takes."""

    def __init__(self, options: Options) -> None:
        self.shape, self.dtype = AttentionShape(**options["shape"]), DTYPES[options["dtype"]]

    def prepare(self, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(_INPUT_SEED + seed)
        shape = self.shape
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        q, k, v, dy = (
            self.arrange(torch.randn(shape.tokens, number, shape.dim, generator=generator).to(self.dtype))
            for number in heads
        )
        return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dy)

    def arrange(self, x_THC: Tensor) -> Tensor:
        return x_THC

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def run(self, prepared: Inputs) -> None:
        self.forward(prepared.q, prepared.k, prepared.v).backward(prepared.dy)

    def saved_bytes(self, prepared: Inputs) -> int | None:
        return saved_for_backward(lambda: self.forward(prepared.q, prepared.k, prepared.v), prepared)


class MoefoldAttention(_Attention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.shape.lengths, self.shape.scale)

    @torch.no_grad()
    def relative_error(self, prepared: Inputs) -> float:
        q, k, v = (x.float() for x in (prepared.q, prepared.k, prepared.v))
        exact_THC = attend_reference(q, k, v, self.shape.lengths, self.shape.scale)
        return relative_error(self.forward(prepared.q, prepared.k, prepared.v), exact_THC)


class FusedCall(_Attention):
    def arrange(self, x_THC: Tensor) -> Tensor:
        return x_THC.unflatten(0, (self.shape.documents, self.shape.length)).transpose(1, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = self.shape.heads != self.shape.kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.shape.scale, enable_gqa=shared)


class MatmulsAlone:
    """All scores and all weighted sums, as batched matmuls into preallocated buffers."""

    def __init__(self, options: Options) -> None:
        shape, dtype = AttentionShape(**options["shape"]), DTYPES[options["dtype"]]
        blocks = shape.documents * shape.heads
        self.q, self.k, self.v, self.dy, self.out = (
            torch.randn(blocks, shape.length, shape.dim).to(dtype) for _ in range(5)
        )
        self.scores, self.d_scores = (torch.randn(blocks, shape.length, shape.length).to(dtype) for _ in range(2))

    def prepare(self, seed: int) -> None:
        """Nothing to prepare: the inputs never change."""

    def run(self, prepared: None) -> None:
        torch.bmm(self.q, self.k.mT, out=self.scores)
        torch.bmm(self.scores, self.v, out=self.out)
        torch.bmm(self.dy, self.v.mT, out=self.d_scores)
        torch.bmm(self.scores.mT, self.dy, out=self.out)
        torch.bmm(self.d_scores, self.k, out=self.out)
        torch.bmm(self.d_scores.mT, self.q, out=self.out)

    def saved_bytes(self, prepared: None) -> int | None:
        return None


BASELINES: dict[str, Builder] = {"fused call": FusedCall, "all matmuls": MatmulsAlone}
MOEFOLD: dict[str, Builder] = {"moefold attend": MoefoldAttention}
CANDIDATES = BASELINES | MOEFOLD
