"""What a record leaves unsaid and its release's presets, its notes or its family say is read, and never against it."""

from __future__ import annotations

from typing import Any

import pytest

from moefold.blueprint.model_shape import MoE
from moefold.plan.published.points import published_workload
from moefold.plan.published.release_presets import with_preset

QWEN = {
    "key": "qwen3_30b", "family": "qwen3_30b", "moe": True, "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4,
    "head_dim": 128, "attn": "gqa", "ffn": 6144, "moe_ffn": 768, "experts": 128, "topk": 8, "shared_ffn": 0,
    "vocab": 151936, "mtp": 0, "act": "swiglu", "tied": False,
}  # fmt: skip


def record(id: str, gpu: str = "H100", num_gpus: int = 16, **changes: Any) -> dict[str, Any]:
    return {
        "id": id,
        "model": QWEN,
        "source": {"name": "Megatron-Bridge docs/performance-summary.md"},
        "hardware": {"gpu": gpu, "num_gpus": num_gpus, "nvlink_domain": 8},
        "precision": "bf16",
        "seq_len": 4096,
        "gbs": 1024,
        "mbs": 1,
        "parallel": {"tp": 1, "pp": 2, "cp": 1, "ep": 8, "etp": 1, "vpp": 12, "fsdp": None},
        "flags": {"routing": "token_drop"},
        "date": "2025-10",
        "leak_group": "own",
        **changes,
    }


def test_presets_fill_in_what_a_record_does_not_say() -> None:
    made = published_workload(with_preset(record("mb-25.09-pretrain-x")))
    assert made.run.kernels.graphs == "none" and made.dispatcher == "all_to_all"
    # Token dropping alone used to be read as graphs of whole layers; elsewhere it still is.
    assert published_workload(with_preset(record("somewhere-else"))).run.kernels.graphs == "full"
    own = record("mb-25.09-pretrain-x", flags={"cuda_graph_impl": "full_iteration"})
    assert published_workload(with_preset(own)).run.kernels.graphs == "full"


def test_a_stale_row_is_read_and_left_out_with_those_that_have_its_layout() -> None:
    made = with_preset(record("mb-26.02.01-pretrain-x", date="2026-03"))
    assert made["leak_group"] != "own"
    parallel = published_workload(made).parallel
    assert (parallel.pp, parallel.ep, parallel.vpp) == (1, 16, 1)
    assert with_preset(record("mb-26.02-pretrain-x"))["leak_group"] == "own"


@pytest.mark.parametrize(
    ("gpu", "note", "expected"),
    [
        ("B200", "4 GPUs with 184 GiB HBM (SKU not named)", "GB200"),
        ("B200", "power-limited B200", "B200-750W"),
        ("B200", "nothing of the GPU", "B200"),
    ],
)
def test_notes_say_which_gpu_it_was(gpu: str, note: str, expected: str) -> None:
    assert published_workload(record("x", gpu, notes=[note])).cluster.gpu.name == expected


def test_routers_are_fused_since_they_can_be_and_have_the_bias_of_their_family() -> None:
    fused = {date: published_workload(record("x", date=date)).framework.fused_router for date in ("2025-04", "2026-01")}
    assert fused == {"2025-04": False, "2026-01": True}
    elsewhere = record("x", date="2026-01", source={"name": "a thesis"})
    assert not published_workload(elsewhere).framework.fused_router
    for family, expected in (("qwen3_30b", False), ("kimi_k2", True)):
        made = published_workload(record("x", model={**QWEN, "family": family}))
        feeds = [layer.feed for layer in made.model.layers]
        assert all(isinstance(feed, MoE) and feed.aux_free is expected for feed in feeds)
        assert made.run.model.moe is not None and made.run.model.moe.router.expert_bias is expected


def test_torchtitan_forces_no_balance() -> None:
    flags = {"system": "torchtitan FSDP2", "dispatcher": "deepep"}
    assert published_workload(record("x", flags=flags)).imbalance > 1
    assert published_workload(record("x", flags={**flags, "routing": "fake balanced gate"})).imbalance == 1
