"""The adapters of Transformer Engine's GEMMs against a fake of them: values and gradients, also deferred."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.engines import fake_te_gemm
from tests.engines.matmul_cases import COUNTS, assert_equals_reference, case
from tests.engines.rank_threads import ContractError
from torch import Tensor, nn

from moefold.errors import BackendError
from moefold.nn import matmul_policy, te_matmul
from moefold.nn.batch import whole_batch
from moefold.nn.layers import FeedForward
from moefold.nn.matmul_policy import WeightGradQueue, matmul_policy_named
from moefold.nn.parallel_interfaces import LocalTokens
from moefold.nn.te_matmul import te_grouped, te_linear


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = fake_te_gemm.fake_te_gemm()
    for adapter in (te_matmul, matmul_policy):
        monkeypatch.setattr(adapter, "load_engine", lambda name: module)
    yield


# ---- grouped ----


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("deferred", [False, True])
def test_grouped_equals_the_reference(counts: list[int], deferred: bool) -> None:
    assert_equals_reference("transformer_engine", counts, deferred)


def test_counts_are_read_where_the_host_does_not_know_them() -> None:
    assert_equals_reference("transformer_engine", COUNTS["ragged"], deferred=False, host=False)


def test_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the input gradient either, which multiplies by the weight as it lies."""
    given, seen = case(COUNTS["ragged"]), []

    def watched(A: list[Tensor], *others: object, **named: object) -> object:
        seen.append((named["layout"], A[0].data_ptr() == given.weight.data_ptr()))
        return fake_te_gemm.general_grouped_gemm(A, *others, **named)  # type: ignore[arg-type]

    module = fake_te_gemm.fake_te_gemm()
    module.general_grouped_gemm = watched  # type: ignore[attr-defined]
    monkeypatch.setattr(te_matmul, "load_engine", lambda name: module)
    rows = given.rows.requires_grad_()
    te_grouped(rows, given.weight, torch.tensor(given.counts), given.counts).backward(given.grad)
    assert seen == [("TN", True), ("NN", True), ("NT", False)]


# ---- linear ----


def whole_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear_outcome(linear: str, deferred: bool, weight_shape: tuple[int, ...], transposed: bool) -> list[Tensor]:
    x = (whole_numbers(16, 9, seed=1).t() if transposed else whole_numbers(9, 16, seed=1)).requires_grad_()
    weight = nn.Parameter(whole_numbers(*weight_shape, 16, seed=2).float())
    queue = WeightGradQueue()
    policy = matmul_policy_named(linear, queue if deferred else None)
    out = policy.linear(x, weight)
    with queue.deferring("microbatch"):
        out.backward(whole_numbers(*out.shape, seed=3))
    assert (weight.grad is None) == deferred
    queue.run_all()
    assert x.grad is not None and weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("weight_shape", [(8,), (2, 12)])
@pytest.mark.parametrize("transposed", [False, True])
def test_linear_equals_torch(deferred: bool, weight_shape: tuple[int, ...], transposed: bool) -> None:
    """Weights in float32, as with FSDP2 without mixed precision; stacked ones; and an input that is a view."""
    names = ("transformer_engine", "torch")
    for got, wanted in zip(*(linear_outcome(name, deferred, weight_shape, transposed) for name in names), strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


def test_rows_may_have_several_dims() -> None:
    x, weight = whole_numbers(2, 5, 16, seed=1), whole_numbers(8, 16, seed=2)
    assert torch.equal(te_linear(x, weight), x @ weight.t())
    assert torch.equal(te_matmul.te_linear_input_grad(x @ weight.t(), weight), x @ weight.t() @ weight)


def test_a_layer_equals_torch() -> None:
    """Stacked gate and up, and down; the parameters stay moefold's."""
    torch.manual_seed(0)
    x, batch = (
        torch.randn(6, 16).bfloat16(),
        whole_batch(torch.zeros(6).long(), torch.zeros(6).long(), (6,), step_labels=6, step_tokens=6),
    )
    found = []
    for name in ("transformer_engine", "torch"):
        torch.manual_seed(1)
        layer = FeedForward(16, 24, "swiglu", LocalTokens(), matmul_policy_named(name, None))
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        out = layer(x, batch)
        out.float().square().sum().backward()
        found.append([out.detach(), *(parameter.grad for parameter in layer.parameters())])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


# ---- what is refused ----


def test_other_dtypes_are_refused_with_what_works() -> None:
    given = case(COUNTS["ragged"])
    with pytest.raises(BackendError, match=r"kernels.experts: transformer_engine takes bfloat16, not torch.float32"):
        te_grouped(given.rows.float(), given.weight.float(), torch.tensor(given.counts), given.counts)
    with pytest.raises(BackendError, match=r"kernels.linear: transformer_engine takes bfloat16, not torch.float64"):
        te_linear(torch.ones(2, 8).double(), torch.ones(4, 8).double())


def test_the_fake_refuses_what_the_library_would_misread() -> None:
    a, b = whole_numbers(4, 8, seed=1), whole_numbers(8, 3, seed=2)
    with pytest.raises(ContractError, match="as if it were contiguous"):
        fake_te_gemm.general_gemm(a, b.t())
    with pytest.raises(ContractError, match="invalid matrix dimensions"):
        fake_te_gemm.general_gemm(a, b)
    with pytest.raises(ContractError, match="row counts must be on the host"):
        fake_te_gemm.general_grouped_gemm([a], [b], [b], [None], torch.bfloat16)
    with pytest.raises(ContractError, match="no address to write to"):
        fake_te_gemm.general_grouped_gemm([a], [a[:0]], [a[:0]], [None], a.dtype, m_splits=[0], single_output=True)
