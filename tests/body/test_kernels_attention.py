"""The attention kernels, interpreted, against the naive definition in float64: values, gradients, launches, bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_cases import poisoned_memory
from tests.body.kernel_memory import watching
from tests.body.varlen_cases import SCALE, VarlenCase, computed, exact, varlen_case, worst

from moefold.attention.varlen_triton import TritonAttention
from moefold.errors import BackendError
from moefold.ops.kernels import attention_backward_triton as backward
from moefold.ops.kernels import attention_triton as forward
from moefold.ops.kernels.interpret import interpreting
from moefold.recipes.catalog import recipe

# Of the largest entry. In bfloat16 outputs, shares and dscore are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several blocks of queries and of keys even in short documents."""
    monkeypatch.setattr(forward, "FORWARD_TILE", (16, 16, 4, 1))
    monkeypatch.setattr(backward, "KEYS_TILE", (16, 16, 4, 1))
    monkeypatch.setattr(backward, "QUERIES_TILE", (16, 16, 4, 1))
    yield


def check(case: VarlenCase, dtype: torch.dtype) -> None:
    inputs, grad = case.draw(dtype)
    with interpreting(), poisoned_memory():
        found = computed(TritonAttention(), case, inputs, grad)
    assert [x.dtype for x in found] == [dtype] * len(found)
    assert worst(found, exact(case, inputs, grad)) <= TOLERANCE[dtype], case


@pytest.mark.parametrize("seed", slow_except(range(500), *range(8)))
def test_as_the_definition(seed: int) -> None:
    check(varlen_case(seed), torch.float32)


@pytest.mark.parametrize("seed", slow_except(range(0, 500, 5), 0, 5, 10))
def test_as_the_definition_in_bfloat16(seed: int) -> None:
    check(varlen_case(seed), torch.bfloat16)


def test_latent_attention_as_the_definition() -> None:
    """A head dim of two parts and narrower values, in documents of several blocks."""
    check(VarlenCase(0, (37, 3, 20), 2, 2, 24, 16, None, False), torch.float32)
    check(VarlenCase(0, (37, 3, 20), 2, 1, 40, 8, 18, True), torch.float32)


def test_values_may_be_a_view_of_a_joint_projection() -> None:
    kv = torch.randn(21, 2, 24 + 16, generator=torch.Generator().manual_seed(0))
    q, v = torch.randn(21, 2, 24), kv[..., 24:]
    attention = TritonAttention()
    with interpreting():
        found = attention.attend(q, kv[..., :24], v, (9, 12), SCALE)
        wanted = attention.attend(q, kv[..., :24].contiguous(), v.contiguous(), (9, 12), SCALE)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_result_does_not_depend_on_what_other_documents_hold() -> None:
    q, k, v = (torch.randn(13, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    poisoned = [k.clone(), v.clone()]
    for x in poisoned:
        x[4:11] = 1e30
    with interpreting():
        found = TritonAttention().attend(q, *poisoned, (4, 7, 2), SCALE)
        wanted = TritonAttention().attend(q, k, v, (4, 7, 2), SCALE)
    for rows in (slice(0, 4), slice(11, 13)):
        torch.testing.assert_close(found[rows], wanted[rows], rtol=0, atol=0)


def forward_and_backward(case: VarlenCase) -> int:
    inputs, grad = case.draw(torch.float32)
    with watching() as watch:
        computed(TritonAttention(), case, inputs, grad)
    return watch.launches


def test_no_races_and_the_same_launches_for_any_documents() -> None:
    """One forward and three backward; every access is watched."""
    launches = {
        forward_and_backward(VarlenCase(1, lengths, 2, 1, 20, 16, window, True))
        for lengths, window in (((20,), None), ((5, 1, 0, 7, 7), None), ((1,) * 20, 3))
    }
    assert launches == {4}


def test_launches_of_a_ring_do_not_depend_on_documents() -> None:
    """4 per member and step at most: nothing is launched where a member sees nothing."""
    launches = {
        forward_and_backward(VarlenCase(1, lengths, 1, 1, 16, 16, None, False, size=2))
        for lengths in ((24,), (8, 9, 7))
    }
    assert launches == {4 * 2 * 2}


def test_bytes_kept_for_deepseek_v3_have_no_padding() -> None:
    """Of 4 tokens with all 128 heads: q and k of 192, v and output of 128 in bfloat16, and the log-sum-exp."""
    config = recipe("deepseek_v3").model.attention
    heads, dim, value_dim = config.num_heads, config.nope_dim + config.rope_dim, config.value_dim
    assert (heads, dim, value_dim) == (128, 192, 128)
    tokens, bf16 = 4, torch.bfloat16
    q, k = (torch.randn(tokens, heads, dim, dtype=bf16, requires_grad=True) for _ in range(2))
    # Values are a view of the up projection, whose other part went into the keys.
    v = torch.randn(tokens, heads, config.nope_dim + value_dim, dtype=bf16, requires_grad=True)[..., config.nope_dim :]
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with interpreting(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        TritonAttention().attend(q, k, v, (3, 1), SCALE)
    assert sum(kept.values()) == tokens * heads * (2 * (2 * dim + 2 * value_dim) + 4)


def test_float64_is_refused() -> None:
    q, k, v = (torch.randn(3, 1, 16, dtype=torch.float64) for _ in range(3))
    with pytest.raises(BackendError, match="for float64 use torch"), interpreting():
        TritonAttention().attend(q, k, v, (3,), SCALE)


def test_blocks_of_float32_are_half_as_long() -> None:
    assert forward.tile_for((128, 64, 8, 2), torch.empty(1)) == (64, 32, 8, 1)
    assert forward.tile_for((128, 64, 8, 2), torch.empty(1, dtype=torch.bfloat16)) == (128, 64, 8, 2)


def test_shapes_without_a_kernel() -> None:
    """Fake tensors, as in a dry run: nothing is launched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(7, 4, dim, dtype=torch.bfloat16, requires_grad=True) for dim in (24, 24, 16))
        out = TritonAttention().attend(q, k, v, (3, 4), SCALE)
        grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert out.shape == (7, 4, 16) and [x.shape for x in grads] == [x.shape for x in (q, k, v)]
