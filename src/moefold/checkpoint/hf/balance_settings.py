"""Balance losses of a config.json in moefold's units.

moefold's loss of one MoE layer is E sum_e f_e P_e: f_e is expert e's share of the T K assignments of a microbatch, P_e
its mean prob. It is 1 where the load is even, and the losses of all layers are added up.

transformers (`router_aux_loss_coef`) puts the tokens of all L MoE layers into one row of L T tokens and counts each of
a token's K experts as a whole: E sum_e (K f_e) P_e, with f and P over that row. One layer gives K times moefold's loss.
L layers that route alike give K times the loss of one of them, which is K / L times the sum, so

    model.moe.balance.microbatch = router_aux_loss_coef K / L.

With one layer this is exact, loss and gradient. With several, transformers' product of means over layers is not a
sum of losses of layers; the two are equal where layers have equal loads and equal at an even load.

DeepSeek's `aux_loss_alpha` is as moefold has it, per layer and divided by K: of sequences with `seq_aux`, or else of
the microbatch. Only losses of the same scores are converted: transformers takes softmax scores in every family, so for
a router with sigmoid scores the loss is not followed.
"""

from __future__ import annotations

from moefold.checkpoint.hf.config_converters import HfValues
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig

# Noise in training that moefold does not have.
_NOISE = ("router_jitter_noise", "input_jitter_noise")


def read_balance(config: HfValues, model: ModelConfig) -> tuple[BalanceConfig, tuple[str, ...]]:
    """The coefficients, and notes on what was converted and what is not followed."""
    moe = model.moe
    if moe is None:
        return BalanceConfig(), ()
    notes = [f"not followed: {key} {value:g}" for key in _NOISE if (value := _number(config, key))]
    microbatch = sequence = 0.0
    layers = sum(map(model.is_moe_layer, range(model.num_layers)))
    if pooled := _number(config, "router_aux_loss_coef"):
        if moe.router.score == "softmax":
            microbatch = pooled * moe.top_k / layers
            how = f"times top_k {moe.top_k}, divided by {layers} MoE layers"
            notes.append(f"model.moe.balance.microbatch is {microbatch:g}: router_aux_loss_coef {pooled:g} {how}")
        else:
            why = f"it is a loss of softmax scores, and this router has {moe.router.score} scores"
            notes.append(f"not followed: router_aux_loss_coef {pooled:g}; {why}")
    if alpha := _number(config, "aux_loss_alpha"):
        kind = "sequence" if config.get("seq_aux", True) else "microbatch"
        microbatch, sequence = (microbatch, alpha) if kind == "sequence" else (alpha, sequence)
        notes.append(f"model.moe.balance.{kind} is {alpha:g}: aux_loss_alpha")
    return BalanceConfig(microbatch=microbatch, sequence=sequence), tuple(notes)


def _number(config: HfValues, key: str) -> float:
    value = config.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else 0.0
