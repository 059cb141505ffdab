"""Reloads in the order of the schedule's own actions, and stalls of DeepSeek-V3 over a link of 64 GB/s."""

from __future__ import annotations

import pytest

from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.recipes.catalog import recipe
from moefold.schedule.actions import Kind, Order
from moefold.schedule.offload_order import offload_order, simulate_offload
from moefold.schedule.passes import executable
from moefold.schedule.simulate import Durations, simulate

SCHEDULES = {
    "1f1b": 1,
    "interleaved": 4,
    "zb_h1": 1,
    "zb_v": 2,
    "dualpipe_v": 2,
    "1f1b_overlapped": 1,
    "interleaved_overlapped": 4,
}
GB = 1e9
# DeepSeek-V3, 4,096 tokens a microbatch, ep 64: rows and context of a layer, and its seconds forward and backward.
LAYER_BYTES, LAYER_SECONDS = 0.56 * 2**30, 0.013
LAYERS = 16


def orders(name: str, microbatches: int = 16, ranks: int = 4) -> tuple[Order, Durations, int]:
    vpp = SCHEDULES[name]
    layers = LAYERS // vpp
    seconds = layers * LAYER_SECONDS
    return executable(name, ranks, vpp, microbatches), Durations(seconds, seconds, seconds), layers


@pytest.mark.parametrize("name", SCHEDULES)
def test_chunks_come_back_as_they_go_backward(name: str) -> None:
    order, _, _ = orders(name)
    for actions in order.actions:
        found = offload_order(actions)
        parts = [part for action in actions for part in action.parts]
        gradients = [part for part in parts if part.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)]
        assert found.backward == tuple((part.stage, part.microbatch) for part in gradients)
        assert found.stays <= set(found.backward)
    if name == "1f1b":
        # The last stage's microbatches go backward at once; those of the first wait longest.
        assert [len(offload_order(actions).stays) for actions in order.actions] == [0, 0, 0, 16]


@pytest.mark.parametrize("name", SCHEDULES)
def test_deepseek_v3_stalls_at_most_once_per_chunk_at_64_gigabytes_per_second(name: str) -> None:
    order, durations, layers = orders(name)
    timeline = simulate(order, durations)
    for rank in range(order.num_ranks):
        found = simulate_offload(order, rank, [LAYER_BYTES] * layers, 64 * GB, durations)
        assert found.most_stalls <= 1
        assert found.finish <= 1.01 * timeline.finish
        assert found.host_bytes <= timeline.peak_live[rank] * layers * LAYER_BYTES


def test_a_link_that_is_too_slow_stalls_every_block() -> None:
    """By hand: a block's copy takes a tenth of its backward, or ten times of it."""
    order, durations, layers = orders("1f1b", microbatches=8)
    fast, slow = (
        simulate_offload(order, 0, [1.0] * layers, rate, durations)
        for rate in (5 / LAYER_SECONDS, 0.05 / LAYER_SECONDS)
    )
    assert sum(fast.stalls.values()) == 0 and fast.waited == 0
    assert slow.most_stalls == layers and slow.waited > layers * LAYER_SECONDS


def test_a_wrong_order_of_reloads_stalls() -> None:
    order, durations, layers = orders("interleaved")
    right = offload_order(order.actions[0]).backward
    found = [
        simulate_offload(order, 0, [LAYER_BYTES] * layers, 64 * GB, durations, reloads=reloads)
        for reloads in (right, right[::-1])
    ]
    assert sum(found[1].stalls.values()) > 10 * max(1, sum(found[0].stalls.values()))


def with_keys(**keys: object) -> RunConfig:
    return override(recipe("deepseek_v3_proxy"), {name.replace("__", "."): value for name, value in keys.items()})


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        ({"memory__retain__rows": "discard", "parallel__ep": 2}, "memory.retain.rows", "use offload or keep"),
        ({"memory__retain__core": "discard", "parallel__cp": 2}, "memory.retain.core", "use offload or keep"),
        (
            {"memory__retain__mla_up": "discard", "memory__recompute": ["attention"]},
            "memory.retain.mla_up",
            "attention",
        ),
        ({"memory__preset": "fine_grained", "memory__recompute": ["experts"]}, "memory.preset", "experts"),
        ({"memory__retain__gate_up": "discard", "kernels__experts": "fused"}, "memory.retain.gate_up", "grouped"),
        ({"memory__preset": "fine_grained", "kernels__compile": "regions"}, "memory.preset", "none"),
        ({"memory__host_gib": 0.0}, "memory.host_gib", "positive"),
    ],
)
def test_what_cannot_be_retained_so_is_refused(keys: dict[str, object], path: str, words: str) -> None:
    found = [problem for problem in problems(with_keys(**keys)) if problem.path == path]
    assert found and all(words in problem.message + problem.fix for problem in found)


def test_a_step_that_a_model_lacks_is_refused_by_name_and_skipped_by_presets() -> None:
    run = recipe("qwen3_30b_a3b_proxy")
    assert not problems(override(run, {"memory.preset": "fine_grained"}))
    refused = problems(override(run, {"memory.retain.mla_up": "discard"}))
    assert [problem.path for problem in refused] == ["memory.retain.mla_up"]


def test_a_named_step_wins_over_the_preset() -> None:
    memory = with_keys(memory__preset="fine_grained_offload", memory__retain__gate_up="keep").memory
    assert memory.retained()["gate_up"] == "keep" and memory.retained()["activation"] == "discard"
