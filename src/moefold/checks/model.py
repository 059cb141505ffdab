"""Rules about a model by itself: heads, RoPE, routing, capacity."""

from __future__ import annotations

from moefold.checks.sizes import divides, divisors
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.run import RunConfig
from moefold.errors import Problem


def kv_heads_divide_heads(run: RunConfig) -> Problem | None:
    attention = run.model.attention
    if isinstance(attention, MLAConfig) or divides(attention.num_kv_heads, attention.num_heads):
        return None
    return Problem(
        "model.attention.num_kv_heads",
        f"{attention.num_heads} heads cannot share {attention.num_kv_heads} key/value heads evenly",
        f"use {divisors(attention.num_heads)}",
    )


def rotated_dims_are_even(run: RunConfig) -> Problem | None:
    attention = run.model.attention
    field = "head_dim" if isinstance(attention, GQAConfig) and attention.rope_dim is None else "rope_dim"
    dim: int = getattr(attention, field)
    if dim % 2 == 0:
        return None
    return Problem(
        f"model.attention.{field}", f"is {dim}, but RoPE rotates pairs of dims", f"use {dim - 1} or {dim + 1}"
    )


def rotated_dims_fit_the_head(run: RunConfig) -> Problem | None:
    attention = run.model.attention
    if not isinstance(attention, GQAConfig) or attention.rope_dim is None or attention.rope_dim <= attention.head_dim:
        return None
    return Problem(
        "model.attention.rope_dim",
        f"RoPE cannot rotate {attention.rope_dim} entries of heads that have {attention.head_dim}",
        f"use at most {attention.head_dim}, or null for all of them",
    )


def only_head_norms_come_after_rope(run: RunConfig) -> Problem | None:
    attention = run.model.attention
    if not isinstance(attention, GQAConfig) or attention.qk_norm_when == "before_rope":
        return None
    if attention.qk_norm in ("head", "unit"):
        return None
    return Problem(
        "model.attention.qk_norm_when",
        f"after_rope is for norms of single heads, and model.attention.qk_norm is {attention.qk_norm}",
        "use before_rope, or model.attention.qk_norm head",
    )


def chunks_replace_windows(run: RunConfig) -> Problem | None:
    attention = run.model.attention
    if not isinstance(attention, GQAConfig) or attention.chunk is None or attention.window is None:
        return None
    return Problem(
        "model.attention.chunk",
        f"attention within chunks of {attention.chunk} has no window as well (model.attention.window is "
        f"{attention.window})",
        "set one of the two to null",
    )


def temperature_is_for_layers_without_rope(run: RunConfig) -> Problem | None:
    attention = run.model.attention
    if not isinstance(attention, GQAConfig) or not attention.nope_temperature or attention.nope_every is not None:
        return None
    return Problem(
        "model.attention.nope_temperature",
        f"is {attention.nope_temperature:g}, but every layer has RoPE (model.attention.nope_every is null)",
        "use 0, or set model.attention.nope_every",
    )


def rope_is_rescaled_once(run: RunConfig) -> Problem | None:
    rope = run.model.rope
    if rope.yarn is None or rope.llama3 is None:
        return None
    return Problem("model.rope.llama3", "rescales the frequencies that model.rope.yarn rescales", "set one to null")


def llama3_frequencies_are_in_order(run: RunConfig) -> Problem | None:
    llama3 = run.model.rope.llama3
    if llama3 is None or 0 < llama3.low_freq_factor <= llama3.high_freq_factor:
        return None
    return Problem(
        "model.rope.llama3.low_freq_factor",
        f"{llama3.low_freq_factor:g} and high_freq_factor {llama3.high_freq_factor:g} have no ramp between them",
        "use a positive number that is at most high_freq_factor",
    )


def yarn_extends_the_context(run: RunConfig) -> Problem | None:
    yarn = run.model.rope.yarn
    if yarn is None or yarn.factor >= 1:
        return None
    return Problem("model.rope.yarn.factor", f"is {yarn.factor:g}, which would shrink the context", "use 1 or more")


def experts_are_used(run: RunConfig) -> Problem | None:
    model = run.model
    if model.moe is None or any(map(model.is_moe_layer, range(model.num_layers))):
        return None
    first = f"all {model.num_layers} layers are dense ({model.num_dense_layers} dense layers"
    if model.num_dense_layers < model.num_layers:
        fix = f"use at most {model.num_layers}, and fewer dense layers first"
        return Problem("model.moe_every", f"{first}, then every {model.moe_every}-th is MoE)", fix)
    return Problem(
        "model.num_dense_layers",
        f"{first}), so model.moe is never used",
        f"use at most {model.num_layers - 1}, or set model.moe to null",
    )


def top_k_fits_experts(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or moe.top_k <= moe.num_experts:
        return None
    return Problem(
        "model.moe.top_k", f"{moe.top_k} of {moe.num_experts} experts per token", f"use at most {moe.num_experts}"
    )


def groups_divide_experts(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or divides(moe.router.num_groups, moe.num_experts):
        return None
    return Problem(
        "model.moe.router.num_groups",
        f"{moe.num_experts} experts do not divide into {moe.router.num_groups} groups",
        f"use {divisors(moe.num_experts)}",
    )


def top_groups_fits_num_groups(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or moe.router.top_groups <= moe.router.num_groups:
        return None
    return Problem(
        "model.moe.router.top_groups",
        f"{moe.router.top_groups} of {moe.router.num_groups} groups per token",
        f"use at most {moe.router.num_groups}",
    )


def top_groups_hold_top_k(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or moe.router.num_groups < 1:
        return None
    per_group = moe.num_experts // moe.router.num_groups
    reachable = moe.router.top_groups * per_group
    if reachable >= moe.top_k or moe.top_k > moe.num_experts:
        return None
    return Problem(
        "model.moe.router.top_groups",
        f"{moe.router.top_groups} groups of {per_group} hold {reachable} experts, fewer than top_k = {moe.top_k}",
        f"use at least {-(-moe.top_k // max(per_group, 1))} groups",
    )


def group_score_has_whole_terms(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or moe.router.group_score != "topk_sum" or not 0 < moe.router.top_groups < moe.router.num_groups:
        return None
    if divides(moe.router.top_groups, moe.top_k):
        return None
    return Problem(
        "model.moe.router.group_score",
        f"topk_sum adds top_k / top_groups scores of a group, and {moe.top_k} / {moe.router.top_groups} is no integer",
        f"use top_groups {divisors(moe.top_k)}, or group_score max",
    )


def only_topk_limits_groups(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or moe.router.num_groups <= 1 or moe.router.kind == "topk":
        return None
    return Problem(
        "model.moe.router.num_groups",
        f"{moe.router.num_groups} groups limit a token's top-k, which {moe.router.kind} routing does not take",
        "use num_groups 1, or kind topk",
    )


def only_topk_has_an_expert_bias(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or not moe.router.expert_bias or moe.router.kind == "topk":
        return None
    return Problem(
        "model.moe.router.expert_bias",
        f"the loss-free bias shifts a token's top-k, which {moe.router.kind} routing does not take",
        "use expert_bias false, or kind topk",
    )


def expert_choice_has_its_own_capacity(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or moe.capacity is None or moe.router.kind != "expert_choice":
        return None
    return Problem(
        "model.moe.capacity",
        "expert_choice gives every expert exactly tokens * top_k / experts tokens, so a capacity bounds nothing",
        "set model.moe.capacity to null",
    )


def device_groups_divide_experts(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or divides(moe.balance.device_groups, moe.num_experts):
        return None
    return Problem(
        "model.moe.balance.device_groups",
        f"{moe.num_experts} experts do not divide over {moe.balance.device_groups} devices",
        f"use {divisors(moe.num_experts)}",
    )


def capacity_devices_divide_experts(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or moe.capacity is None or divides(moe.capacity.device_groups, moe.num_experts):
        return None
    return Problem(
        "model.moe.capacity.device_groups",
        f"{moe.num_experts} experts do not divide over {moe.capacity.device_groups} devices",
        f"use {divisors(moe.num_experts)}",
    )


def capacity_devices_are_used(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or moe.capacity is None or moe.capacity.per == "device" or moe.capacity.device_groups == 1:
        return None
    return Problem(
        "model.moe.capacity.device_groups",
        f"is {moe.capacity.device_groups}, but each expert has its own capacity (capacity.per is expert)",
        "set model.moe.capacity.per to device, or device_groups to 1",
    )


def padded_capacity_is_per_expert(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or moe.capacity is None or not moe.capacity.pad or moe.capacity.per == "expert":
        return None
    return Problem(
        "model.moe.capacity.pad",
        "pads every expert to its capacity, but capacity.per is device: the experts of a device share one",
        "set model.moe.capacity.pad to false, or capacity.per to expert",
    )


def shared_gate_has_a_shared_expert(run: RunConfig) -> Problem | None:
    moe = run.model.moe
    if moe is None or not moe.shared_gate or moe.shared_hidden_dim > 0:
        return None
    return Problem(
        "model.moe.shared_gate",
        "there is no shared expert to gate (shared_hidden_dim is 0)",
        "set model.moe.shared_hidden_dim, or shared_gate false",
    )


def key_heads_divide_value_heads(run: RunConfig) -> Problem | None:
    linear = run.model.linear_attention
    if linear is None or divides(linear.num_key_heads, linear.num_value_heads):
        return None
    return Problem(
        "model.linear_attention.num_key_heads",
        f"{linear.num_value_heads} value heads cannot share {linear.num_key_heads} key heads evenly",
        f"use {divisors(linear.num_value_heads)}",
    )


def both_kinds_of_attention_are_used(run: RunConfig) -> Problem | None:
    model, linear = run.model, run.model.linear_attention
    if linear is None or 1 < linear.full_attention_every <= model.num_layers:
        return None
    every, path = linear.full_attention_every, "model.linear_attention.full_attention_every"
    if every <= 1:
        return Problem(
            path, "every layer has full attention, so the linear one is never used", "use 2 or more, or set it to null"
        )
    what = f"layer {every - 1} would be the first with full attention, and the last layer is {model.num_layers - 1}"
    return Problem(path, what, f"use 2 to {model.num_layers}" if model.num_layers > 1 else "use 2 or more layers")


RULES = (
    kv_heads_divide_heads,
    key_heads_divide_value_heads,
    both_kinds_of_attention_are_used,
    rotated_dims_are_even,
    rotated_dims_fit_the_head,
    only_head_norms_come_after_rope,
    chunks_replace_windows,
    temperature_is_for_layers_without_rope,
    rope_is_rescaled_once,
    llama3_frequencies_are_in_order,
    yarn_extends_the_context,
    experts_are_used,
    top_k_fits_experts,
    groups_divide_experts,
    top_groups_fits_num_groups,
    top_groups_hold_top_k,
    group_score_has_whole_terms,
    only_topk_limits_groups,
    only_topk_has_an_expert_bias,
    expert_choice_has_its_own_capacity,
    device_groups_divide_experts,
    capacity_devices_divide_experts,
    capacity_devices_are_used,
    padded_capacity_is_per_expert,
    shared_gate_has_a_shared_expert,
)
