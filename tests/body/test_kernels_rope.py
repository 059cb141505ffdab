"""The turning kernels, interpreted, against torch operations: heads of queries and keys, and latent keys."""

from __future__ import annotations

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_cases import Case, assert_near, counting_bytes, poisoned_memory, run_kernel, run_reference

from moefold.config.attention import RopeConfig
from moefold.ops import rope
from moefold.ops.kernels import rope_latent_triton as latent
from moefold.ops.kernels import rope_triton as kernel
from moefold.ops.kernels.interpret import interpreting
from moefold.ops.rope import rotary_tables, rotate


def tables(case: Case, tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    """Longer than 1, as YaRN's are: a backward that inverted the turn would shorten them."""
    positions = torch.randint(0, 5000, (tokens,), generator=case.generator)
    cos, sin = rotary_tables(RopeConfig(), 2 * pairs, positions, torch.float32)
    return 1.25 * cos, 1.25 * sin


@pytest.mark.parametrize("seed", slow_except(range(50), *range(12)))
def test_as_the_reference(seed: int) -> None:
    case = Case(seed)
    tokens, heads, kv_heads = case.among(1, 3, 6), case.among(1, 4, 16, 21), case.among(0, 1, 2, 8)
    pairs, plain, interleaved = case.among(1, 3, 8, 20), case.among(0, 0, 5, 16), case.among(True, False)
    cos, sin = tables(case, tokens, pairs)
    q, k = (case.randn(tokens, count, plain + 2 * pairs) for count in (heads, kv_heads))
    inputs, grads = [q, k if kv_heads else None], [torch.randn_like(x) for x in (q, k) if x.numel()]

    def ours(q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if not in_place:
            return kernel.rotate_qk(q, k, cos, sin, interleaved)
        # A leaf may not be changed, a projection's output may.
        return kernel.rotate_qk(q * 1, None if k is None else k * 1, cos, sin, interleaved, in_place=True)

    def reference(q: Tensor, k: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(x for x in rope.rotate_qk(q, k, cos, sin, interleaved) if x is not None)

    wanted = run_reference(reference, inputs, grads)
    for in_place in (False, True):
        found = run_kernel(ours, inputs, [grad.clone() for grad in grads])
        for place, (mine, reference) in enumerate(zip(found, wanted, strict=True)):
            assert_near(mine, reference, f"tensor {place}, in place {in_place}")


def test_slices_of_a_joint_projection_need_no_copy() -> None:
    case = Case(0)
    cos, sin = tables(case, 4, 8)
    qkv = case.randn(4, 6 + 2 + 2, 16)
    q, k, _ = qkv.split((6, 2, 2), dim=1)
    with interpreting(), poisoned_memory():
        turned_q, turned_k = kernel.rotate_qk(q, k, cos, sin, False)
    torch.testing.assert_close(turned_q, rotate(q, cos, sin, False))
    torch.testing.assert_close(turned_k, rotate(k, cos, sin, False))
    with interpreting(), pytest.raises(ValueError, match="cannot rotate in place"):
        kernel.rotate_qk(torch.empty(4, 3, 16, 16)[..., 0], None, cos, sin, False, in_place=True)
    with interpreting(), pytest.raises(ValueError, match="tables of float32"):
        kernel.rotate_qk(q, k, cos.double(), sin.double(), False)


def test_a_gradient_that_is_one_number_everywhere_is_not_overwritten() -> None:
    case = Case(0)
    cos, sin = tables(case, 3, 4)
    q = case.randn(3, 20, 8).requires_grad_()
    with interpreting():
        turned, _ = kernel.rotate_qk(q * 1, None, cos, sin, True, in_place=True)
        (found,) = torch.autograd.grad(turned.sum(), q)
    (wanted,) = torch.autograd.grad(rotate(q, cos, sin, True).sum(), q)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("interleaved", [True, False])
def test_moves_the_bytes_it_says(interleaved: bool) -> None:
    case, tokens, pairs = Case(1), 3, 12
    cos, sin = tables(case, tokens, pairs)
    for in_place in (False, True):
        q, k = case.randn(tokens, 18, 40), case.randn(tokens, 2, 40)
        with counting_bytes() as moved:
            kernel.launch(q, k, cos, sin, interleaved, back=False, in_place=in_place)
        assert moved[0] == tokens * kernel.traffic(20, 40, pairs, in_place).moved


@pytest.mark.parametrize("seed", slow_except(range(50), *range(12)))
def test_latent_keys_as_the_reference(seed: int) -> None:
    case = Case(seed)
    tokens, heads, interleaved = case.among(1, 2, 5), case.among(1, 5, 16, 20), case.among(True, False)
    nope, value, pairs = case.among(1, 16, 24), case.among(1, 8, 20), case.among(1, 4, 11)
    cos, sin = tables(case, tokens, pairs)
    inputs = [case.randn(tokens, heads, nope + value), case.randn(tokens, 2 * pairs)]
    grads = [case.randn(tokens, heads, nope + 2 * pairs), case.randn(tokens, heads, value)]
    found = run_kernel(lambda *x: latent.keys_and_values(*x, cos, sin, nope, interleaved), inputs, grads)
    wanted = run_reference(lambda *x: rope.keys_and_values(*x, cos, sin, nope, interleaved), inputs, grads)
    for name, ours, reference in zip(("keys", "values", "d heads", "d turned"), found, wanted, strict=True):
        assert_near(ours, reference, name)


def test_latent_values_are_not_copied() -> None:
    case = Case(0)
    heads = case.randn(2, 4, 12)
    with interpreting():
        _, values = latent.keys_and_values(heads, case.randn(2, 6), *tables(case, 2, 3), 8, True)
    assert values.data_ptr() == heads[..., 8:].data_ptr()


def test_latent_keys_move_the_bytes_they_say() -> None:
    case, (tokens, heads, nope, value, pairs) = Case(1), (2, 20, 24, 16, 4)
    cos, sin = tables(case, tokens, pairs)
    up, turned = case.randn(tokens, heads, nope + value), case.randn(tokens, 2 * pairs)
    up.requires_grad_(), turned.requires_grad_()
    with counting_bytes() as moved:
        k, v = latent.keys_and_values(up, turned, cos, sin, nope, True)
    assert moved[0] == tokens * latent.forward_traffic(heads, nope, pairs).moved
    grads = torch.randn_like(k), torch.randn(v.shape).bfloat16()
    with counting_bytes() as moved:
        torch.autograd.backward((k, v), grads)
    assert moved[0] == tokens * latent.backward_traffic(heads, nope, value, pairs).moved
