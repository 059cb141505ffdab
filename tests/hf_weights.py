"""Random weights for a transformers model, and the same weights under our names.

E experts, F expert width, D width.

For tests only: the models are small, everything is in memory, and nothing is read or written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

# transformers' name on the left, ours on the right; {i} is the layer.
_SAME = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "feed_forward_norm.weight",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.query_layernorm": "attention.q_norm",
    "self_attn.key_layernorm": "attention.k_norm",
    "self_attn.sinks": "attention.sinks",
    "self_attn.q_a_proj": "attention.q_down",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.q_up",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.kv_up",
    "linear_attn.in_proj_qkvz": "attention.qkvz",
    "linear_attn.in_proj_ba": "attention.ba",
    "linear_attn.A_log": "attention.A_log",
    "linear_attn.dt_bias": "attention.dt_bias",
    "linear_attn.norm": "attention.norm",
    "linear_attn.out_proj": "attention.linear_out",
    "mlp.shared_expert.down_proj.weight": "feed_forward.shared.down",
    "mlp.shared_expert_gate": "feed_forward.shared_gate",
    "mlp.gate.weight": "feed_forward.router.weight",
    "mlp.gate.e_score_correction_bias": "feed_forward.router.expert_bias",
    "mlp.e_score_correction_bias": "feed_forward.router.expert_bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "feed_forward.router.expert_bias",
    "mlp.gate.wg": "feed_forward.router",
    "mlp.router": "feed_forward.router",
    "feed_forward.router": "feed_forward.router",
    "feed_forward.down_proj.weight": "feed_forward.down",
    "feed_forward.shared_expert.down_proj.weight": "feed_forward.shared.down",
    "mlp.down_proj.weight": "feed_forward.down",
    "mlp.shared_experts.down_proj.weight": "feed_forward.shared.down",
    "mlp.shared_mlp.down_proj.weight": "feed_forward.shared.down",
}


def randomize(model: nn.Module, seed: int) -> None:
    """Every parameter and saved buffer, norms and biases too, so that nothing is 0 or 1 by default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name:
                value.add_(0.2 * noise)  # around 1, or around 0 where 1 is added
            elif value.dim() == 1 or name.endswith("_bias"):
                value.copy_(0.3 * noise)
            elif value.dim() == 2:
                value.copy_(noise / value.shape[1] ** 0.5)
            else:  # experts: some families store them as [in, out], so take the longer side for what is summed
                value.copy_(noise / max(value.shape[1:]) ** 0.5)


def our_state(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict for our decoder, from that of a transformers model."""
    return dict(pair for name, value in theirs.items() for pair in _ours(name, value, theirs))


def _ours(name: str, value: Tensor, theirs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    prefix, rest = (f"layers.{match[1]}.", match[2]) if match else ("", name)
    if rest in _SAME:
        # ERNIE's bias has a dim of 1 in front.
        yield prefix + _SAME[rest], value.flatten() if rest.endswith("_correction_bias") else value
    elif rest.rpartition(".")[0] in _SAME:
        stem, _, leaf = rest.rpartition(".")
        yield f"{prefix}{_SAME[stem]}.{leaf}", value
    elif rest == "linear_attn.conv1d.weight":
        yield f"{prefix}attention.conv", value.squeeze(1)
    elif rest.endswith("gate_proj.weight"):
        shared = "shared." if "shared" in rest else ""
        up = theirs[name.replace("gate_proj", "up_proj")]
        yield f"{prefix}feed_forward.{shared}gate_up", torch.stack((value, up))
    elif rest.startswith("mlp.experts."):
        is_gpt_oss = name.rpartition(".")[0] + ".down_proj_bias" in theirs
        leaf = rest.removeprefix("mlp.experts.").replace("_proj", "")
        yield f"{prefix}feed_forward.experts.{leaf}", _expert(leaf, value, is_gpt_oss)
    elif rest.startswith("feed_forward.experts."):  # Llama 4: [in, out], gate beside up
        leaf = rest.removeprefix("feed_forward.experts.").replace("_proj", "")
        yield f"{prefix}feed_forward.experts.{leaf}", _expert(leaf, value.mT, is_gpt_oss=False)
    elif not rest.endswith("up_proj.weight"):  # up_proj has travelled with its gate_proj
        raise KeyError(f"no name of ours for {name}")


def _expert(leaf: str, value: Tensor, is_gpt_oss: bool) -> Tensor:
    """gate_up [E, 2, F, D] and down [E, D, F]; gpt-oss stores [in, out], with gate and up rows alternating."""
    if is_gpt_oss and value.dim() == 3:
        value = value.mT
    if not leaf.startswith("gate_up"):
        return value
    return value.unflatten(1, (-1, 2)).transpose(1, 2) if is_gpt_oss else value.unflatten(1, (2, -1))
