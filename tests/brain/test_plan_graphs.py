"""What the planner says of captured phases: buffers by slots and layers, idle slots, and fewer launches."""

from __future__ import annotations

import pytest

from moefold.hardware.cluster import cluster_of
from moefold.plan.memory.peak import memory_at, predict_memory
from moefold.plan.prediction import MemoryPrediction
from moefold.plan.timing.step_time import step_time
from moefold.plan.workload import Workload, changed
from moefold.recipes.catalog import recipe

GRAPHS = {"graphs": "partial", "graph_scope": ("attn", "moe_router")}
LAYERS = {"graphs": "partial", "graph_scope": ("attn", "moe_router", "moe", "mlp")}
DIM, WORD, TOP_K, TOKENS = 2048, 2, 8, 4096


def workload(**parallel: object) -> Workload:
    """Qwen3-30B-A3B (48 MoE layers of dim 2048, 8 experts per token) on 32 GPUs, 4096 tokens per microbatch."""
    base = Workload(recipe("qwen3_30b_a3b"), cluster_of("H100", 32))
    layout = {"tp": 1, "cp": 1, "pp": 4, "vpp": 1, "ep": 8, "schedule": "1f1b", "sharding": "flat"}
    layout |= {"stages": "Et*12|t*12|t*12|t*12L"} | parallel
    data = {"seq_len": TOKENS, "micro_batch": 1, "global_batch": 128, "packing": "concat"}
    return changed(base, parallel=layout, data=data, precision={"compute": "bfloat16"})


def line(memory: MemoryPrediction, name: str) -> float:
    return sum(each.bytes for each in memory.lines if each.name == name)


@pytest.mark.parametrize("rank", range(4))
def test_buffers_of_attention_and_router(rank: int) -> None:
    """In every slot and layer: the input, three gradients of outputs of the model's dim, that of probs, and the
    input's."""
    memory = memory_at(changed(workload(), kernels=GRAPHS), rank)
    per_layer = TOKENS * (5 * DIM * WORD + TOP_K * 4)
    assert line(memory, "static buffers of graphs") == (4 - rank) * 12 * per_layer
    assert line(memory, "idle slots of graphs") == 0


def test_whole_layers_have_rows_too() -> None:
    bounded = workload(dispatcher="all_to_all_bounded", row_bound=1.25, pair_bound=1.5)
    memory = memory_at(changed(bounded, kernels=LAYERS), 3)
    # Eight pairs of 1.5 times their mean and an empty row.
    rows = 8 * (TOKENS * TOP_K * 3 // 16 + 1)
    token, probs = DIM * WORD, TOP_K * 4
    parts = (
        TOKENS * (5 * token + probs),
        TOKENS * (3 * token + probs) + rows * (token + 4),
        TOKENS * token + rows * (3 * token + 2 * 4),
        TOKENS * token + 2 * rows * token,
    )
    # A layer's input is the graph's output of the layer before.
    assert line(memory, "static buffers of graphs") == 12 * sum(parts) - 11 * TOKENS * token


def test_several_stages_of_a_rank_keep_idle_slots() -> None:
    """Not all of its stages hold most at the same time."""
    interleaved = workload(vpp=2, schedule="interleaved", stages=None)
    memory = predict_memory(changed(interleaved, kernels=GRAPHS))
    assert line(memory, "idle slots of graphs") > 0
    assert predict_memory(interleaved).total < memory.total


def test_captured_kernels_cost_the_host_less() -> None:
    small = changed(workload(), data={"seq_len": 512})
    seconds = [step_time(changed(small, kernels=kernels)).total for kernels in ({}, GRAPHS, LAYERS)]
    assert seconds[0] > seconds[1] > seconds[2]
