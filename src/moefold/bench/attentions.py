"""Who takes part in `bench attention`: torch's fused call, its bare products, and moefold's operation.

T tokens in documents of equal length, H query heads, G key/value heads, d entries of a head.

moefold's operation takes packed documents, [T, H, d], and finds out itself which of them make one call. The bare call
is given [B, H, n, d] of exactly those blocks. The bare products are what attention would cost if every score were
computed and nothing else done: two products forward and four backward, without the half that a causal kernel skips.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.attention.sdpa import attend, attend_reference
from moefold.bench.attention_shapes import AttentionShape
from moefold.bench.layer_inputs import DTYPES, relative_error
from moefold.bench.runner import Builder, Options
from moefold.bench.saved_bytes import saved_for_backward

_FIRST_INPUT = 5000


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dy: Tensor


class _Attention:
    """What they have in common: inputs from a seed, in the layout that the contestant wants."""

    def __init__(self, options: Options) -> None:
        self.shape, self.dtype = AttentionShape(**options["shape"]), DTYPES[options["dtype"]]

    def prepare(self, seed: int) -> Inputs:
        draws = torch.Generator().manual_seed(_FIRST_INPUT + seed)
        shape = self.shape
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        q, k, v, dy = (
            self.laid_out(torch.randn(shape.tokens, number, shape.dim, generator=draws).to(self.dtype))
            for number in heads
        )
        return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dy)

    def laid_out(self, x_THd: Tensor) -> Tensor:
        return x_THd

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError

    def run(self, prepared: Inputs) -> None:
        self.forward(prepared.q, prepared.k, prepared.v).backward(prepared.dy)

    def saved_bytes(self, prepared: Inputs) -> int | None:
        return saved_for_backward(lambda: self.forward(prepared.q, prepared.k, prepared.v), prepared)


class Ours(_Attention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, self.shape.lengths, self.shape.scale)

    @torch.no_grad()
    def relative_error(self, prepared: Inputs) -> float:
        q, k, v = (x.float() for x in (prepared.q, prepared.k, prepared.v))
        exact_THd = attend_reference(q, k, v, self.shape.lengths, self.shape.scale)
        return relative_error(self.forward(prepared.q, prepared.k, prepared.v), exact_THd)


class FusedCall(_Attention):
    def laid_out(self, x_THd: Tensor) -> Tensor:
        return x_THd.unflatten(0, (self.shape.documents, self.shape.length)).transpose(1, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = self.shape.heads != self.shape.kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.shape.scale, enable_gqa=shared)


class Products:
    """All scores and all weighted sums, as batched products into buffers that are ready."""

    def __init__(self, options: Options) -> None:
        shape, dtype = AttentionShape(**options["shape"]), DTYPES[options["dtype"]]
        blocks = shape.documents * shape.heads
        self.q, self.k, self.v, self.dy, self.out = (
            torch.randn(blocks, shape.length, shape.dim).to(dtype) for _ in range(5)
        )
        self.scores, self.d_scores = (torch.randn(blocks, shape.length, shape.length).to(dtype) for _ in range(2))

    def prepare(self, seed: int) -> None:
        """Always the same."""

    def run(self, prepared: None) -> None:
        torch.bmm(self.q, self.k.mT, out=self.scores)
        torch.bmm(self.scores, self.v, out=self.out)
        torch.bmm(self.dy, self.v.mT, out=self.d_scores)
        torch.bmm(self.scores.mT, self.dy, out=self.out)
        torch.bmm(self.d_scores, self.k, out=self.out)
        torch.bmm(self.d_scores.mT, self.q, out=self.out)

    def saved_bytes(self, prepared: None) -> int | None:
        return None


BARE: dict[str, Builder] = {"fused call": FusedCall, "all products": Products}
OURS: dict[str, Builder] = {"moefold attend": Ours}
CONTESTANTS = BARE | OURS
