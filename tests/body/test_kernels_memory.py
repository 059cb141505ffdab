"""Every kernel, forward and backward, under watch: no races and nothing outside its arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

import triton
import triton.language as tl
from tests.body.kernel_memory import watching
from triton.runtime import interpreter

from moefold.config.moe import RouterConfig
from moefold.moe.dispatch.base import Routing
from moefold.moe.kernels.moe_references import RowMap, map_rows
from moefold.moe.moe_kernels import MoEKernels, triton_kernels
from moefold.ops.backends import JOBS


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def choices() -> Routing:
    generator = torch.Generator().manual_seed(0)
    expert_tK = torch.rand(5, 6, generator=generator).argsort(1)[:, :3]
    return Routing(expert_tK, torch.rand(5, 3), torch.rand(5, 3, generator=generator) > 0.2)


def rows(multiple: int) -> RowMap:
    return map_rows(choices(), 6, multiple)


def tables(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.randn(tokens, pairs)
    return angle.cos(), angle.sin()


SETS = torch.tensor([0, 0, -1, 1, 1])
CHOSEN = torch.tensor([[0, 2], [1, 3], [6, 2], [4, 5], [0, 6]])
# Each job at sizes that fill no block; what comes back is differentiated.
CALLS: dict[str, tuple[Callable[[MoEKernels], object], ...]] = {
    "map_rows": (lambda k: k.map_rows(choices(), 6, 4),),
    "permute": (
        lambda k: k.permute(rand(5, 40), rows(4)),
        lambda k: k.permute(rand(5, 1030), rows(1), rand(5, 3)),
    ),
    "unpermute": (
        lambda k: k.unpermute(rand(rows(4).num_rows, 40), rows(4)),
        lambda k: k.unpermute(rand(rows(2).num_rows, 520), rows(2), rand(5, 3)),
    ),
    "route": (
        lambda k: k.route(rand(5, 7), rand(7).detach(), RouterConfig(), 3),
        lambda k: k.route(rand(5, 15), None, RouterConfig(score="sigmoid", num_groups=3, top_groups=2), 3),
    ),
    "balance_stats": (
        lambda k: k.balance_stats(rand(5, 7), CHOSEN, None, 1, "softmax"),
        lambda k: k.balance_stats(rand(5, 7), CHOSEN, SETS, 2, "sigmoid"),
    ),
    "weighted_activation": (
        lambda k: k.weighted_activation(rand(5, 2 * 40), rand(5)),
        lambda k: k.weighted_activation(rand(3, 2 * 600), None, "clamped_swiglu"),
    ),
    "rms_norm": (
        lambda k: k.rms_norm(rand(5, 40), rand(40), 1e-6),
        lambda k: k.rms_norm(rand(37, 130), rand(130), 1e-6),
    ),
    "rotate_qk": (
        lambda k: k.rotate_qk(rand(3, 5, 16), rand(3, 2, 16), *tables(3, 8), False),
        lambda k: k.rotate_qk(rand(3, 21, 22) * 1, None, *tables(3, 3), True, True),
    ),
    "keys_and_values": (lambda k: k.keys_and_values(rand(3, 5, 7 + 4), rand(3, 6), *tables(3, 3), 7, True),),
    "vocab_stats": (lambda k: k.vocab_stats(rand(5, 8), rand(70, 8), torch.tensor([0, 69, 35, 70, -1]), 32),),
}


def test_every_job_is_watched() -> None:
    assert tuple(CALLS) == JOBS


@pytest.mark.parametrize(
    ("job", "number"), [(job, number) for job, calls in CALLS.items() for number in range(len(calls))]
)
def test_no_races_and_nothing_outside(job: str, number: int) -> None:
    torch.manual_seed(number)
    with watching() as watch:
        found = CALLS[job][number](triton_kernels())
        outputs = [out for out in (found if isinstance(found, tuple) else (found,)) if isinstance(out, Tensor)]
        outputs = [out for out in outputs if out.requires_grad]
        torch.autograd.backward(outputs, [torch.randn_like(out) for out in outputs])
    assert watch.launches >= 2


@triton.jit
def _reverse(x, y, n, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """Right only if LAST is n - 1 and y is not x."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + LAST - place, tl.load(x + place, mask=place < n), mask=place < n)


def test_a_race_is_noticed() -> None:
    x, y = torch.arange(16.0), torch.empty(16)
    with watching():
        _reverse[2,](x, y, 16, LAST=15, BLOCK=8)
        assert torch.equal(y, x.flip(0))
        with pytest.raises(interpreter.InterpreterError, match=r"meet at a place|writes where"):
            _reverse[2,](x, x, 16, LAST=15, BLOCK=8)


def test_an_access_outside_is_noticed() -> None:
    x, y = torch.arange(16.0), torch.empty(32)
    with watching(), pytest.raises(interpreter.InterpreterError, match="writes outside"):
        _reverse[2,](x, y[16:], 16, LAST=14, BLOCK=8)
