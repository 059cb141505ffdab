"""The adapter of DeepGEMM against a fake of it: values, gradients, dtypes, and whole blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.engines import fake_deepgemm
from tests.engines.matmul_cases import COUNTS, assert_equals_reference, case
from tests.engines.rank_threads import ContractError

from moefold.errors import BackendError
from moefold.nn import grouped_deepgemm
from moefold.nn.grouped_deepgemm import deepgemm


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(grouped_deepgemm, "load_engine", lambda name: fake_deepgemm.fake_deep_gemm())
    yield


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("deferred", [False, True])
def test_deepgemm_equals_the_reference(counts: list[int], deferred: bool) -> None:
    assert_equals_reference("deepgemm", counts, deferred)


def test_counts_are_read_where_the_host_does_not_know_them() -> None:
    assert_equals_reference("deepgemm", COUNTS["ragged"], deferred=False, host=False)


def test_aligned_rows_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given, seen = case(COUNTS["aligned"]), []

    def watched(a: torch.Tensor, *others: torch.Tensor) -> None:
        seen.append(a.data_ptr())
        fake_deepgemm.m_grouped_bf16_gemm_nt_contiguous(a, *others)

    module = fake_deepgemm.fake_deep_gemm()
    module.m_grouped_bf16_gemm_nt_contiguous = watched  # type: ignore[attr-defined]
    monkeypatch.setattr(grouped_deepgemm, "load_engine", lambda name: module)
    deepgemm(given.rows, given.weight, torch.tensor(given.counts), given.counts)
    assert seen == [given.rows.data_ptr()]


def test_another_block_size_is_asked_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell's may be 32 to 224."""
    monkeypatch.setattr(fake_deepgemm, "ALIGNMENT", 96)
    assert_equals_reference("deepgemm", COUNTS["ragged"], deferred=False)


def test_rows_that_are_not_in_blocks_would_be_refused() -> None:
    given = case([3, 5])
    layout = torch.tensor([0] * 3 + [1] * 5, dtype=torch.int32)
    with pytest.raises(ContractError, match="8 rows are not whole blocks of 128"):
        fake_deepgemm.m_grouped_bf16_gemm_nt_contiguous(given.rows, given.weight, given.grad.clone(), layout)


def test_other_dtypes_are_refused_with_what_works() -> None:
    given = case(COUNTS["ragged"])
    with pytest.raises(BackendError, match=r"deepgemm computes in bfloat16, not torch.float32; use precision.compute"):
        deepgemm(given.rows.float(), given.weight.float(), torch.tensor(given.counts), given.counts)
