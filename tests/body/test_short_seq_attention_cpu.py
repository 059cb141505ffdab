"""Attention within short documents, against torch's fused call: no further from the exact output than that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.attention.sdpa import attend
from moefold.attention.short_seq_attention_cpu import LONGEST, attend_short, suits

# Documents, tokens, query heads, key/value heads, entries, and how large scores are.
SHAPES = [
    (1, 1, 2, 1, 16, 1.0),
    (3, 37, 4, 2, 16, 1.0),
    (2, 128, 8, 2, 64, 1.0),
    (1, 130, 4, 4, 48, 1.0),
    (2, 300, 6, 2, 128, 1.0),
    (1, 513, 4, 1, 64, 1.0),
    (2, 200, 4, 2, 64, 30.0),
]


def inputs(batch: int, num: int, heads: int, groups: int, dim: int, sharp: float) -> list[Tensor]:
    """q, k, v and the output's gradient, as views of [B, n, H, d]."""
    generator = torch.Generator().manual_seed(num)
    shapes = [(batch, num, each, dim) for each in (heads, groups, groups, heads)]
    q, k, v, grad = (torch.randn(shape, generator=generator).bfloat16().transpose(1, 2) for shape in shapes)
    return [q * sharp, k, v, grad]


def gradients(out: Tensor, given: list[Tensor], grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, given, grad))


@pytest.mark.parametrize(("batch", "num", "heads", "groups", "dim", "sharp"), SHAPES)
def test_as_near_to_the_exact_answer_as_torch(
    batch: int, num: int, heads: int, groups: int, dim: int, sharp: float
) -> None:
    *given, grad = inputs(batch, num, heads, groups, dim, sharp)
    scale, gqa = dim**-0.5, heads != groups
    narrow, wide = [x.detach().requires_grad_() for x in given], [x.double().requires_grad_() for x in given]
    ours = attend_short(*narrow, scale)
    theirs = F.scaled_dot_product_attention(*narrow, is_causal=True, scale=scale, enable_gqa=gqa)
    exact = F.scaled_dot_product_attention(*wide, is_causal=True, scale=scale, enable_gqa=gqa)
    assert torch.equal(ours, theirs)
    found = zip(
        gradients(ours, narrow, grad),
        gradients(theirs, narrow, grad),
        gradients(exact, wide, grad.double()),
        strict=True,
    )
    for mine, other, truth in found:
        size = float(truth.norm()) or 1.0
        error, usual = (float((x.double() - truth).norm()) / size for x in (mine, other))
        assert mine.dtype == torch.bfloat16
        assert error <= max(0.01, 2 * usual)


def test_who_is_computed_here() -> None:
    x = torch.zeros(1, 2, 8, 16)
    assert suits(x.bfloat16(), x.bfloat16()) and not suits(x, x)
    long = torch.zeros(1, 1, LONGEST + 1, 1, dtype=torch.bfloat16)
    assert not suits(long, long) and not suits(x.bfloat16()[:, :, :4], x.bfloat16())
    assert not suits(x.bfloat16().to("meta"), x.bfloat16().to("meta"))


def test_packed_documents_take_this_way() -> None:
    lengths = (40, 40, 7, 130)
    q, k, v = (torch.randn(sum(lengths), heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    given = [x.requires_grad_() for x in (q, k, v)]
    names = set()
    out = attend(q, k, v, lengths, 32**-0.5)
    stack = [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node.name() not in names:
            names.add(node.name())
            stack += [parent for parent, _ in node.next_functions]
    assert "_AttendShortBackward" in names
    assert all(gradient.isfinite().all() for gradient in gradients(out, given, torch.ones_like(out)))


def test_what_is_kept_is_what_torch_keeps() -> None:
    *given, _ = inputs(2, 64, 4, 2, 16, 1.0)
    given = [x.detach().requires_grad_() for x in given]

    def kept(forward: object) -> int:
        sizes: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = forward()  # type: ignore[operator]
        assert out is not None
        return sum(sizes.values())

    ours = kept(lambda: attend_short(*given, 0.25))
    theirs = kept(lambda: F.scaled_dot_product_attention(*given, is_causal=True, scale=0.25, enable_gqa=True))
    assert ours <= theirs
