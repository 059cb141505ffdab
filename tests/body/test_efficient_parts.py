"""Parts of attention by torch's memory-efficient kernel, which needs a GPU: its shape functions, and a stand-in.

The stand-in refuses what the kernel's source refuses or misreads: head dims and strides that are no multiple of 16
bytes, fewer key heads than query heads, a log-sum-exp that is not padded to a multiple of 32.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.body.varlen_cases import computed, exact, varlen_case, worst
from tests.marks import slow_except
from torch import Tensor

from moefold.attention import partial_attention
from moefold.attention.partial_attention import EFFICIENT, attend_part_plain, part_gradients_plain, parts_for
from moefold.attention.varlen_sdpa import SdpaAttention

CALLS = []


def check_inputs(*inputs: Tensor) -> None:
    q, k, v = inputs[:3]
    assert q.shape[1] == k.shape[1] == v.shape[1] and q.shape[-1] == k.shape[-1] and k.shape[2] == v.shape[2]
    for x in inputs:
        assert x.dtype == q.dtype in (torch.float32, torch.bfloat16) and x.stride(-1) == 1
        places = (x.shape[-1], *x.stride()[:3], x.storage_offset())
        assert all(place * x.element_size() % 16 == 0 for place in places), (x.shape, x.stride())


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, causal: bool, *, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_inputs(q, k, v)
    assert bias is None and with_lse and dropout == 0.0 and (not causal or q.shape[2] == k.shape[2])
    CALLS.append("forward")
    out, lse = attend_part_plain(q, k, v, scale=scale, causal=causal, mask_nm=None)
    padded = lse.new_full((*lse.shape[:2], math.ceil(lse.shape[2] / 32) * 32), torch.inf)
    padded[..., : lse.shape[2]] = lse
    seed = torch.zeros((), dtype=torch.int64)
    return out, padded, seed, seed


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: list[bool],
    causal: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, None]:
    check_inputs(q, k, v, grad, out)
    num = q.shape[2]
    assert bias is None and dropout == 0.0 and wanted == [True, True, True, False]
    assert seed.dtype == offset.dtype == torch.int64 and seed.shape == offset.shape == ()
    assert lse.is_contiguous() and lse.dtype == torch.float32 and lse.shape == (*q.shape[:2], math.ceil(num / 32) * 32)
    assert (lse[..., num:] == torch.inf).all() and not (lse == -torch.inf).any()
    CALLS.append("backward")
    grads = part_gradients_plain(grad, q, k, v, out, lse[..., :num], scale=scale, causal=causal, mask_nm=None)
    dq, dk, dv = (x.to(q.dtype) for x in grads)
    return dq, dk, dv, None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    monkeypatch.setattr(partial_attention, "_efficient_forward", forward)
    monkeypatch.setattr(partial_attention, "_efficient_backward", backward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", slow_except(range(20), *range(6)))
def test_as_the_definition(seed: int, dtype: torch.dtype, stand_in: None) -> None:
    """Rings and single ranks; a window leaves some blocks to the plain way."""
    case = varlen_case(seed, most_tokens=30, multiple=8)
    inputs, grad = case.draw(dtype)
    # The interface that rings use, not `attend`.
    attention = SdpaAttention(EFFICIENT)
    attention.attend = super(SdpaAttention, attention).attend  # type: ignore[method-assign]
    found = computed(attention, case, inputs, grad)
    # Scores of heads of up to 192 entries are large: the plain way, which computes here, is within 1.5e-5.
    assert worst(found, exact(case, inputs, grad)) <= {torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    assert case.window is not None or {"forward", "backward"} <= set(CALLS)


def test_it_is_what_gpus_use_and_odd_head_dims_go_the_plain_way(stand_in: None) -> None:
    assert parts_for(torch.device("cuda")) is EFFICIENT
    q, k, v = (torch.randn(1, 2, 5, dim).bfloat16() for dim in (12, 12, 8))
    EFFICIENT.attend(q, k, v, scale=0.3, causal=True, mask_nm=None)
    EFFICIENT.attend(q.double(), k.double(), v.double(), scale=0.3, causal=True, mask_nm=None)
    assert not CALLS


@pytest.mark.parametrize("causal", [False, True])
def test_shapes_of_the_kernel_itself(causal: bool) -> None:
    """torch's shape functions of both operators: every argument has its place, and values their own head dim."""
    q, k, v = (
        torch.empty(3, heads, 40, dim, device="meta", dtype=torch.bfloat16)
        for heads, dim in ((4, 192), (2, 192), (2, 128))
    )
    out, lse = EFFICIENT.attend(q, k, v, scale=0.3, causal=causal, mask_nm=None)
    assert out.shape == (3, 4, 40, 128) and lse.shape == (3, 4, 40) and lse.dtype == torch.float32
    grads = EFFICIENT.gradients(out, q, k, v, out, lse, scale=0.3, causal=causal, mask_nm=None)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, v)]
