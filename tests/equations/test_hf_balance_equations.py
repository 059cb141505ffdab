"""Balance losses of imported models: transformers' own function and DeepSeek's published sum against our routers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.published_models import PUBLISHED, small
from torch import Tensor

pytest.importorskip("transformers")

from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moefold.checkpoint.hf.hf_config import read_config, run_for
from moefold.config.moe import BalanceConfig, MoEConfig
from moefold.moe.router import Router
from moefold.nn.batch import whole_batch
from moefold.nn.parallel_interfaces import LocalTokens
from moefold.recipes.catalog import RECIPES

DIM, EXPERTS, TOP_K, LENGTHS = 6, 8, 3, (7, 12, 1)
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32,
    "hidden_size": DIM,
    "intermediate_size": 5,
    "num_attention_heads": 1,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "rope_theta": 1e4,
    "router_aux_loss_coef": 0.02,
}
DEEPSEEK = {
    "model_type": "deepseek_v2",
    "vocab_size": 32,
    "hidden_size": DIM,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "intermediate_size": 5,
    "moe_intermediate_size": 5,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "rope_theta": 1e4,
    "aux_loss_alpha": 0.003,
}


def imported(config: dict[str, object]) -> MoEConfig:
    moe = run_for(read_config(config), "imported").model.moe
    assert moe is not None
    return moe


def layer(seed: int) -> tuple[Tensor, Tensor]:
    """Weights of a router, and what it sees."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(EXPERTS, DIM, generator=generator, dtype=torch.float64)
    return weight.requires_grad_(), torch.randn(sum(LENGTHS), DIM, generator=generator, dtype=torch.float64)


def our_loss(moe: MoEConfig, weight: Tensor, x: Tensor) -> Tensor:
    router = Router(moe, DIM, LocalTokens()).double()
    count, tokens = sum(LENGTHS), torch.zeros(sum(LENGTHS), dtype=torch.int64)
    batch = whole_batch(tokens, tokens, LENGTHS, step_labels=count, step_tokens=count, step_sequences=len(LENGTHS))
    state = {"weight": weight} | ({} if router.expert_bias is None else {"expert_bias": router.expert_bias})
    _, report = torch.func.functional_call(router, state, (x, batch, None))
    return sum(report.losses, torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_that_route_alike_have_transformers_loss_and_gradient(layers: int) -> None:
    weight, x = layer(seed=1)
    logits = tuple(x @ weight.T for _ in range(layers))
    theirs = MIXTRAL["router_aux_loss_coef"] * load_balancing_loss_func(logits, EXPERTS, TOP_K)
    ours = sum(our_loss(imported(MIXTRAL | {"num_hidden_layers": layers}), weight, x) for _ in range(layers))
    # transformers counts in float32.
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=0)
    ours_grad, theirs_grad = (torch.autograd.grad(loss, weight)[0] for loss in (ours, theirs))
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-5, atol=1e-9)


def test_layers_that_route_differently_are_pooled_by_transformers_alone() -> None:
    """What the conversion cannot carry: it is close, and not equal."""
    made = [layer(seed) for seed in range(3)]
    theirs = 0.02 * load_balancing_loss_func(tuple(x @ weight.T for weight, x in made), EXPERTS, TOP_K)
    ours = sum(our_loss(imported(MIXTRAL | {"num_hidden_layers": 3}), weight, x) for weight, x in made)
    assert ours != theirs
    # Pooled loads are more even than the layers' own.
    assert 0.02 * TOP_K < theirs < ours


def test_deepseeks_loss_per_sequence_is_ours() -> None:
    weight, x = layer(seed=2)
    moe = imported(DEEPSEEK)
    assert moe.balance.sequence == 0.003 and moe.balance.microbatch == 0.0
    expected = torch.zeros((), dtype=torch.float64)
    for part in x.split(LENGTHS):
        scores = (part @ weight.T).softmax(-1)
        counts = torch.zeros(EXPERTS, dtype=torch.float64)
        for token in scores:
            counts[token.topk(TOP_K).indices] += 1
        load = counts * EXPERTS / (len(part) * TOP_K)
        expected = expected + (load * scores.mean(0)).sum() / len(LENGTHS)
    torch.testing.assert_close(our_loss(moe, weight, x), 0.003 * expected, rtol=1e-12, atol=0)
    whole = imported(DEEPSEEK | {"seq_aux": False})
    assert whole.balance.microbatch == 0.003 and whole.balance.sequence == 0.0


@pytest.mark.parametrize("layers", [1, 3])
def test_olmoes_recipe_has_the_losses_of_its_trainer(layers: int) -> None:
    """megablocks: 0.01 E / (L T K) times the sum over layers of counts times mean scores; its branch for OLMoE divides
    the z loss, 0.001 times the sum of squared log-sum-exps, by L T K as well."""
    moe = RECIPES["olmoe_1b_7b"]().model.moe
    assert moe is not None
    # The recipe's coefficients are of 16 layers and top 8.
    fewer, narrower = 16 / layers, 8 / TOP_K
    balance = BalanceConfig(microbatch=moe.balance.microbatch * fewer, z=moe.balance.z * fewer * narrower)
    moe = replace(moe, num_experts=EXPERTS, top_k=TOP_K, balance=balance)
    made, tokens = [layer(seed) for seed in range(layers)], sum(LENGTHS)
    expected = torch.zeros((), dtype=torch.float64)
    for weight, x in made:
        logits = x @ weight.T
        scores = logits.softmax(-1)
        counts = torch.zeros(EXPERTS, dtype=torch.float64)
        for token in scores:
            counts[token.topk(TOP_K).indices] += 1
        divisor = layers * tokens * TOP_K
        expected = expected + 0.01 * EXPERTS / divisor * (counts @ scores.mean(0))
        expected = expected + 0.001 * logits.exp().sum(-1).log().square().sum() / divisor
    ours = sum((our_loss(moe, weight, x) for weight, x in made), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)


def test_what_is_not_followed_is_noted() -> None:
    config = small("MiniMax-M2") | {"router_jitter_noise": 0.1}
    assert config["router_aux_loss_coef"] == PUBLISHED["MiniMax-M2"]["router_aux_loss_coef"] > 0
    found = read_config(config)
    assert found.balance.microbatch == 0.0
    assert [note.partition(";")[0] for note in found.training_notes] == [
        "not followed: router_jitter_noise 0.1",
        "not followed: router_aux_loss_coef 0.001",
    ]
