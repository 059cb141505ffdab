"""The adapter of torchao's MXFP8 grouped GEMM against a fake of it, and where torchao is installed, its emulation.

Whole numbers up to 2 in blocks of one scale are exact in float8, so the adapter must equal the reference to the bit.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import torch
from tests.engines.matmul_cases import COUNTS, assert_equals_reference, case
from tests.engines.rank_threads import ContractError, require
from torch import Tensor
from torch.nn import functional as F

from moefold.errors import BackendError
from moefold.nn import grouped_mxfp8
from moefold.nn.grouped_mxfp8 import BLOCK, mxfp8


def to_mxfp8_then_scaled_grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    wgrad_with_hp: bool = False,
    pad_token_groups_for_grouped_mm: bool = False,
) -> Tensor:
    """Without quantising; refuses what torchao's function and its kernels refuse."""
    require(A.dim() == 2 and A.is_contiguous(), "rows must be row-major")
    require(A.dtype == B_t.dtype == torch.bfloat16, "operands must be bfloat16")
    groups, dim_in, dim_out = B_t.shape
    require(B_t.stride() == (dim_in * dim_out, 1, dim_in), "weights must be column-major in each group")
    require(dim_in % BLOCK == 0 and dim_out % BLOCK == 0, "dims must be multiples of 32")
    assert offs is not None
    require(offs.dtype == torch.int32 and offs.shape == (groups,), "offsets must be int32, one per group")
    require(wgrad_with_hp, "the adapter defers weight gradients in bfloat16 only")
    sizes = offs.diff(prepend=offs.new_zeros(1))
    require(pad_token_groups_for_grouped_mm or not (sizes % BLOCK).any(), "groups are not whole blocks of 32")
    return F.grouped_mm(A, B_t, offs=offs).to(out_dtype)


def use(monkeypatch: pytest.MonkeyPatch, function: object) -> None:
    module = ModuleType("torchao.prototype.moe_training")
    module._to_mxfp8_then_scaled_grouped_mm = function  # type: ignore[attr-defined]
    monkeypatch.setattr(grouped_mxfp8, "load_engine", lambda name: module)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("deferred", [False, True])
def test_mxfp8_equals_the_reference(monkeypatch: pytest.MonkeyPatch, counts: list[int], deferred: bool) -> None:
    use(monkeypatch, to_mxfp8_then_scaled_grouped_mm)
    assert_equals_reference("mxfp8", counts, deferred)


def test_rows_are_padded_where_the_host_does_not_know_better(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def watched(*args: Tensor, pad_token_groups_for_grouped_mm: bool, **others: object) -> Tensor:
        asked.append(pad_token_groups_for_grouped_mm)
        return args[0]

    use(monkeypatch, watched)
    for counts, host in (([64, 32], True), ([64, 32], False), ([64, 31], True)):
        given = case(counts)
        mxfp8(given.rows, given.weight, torch.tensor(counts), counts if host else None)
    assert asked == [False, True, True]


def test_unpadded_groups_would_be_refused() -> None:
    given = case([3, 5])
    with pytest.raises(ContractError, match="not whole blocks of 32"):
        to_mxfp8_then_scaled_grouped_mm(
            given.rows, given.weight.transpose(1, 2), offs=torch.tensor([3, 8]).int(), wgrad_with_hp=True
        )


def test_other_dtypes_are_refused_with_what_works() -> None:
    given = case(COUNTS["ragged"])
    with pytest.raises(BackendError, match=r"mxfp8 takes bfloat16 rows and weights, not torch.float32; use"):
        mxfp8(given.rows.float(), given.weight.float(), torch.tensor(given.counts), given.counts)


@pytest.mark.parametrize("counts", [COUNTS["ragged"], COUNTS["aligned"]], ids=["ragged", "aligned"])
def test_torchao_itself_equals_the_reference_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, counts: list[int]
) -> None:
    """Its emulation, which runs on CPUs; its kernels need sm_100."""
    library = pytest.importorskip("torchao.prototype.moe_training")
    common = pytest.importorskip("torchao.quantization.quantize_.common")
    emulated = partial(library._to_mxfp8_then_scaled_grouped_mm, kernel_preference=common.KernelPreference.EMULATED)
    use(monkeypatch, emulated)
    assert_equals_reference("mxfp8", counts, deferred=False)
