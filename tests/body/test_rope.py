"""Rotary positions: what a rotation must do, and YaRN against transformers' tables."""

from __future__ import annotations

import math

import pytest
import torch

from moefold.config.attention import RopeConfig, YarnConfig
from moefold.ops.rope import inv_freq, latent_softmax_scale, rotary_tables, rotate, rotate_reference, table_scale

CPU = torch.device("cpu")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_turn_as_complex_numbers_do(interleaved: bool) -> None:
    x, positions = _random(5, 3, 8), torch.tensor([0, 3, 4, 9, 100])
    cos, sin = rotary_tables(RopeConfig(theta=50.0), 8, positions, torch.float64)
    ours = rotate(x, cos, sin, interleaved)
    pairs = x.view(5, 3, 4, 2) if interleaved else torch.stack((x[..., :4], x[..., 4:]), dim=-1)
    angle = positions[:, None, None] * 50.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    expected = turned.flatten(-2) if interleaved else torch.cat((turned[..., 0], turned[..., 1]), dim=-1)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_its_reference_in_values_and_gradients(interleaved: bool, dtype: torch.dtype) -> None:
    # A slice of a wider projection, as latent attention turns it.
    x, grad = _random(7, 3, 12).to(dtype)[..., 4:].requires_grad_(), _random(7, 3, 8).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tables = rotary_tables(RopeConfig(), 8, torch.arange(7), wide)
    ours, reference = (turn(x, *tables, interleaved) for turn in (rotate, rotate_reference))
    assert ours.dtype == reference.dtype == dtype
    rtol = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(ours, reference, rtol=rtol, atol=rtol)
    our_grad, reference_grad = (torch.autograd.grad(out, x, grad)[0] for out in (ours, reference))
    torch.testing.assert_close(our_grad, reference_grad, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("interleaved", [False, True])
def test_logits_depend_on_the_distance_only(interleaved: bool) -> None:
    q, k = _random(1, 1, 6), _random(1, 1, 6).flip(-1)

    def logit(query_at: int, key_at: int) -> torch.Tensor:
        table = rotary_tables(RopeConfig(), 6, torch.tensor([query_at, key_at]), torch.float64)
        turned_q = rotate(q, table[0][:1], table[1][:1], interleaved)
        return (turned_q * rotate(k, table[0][1:], table[1][1:], interleaved)).sum()

    torch.testing.assert_close(logit(7, 3), logit(1007, 1003), rtol=1e-9, atol=1e-9)


def test_far_positions_keep_their_digits_in_float32() -> None:
    positions = torch.tensor([1_000_003])
    cos, _ = rotary_tables(RopeConfig(), 2, positions, torch.float32)
    assert abs(cos.item() - math.cos(1_000_003)) < 1e-6


YARNS = [
    YarnConfig(factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0),
    YarnConfig(factor=32.0, original_context=4096, truncate=False),
    YarnConfig(factor=40.0, original_context=4096, mscale=0.707, mscale_all_dim=1.0),
    YarnConfig(factor=4.0, original_context=64, beta_fast=1.0, beta_slow=1.0),
]


@pytest.mark.parametrize("yarn", YARNS)
def test_yarn_equals_transformers(yarn: YarnConfig) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_context,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64, rope_parameters=rope)
    speeds, scale = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    torch.testing.assert_close(inv_freq(150_000.0, 64, yarn, CPU).float(), speeds, rtol=2e-6, atol=0)
    assert table_scale(yarn) == pytest.approx(scale)


def test_the_softmax_scale_of_latent_attention() -> None:
    assert latent_softmax_scale(None) == latent_softmax_scale(YarnConfig()) == 1.0
    expected = (0.1 * 0.5 * math.log(40) + 1) ** 2
    assert latent_softmax_scale(YarnConfig(factor=40.0, mscale_all_dim=0.5)) == pytest.approx(expected)
