"""Our columns of the comparison with Liger in docs/engines.md: launches, and bytes per token kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_memory import watching

from moefold.ops.backends import Kernels, triton_kernels

DOC = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
TOKENS, DIM, HIDDEN, PAIRS, VOCAB, CHUNK = 8, 32, 24, 8, 64, 32
BF16 = torch.bfloat16


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


WEIGHT, HEAD, ANGLES = leaf(DIM, dtype=torch.float32), leaf(VOCAB, DIM), torch.randn(TOKENS, PAIRS)
# What is called, and its bytes per token by the page's formula.
JOBS: dict[str, tuple[Callable[[Kernels], tuple[Tensor, ...]], int]] = {
    "RMSNorm": (lambda k: (k.rms_norm(leaf(TOKENS, DIM), WEIGHT, 1e-6),), 2 * DIM + 4),
    "RoPE of queries and keys": (
        lambda k: _both(k.rotate_qk(leaf(TOKENS, 4, 16), leaf(TOKENS, 2, 16), ANGLES.cos(), ANGLES.sin(), False)),
        8 * PAIRS,
    ),
    "SwiGLU of experts": (
        lambda k: (k.weighted_activation(leaf(TOKENS, 2 * HIDDEN), leaf(TOKENS, dtype=torch.float32)),),
        4 * HIDDEN + 4,
    ),
    "head and cross entropy": (
        lambda k: k.vocab_stats(leaf(TOKENS, DIM), HEAD, torch.arange(TOKENS), CHUNK),
        2 * DIM + 12,
    ),
}
FORMULAS = {"RMSNorm": "2D + 4", "RoPE of queries and keys": "8r", "SwiGLU of experts": "4F + 4"}
FORMULAS |= {"head and cross entropy": "2D + 12"}


def _both(pair: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(x for x in pair if x is not None)


@pytest.mark.parametrize("job", JOBS)
def test_launches_and_kept_bytes_are_those_of_the_page(job: str) -> None:
    call, bytes_per_token = JOBS[job]
    parameters = {x.untyped_storage()._cdata for x in (WEIGHT, HEAD)}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage()._cdata not in parameters:
            kept[x.untyped_storage()._cdata] = x
        return x

    with watching() as watch, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = call(triton_kernels())
        forward = watch.launches
        # As the next operation would hand them on: the hooks count nothing of it.
        torch.autograd.backward(out, [torch.randn_like(x) for x in out])
    chunks = VOCAB // CHUNK if job == "head and cross entropy" else 1
    cells = next(line for line in DOC.splitlines() if line.startswith(f"| {job} |")).split(" | ")
    assert cells[1].startswith(f"{forward // chunks} + {(watch.launches - forward) // chunks}")
    assert cells[2] == FORMULAS[job]
    assert sum(x.untyped_storage().nbytes() for x in kept.values()) == TOKENS * bytes_per_token
