"""QK-clip against Kimi K2's algorithm 1: largest logits by brute force, and logits after scaling weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.staged_runs import EXACT, MODEL, microbatches, share_on, staged_run

from moefold.attention.mask_blocks import document_runs
from moefold.attention.max_logits import max_logits
from moefold.blueprint.model_shape import Attention
from moefold.checks.run_all import problems
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.loading import override
from moefold.config.model import ModelConfig
from moefold.config.optim import OptimConfig
from moefold.config.run import RunConfig
from moefold.optim.qk_clip import exponents, gammas, row_factors
from moefold.pipeline.step import evaluate, make_optimizer, run_step
from moefold.recipes.catalog import recipe

ATTENTIONS = {
    "gqa": GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True),
    "mla": MLAConfig(num_heads=4),
    "mla without query latent": MLAConfig(num_heads=4, q_latent=None),
}


def clipped_run(attention: GQAConfig | MLAConfig, bound: float, lr: float, model: ModelConfig = MODEL) -> RunConfig:
    optim = OptimConfig(algorithm="muon", lr=lr, weight_decay=0.0, qk_clip=bound)
    return replace(staged_run(replace(model, attention=attention)), optim=optim)


@pytest.mark.parametrize("window", [None, 3])
def test_largest_logits_are_those_of_every_visible_pair(window: int | None) -> None:
    lengths, generator = (300, 1, 7, 290), torch.Generator().manual_seed(0)
    q_SHC, k_SJC = (torch.randn(598, heads, 6, generator=generator, dtype=torch.float64) for heads in (4, 2))
    got_H = max_logits(q_SHC, k_SJC, document_runs(lengths), lengths, 0.3, window)
    document_S = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    place_S = torch.arange(598)
    visible = (document_S[:, None] == document_S) & (place_S[:, None] >= place_S)
    if window is not None:
        visible &= place_S[:, None] - place_S < window
    for head in range(4):
        logits = 0.3 * q_SHC[:, head] @ k_SJC[:, head // 2].T
        torch.testing.assert_close(got_H[head], logits[visible].max(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_logits_over_the_bound_end_at_the_bound(name: str) -> None:
    """With lr 0 the weights change by the clip alone, so the same batch shows what it did."""
    free = clipped_run(ATTENTIONS[name], 1e9, 0.0)
    batches = microbatches(free, ((9, 12), (14,)), seed=1)
    share = share_on(free)
    before_LH = run_step(share, make_optimizer(share), batches).max_logits_LH
    assert before_LH is not None and before_LH.isfinite().all()
    bound = float(before_LH.median())
    share = share_on(clipped_run(ATTENTIONS[name], bound, 0.0))
    optimizer = make_optimizer(share)
    first_LH = run_step(share, optimizer, batches).max_logits_LH
    assert first_LH is not None
    torch.testing.assert_close(first_LH[0], before_LH[0], rtol=1e-12, atol=0)
    evaluate(share, batches)
    second_LH = run_step(share, optimizer, batches).max_logits_LH
    assert second_LH is not None
    kv_heads = 2 if name == "gqa" else 4
    group_LJ = before_LH.unflatten(1, (kv_heads, -1)).amax(-1)
    gamma_LH = (bound / group_LJ).clamp(max=1.0).repeat_interleave(4 // kv_heads, 1)
    assert 0 < int((gamma_LH < 1).sum()) < gamma_LH.numel()
    # Later blocks see other inputs once an earlier one has changed.
    torch.testing.assert_close(second_LH[0], before_LH[0] * gamma_LH[0], rtol=1e-9, atol=1e-12)


def test_powers_of_a_product_add_up_to_one() -> None:
    mla = Attention(4, 4, qk_dim=6, v_dim=3, q_latent=5, kv_latent=7, rope_dim=2)
    gamma_J = torch.tensor([0.25, 1.0, 1.0, 0.81])
    query = exponents("layers.0.attention.q_up.weight", mla)
    both = exponents("mtp.0.block.attention.kv_up.weight", mla)
    assert query is not None and both is not None
    torch.testing.assert_close(
        row_factors(gamma_J, query, 24), torch.tensor([*[0.5] * 4, *[0.25] * 2, *[1.0] * 12, *[0.9] * 4, *[0.81] * 2])
    )
    torch.testing.assert_close(
        row_factors(gamma_J, both, 28), torch.tensor([*[0.5] * 4, *[1.0] * 17, *[0.9] * 4, *[1.0] * 3])
    )
    assert exponents("layers.0.attention.kv_down.weight", mla) is None
    assert exponents("layers.0.attention.out.weight", mla) is None


def test_logits_of_zero_or_less_and_none_at_all_leave_weights_alone() -> None:
    """A ratio to them would be infinite, negative or not a number."""
    gqa = Attention(4, 2, 8, 8)
    max_LH = torch.tensor([[0.0, -3.0, -torch.inf, -torch.inf], [4.0, 1.0, 2.0, torch.nan]])
    torch.testing.assert_close(gammas(max_LH, 2.0, gqa), torch.tensor([[1.0, 1.0], [0.5, 1.0]]))


def test_logits_that_grow_without_it_stay_near_the_bound() -> None:
    """One batch, a large lr and no decay. The clip sees the logits before an update, so one update may exceed it."""
    model = replace(MODEL, num_layers=1, num_dense_layers=1, moe=None, num_mtp=0)
    largest = {}
    for bound in (1e9, 10.0):
        run = clipped_run(ATTENTIONS["gqa"], bound, 0.02, model)
        share = share_on(run)
        optimizer, seen = make_optimizer(share), []
        for _ in range(70):
            max_LH = run_step(share, optimizer, microbatches(run, ((24,),))).max_logits_LH
            assert max_LH is not None
            seen.append(float(max_LH.max()))
        largest[bound] = max(seen)
    assert largest[1e9] > 2.5 * 10 and largest[10.0] < 1.1 * 10, largest


def test_norms_behind_the_projections_are_refused() -> None:
    run = override(recipe("debug_mla"), {"optim.qk_clip": 100.0})
    assert problems(run) == [] and run.precision != EXACT
    (problem,) = problems(override(recipe("debug_50m"), {"optim.qk_clip": 100.0}))
    assert problem.path == "optim.qk_clip" and "qk_norm: head" in problem.message
    (problem,) = problems(override(recipe("debug_tiny"), {"optim.qk_clip": 0.0}))
    assert problem.path == "optim.qk_clip"
