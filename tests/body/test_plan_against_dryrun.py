"""The planner against the dry run, which carries the real step out: peak memory within 5 %, collectives to the byte."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.marks import slow_except
from tests.published_models import PUBLISHED, model_of, small

from moefold.config.memory import MemoryConfig
from moefold.config.model import LoraConfig
from moefold.config.run import RunConfig
from moefold.dryrun.dry_run import DryRun, dry_run
from moefold.hardware.cluster import cluster_of
from moefold.plan.collective_counts import messages
from moefold.plan.memory.peak import memory_at
from moefold.plan.published.predict_records import allocated
from moefold.plan.workload import workload_of_run
from moefold.recipes.catalog import recipe

ALL = ("attention", "feed_forward", "experts")


@dataclass(frozen=True)
class Case:
    """A recipe with another layout, and the pipeline rank that is looked at."""

    run: RunConfig
    world: int
    stage: int = 0

    @property
    def rank(self) -> int:
        return self.stage * (self.world // self.run.parallel.pp)


def case(name: str, world: int, stage: int = 0, **changes: Any) -> Case:
    """``changes``: layers, mtp, batch, seq_len, again, precision; all others are of the layout."""
    run = recipe(name)
    model = replace(
        run.model,
        num_layers=changes.pop("layers", run.model.num_layers),
        num_mtp=changes.pop("mtp", run.model.num_mtp),
    )
    data = replace(
        run.data,
        global_batch=changes.pop("batch"),
        seq_len=changes.pop("seq_len", run.data.seq_len),
        micro_batch=changes.pop("micro_batch", 1),
    )
    memory = MemoryConfig(tuple(changes.pop("again", ())))
    narrow = changes.pop("precision", {})
    one = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1, "vpp": 1, "schedule": "1f1b", "stages": None}
    parallel = replace(run.parallel, **{**one, **changes})
    precision = replace(run.precision, compute="bfloat16", **narrow)
    made = replace(run, model=model, data=data, memory=memory, parallel=parallel, precision=precision)
    return Case(made, world, stage)


def hybrid(world: int, stage: int = 0, **changes: Any) -> Case:
    """A few layers of Qwen3-Next, most of them of linear attention."""
    model = replace(model_of(PUBLISHED["Qwen3-Next-80B-A3B"]), num_layers=changes.pop("layers"))
    made = case("qwen3_30b_a3b", world, stage, **changes)
    return replace(made, run=replace(made.run, model=model))


def small_hybrid(world: int, **changes: Any) -> Case:
    model = replace(model_of(small("Qwen3-Next-80B-A3B")), num_layers=4)
    made = case("qwen3_30b_a3b_proxy", world, **changes)
    return replace(made, run=replace(made.run, model=model))


def adapted(chosen: Case, rank: int = 8) -> Case:
    """The same with LoRA adapters, which alone are trained."""
    model = replace(chosen.run.model, lora=LoraConfig(rank=rank))
    return replace(chosen, run=replace(chosen.run, model=model, optim=replace(chosen.run.optim, trained="adapters")))


def frozen(chosen: Case, *patterns: str) -> Case:
    return replace(chosen, run=replace(chosen.run, optim=replace(chosen.run.optim, frozen=patterns)))


def clipped(chosen: Case) -> Case:
    """The same with Muon, and QK-clip."""
    return replace(chosen, run=replace(chosen.run, optim=recipe("kimi_k2").optim))


# Whole recipes: kinds of recompute, sharding with and without replicas, every axis, schedules, MTP modules.
WHOLE = {
    "mixtral 8x7b, pipeline": case("mixtral_8x7b", 32, batch=64, pp=4, ep=8),
    "mixtral 8x22b, tensor parallel": case("mixtral_8x22b", 64, batch=64, pp=8, tp=4, ep=8),
    "qwen3 30b, sharded": case("qwen3_30b_a3b", 32, batch=64, ep=8),
    "qwen3 30b, copies, attention again": case(
        "qwen3_30b_a3b", 32, batch=64, ep=8, dp_replicate=2, edp_replicate=2, again=("attention",)
    ),
    "qwen3 30b, all again, contexts": case("qwen3_30b_a3b", 16, batch=16, seq_len=8192, cp=2, ep=8, again=ALL),
    "qwen3 30b, zero bubble": case("qwen3_30b_a3b", 16, batch=64, pp=4, vpp=2, ep=4, schedule="zb_v"),
    "qwen3 235b, experts again": case("qwen3_235b_a22b", 64, batch=128, pp=8, ep=8, again=("experts",)),
    "deepseek v2 lite": case("deepseek_v2_lite", 8, batch=16, ep=8),
    "deepseek v3, first stage": case(
        "deepseek_v3", 256, batch=4096, pp=4, vpp=4, ep=64, schedule="interleaved", again=("attention", "experts")
    ),
    "deepseek v3, third stage": case("deepseek_v3", 256, 2, batch=4096, pp=4, vpp=4, ep=64, schedule="interleaved"),
    "deepseek v3, a module ahead": case("deepseek_v3", 256, 7, batch=2048, mtp=1, pp=8, ep=32, again=ALL),
    "kimi k2": case("kimi_k2", 512, 1, batch=2048, pp=16, ep=32, again=("attention",)),
    "olmoe": case("olmoe_1b_7b", 8, batch=16, ep=8, micro_batch=2),
    "gpt-oss 20b": case("gpt_oss_20b", 8, batch=16, ep=8),
}
# Fewer layers of the same sizes.
SHORT = {
    "sharded": case("qwen3_30b_a3b", 16, layers=3, batch=32, ep=8),
    "split experts": case("mixtral_8x7b", 16, layers=3, batch=32, tp=2, ep=4, etp=2),
    "pairs, once per rank, experts again": case(
        "qwen3_30b_a3b",
        8,
        layers=4,
        batch=16,
        pp=2,
        ep=2,
        again=("attention", "experts"),
        dispatcher="deduplicated",
        schedule="1f1b_overlapped",
    ),
    "bounded rows": case("qwen3_30b_a3b", 16, layers=3, batch=32, ep=8, dispatcher="all_to_all_bounded"),
    "linear attention": hybrid(16, layers=4, batch=32, ep=8),
    "linear attention, pipeline": hybrid(16, 1, layers=6, batch=32, pp=2, ep=4),
    "adapters": adapted(case("qwen3_30b_a3b", 16, layers=3, batch=32, ep=8), rank=16),
    "latent, pipeline": case("deepseek_v2_lite", 16, 1, layers=5, batch=32, pp=2, ep=8, again=("experts",)),
}
# Sizes of a CPU: only bytes that travel are held against these, where every axis and option appears.
SMALL = {
    "tensor, all again": case("deepseek_v3_proxy", 4, batch=8, tp=2, ep=2, again=("attention", "experts")),
    "norms over heads": case("olmoe_1b_7b_proxy", 4, batch=8, tp=2, ep=2),
    "tensor and context": case("deepseek_v2_lite_proxy", 8, batch=8, seq_len=64, tp=2, cp=2, ep=4),
    "gathered experts": case("mixtral_8x7b_proxy", 4, batch=8, tp=2, ep=2, etp=2, dispatcher="all_gather"),
    "once per rank": case("qwen3_30b_a3b_proxy", 4, batch=8, tp=2, ep=4, dispatcher="deduplicated"),
    "once per rank, split": case("mixtral_8x7b_proxy", 8, batch=8, ep=4, etp=2, dispatcher="deduplicated"),
    "bounded rows": case(
        "qwen3_30b_a3b_proxy", 4, batch=8, tp=2, ep=4, dispatcher="all_to_all_bounded", row_bound=1.1, pair_bound=1.4
    ),
    "bounded rows, narrow, split, pipeline": case(
        "mixtral_8x7b_proxy",
        8,
        1,
        layers=4,
        batch=16,
        pp=2,
        ep=2,
        etp=2,
        dispatcher="all_to_all_bounded",
        precision={"dispatch": "mxfp8"},
    ),
    "chunks, split": case("mixtral_8x7b_proxy", 8, batch=8, tp=2, ep=2, etp=2, exchange_chunks=3),
    "chunks, gathered": case("mixtral_8x7b_proxy", 4, batch=8, ep=4, dispatcher="all_gather", exchange_chunks=2),
    "chunks, bounded": case(
        "qwen3_30b_a3b_proxy", 4, batch=8, ep=4, dispatcher="all_to_all_bounded", exchange_chunks=2
    ),
    "chunks, once per rank": case(
        "qwen3_30b_a3b_proxy", 4, batch=8, tp=2, ep=4, dispatcher="deduplicated", exchange_chunks=2
    ),
    "tensor in chunks": case("deepseek_v3_proxy", 4, batch=8, tp=2, ep=2, overlap=("tensor_parallel",), tp_chunks=3),
    "tensor in chunks, narrow sums": case(
        "qwen3_30b_a3b_proxy", 4, batch=8, tp=2, ep=4, overlap=("tensor_parallel",), precision={"tp_reduce": "bfloat16"}
    ),
    "muon": clipped(case("kimi_k2_proxy", 4, batch=8, ep=2)),
    "muon, flat": clipped(case("mixtral_8x7b_proxy", 4, batch=8, pp=2, ep=2, sharding="flat")),
    "muon, replicas, tensor": clipped(case("kimi_k2_proxy", 8, batch=8, tp=2, ep=2, dp_replicate=2, edp_replicate=2)),
    "muon, contexts": clipped(case("kimi_k2_proxy", 4, batch=8, cp=2, ep=2)),
    "muon, contexts, attention again": clipped(
        case("mixtral_8x7b_proxy", 4, batch=8, cp=2, tp=2, ep=2, again=("attention",))
    ),
    "chunks, once per host": case(
        "deepseek_v3_proxy", 8, batch=8, cp=2, ep=8, dispatcher="two_level", ep_inner=4, exchange_chunks=2
    ),
    "once per host": case("deepseek_v3_proxy", 8, batch=8, cp=2, ep=8, dispatcher="two_level", ep_inner=4),
    "once per host, split": case(
        "mixtral_8x7b_proxy", 8, batch=8, tp=2, ep=4, etp=2, dispatcher="two_level", ep_inner=2
    ),
    "a module ahead": case("deepseek_v3_proxy", 8, 1, batch=16, mtp=1, pp=2, vpp=2, ep=2, schedule="interleaved"),
    "pairs": case("qwen3_30b_a3b_proxy", 8, layers=4, batch=16, pp=2, vpp=2, ep=2, schedule="dualpipe_v"),
    "copies in a pipeline": case("qwen3_30b_a3b_proxy", 8, 1, layers=4, batch=16, pp=2, ep=2, dp_replicate=2),
    "four contexts": case("qwen3_30b_a3b_proxy", 4, batch=4, seq_len=64, cp=4, ep=4),
    "narrow sums": case(
        "deepseek_v3_proxy", 8, batch=8, tp=2, ep=2, precision={"reduce": "bfloat16", "tp_reduce": "bfloat16"}
    ),
    "narrow sums in a pipeline": case(
        "deepseek_v3_proxy", 8, 1, batch=8, pp=2, ep=2, dp_replicate=2, precision={"reduce": "bfloat16"}
    ),
    "narrow rows": case("mixtral_8x7b_proxy", 4, batch=8, ep=2, etp=2, precision={"dispatch": "mxfp8"}),
    "narrow rows, once per host, split": case(
        "mixtral_8x7b_proxy",
        8,
        batch=8,
        tp=2,
        ep=4,
        etp=2,
        dispatcher="two_level",
        ep_inner=2,
        precision={"dispatch": "fp8_blockwise"},
    ),
    "narrow rows, gathered": case(
        "mixtral_8x7b_proxy", 4, batch=8, tp=2, ep=2, dispatcher="all_gather", precision={"dispatch": "mxfp8"}
    ),
    "narrow rows, once per rank": case(
        "qwen3_30b_a3b_proxy", 4, batch=8, tp=2, ep=4, dispatcher="deduplicated", precision={"dispatch": "mxfp8"}
    ),
    "narrow parts": case(
        "deepseek_v3_proxy", 4, batch=8, tp=2, ep=2, again=("experts",), precision={"tp_reduce": "fp8_all_to_all"}
    ),
    "rounded parts": case("deepseek_v3_proxy", 4, batch=8, ep=2, precision={"reduce": "bfloat16_all_to_all"}),
    "rounded parts in a pipeline": case(
        "deepseek_v3_proxy", 8, 1, batch=8, pp=2, ep=2, dp_replicate=2, precision={"reduce": "bfloat16_all_to_all"}
    ),
    "flat, rounded parts": case(
        "deepseek_v3_proxy",
        12,
        batch=12,
        ep=2,
        dp_replicate=2,
        sharding="flat",
        precision={"reduce": "bfloat16_all_to_all"},
    ),
    "wide gathers": case("qwen3_30b_a3b_proxy", 4, batch=8, ep=2, precision={"gather": "float32"}),
    "flat": case("deepseek_v3_proxy", 6, batch=12, ep=2, sharding="flat"),
    "flat, a module ahead": case(
        "deepseek_v3_proxy", 8, 1, batch=16, mtp=1, pp=2, vpp=2, ep=2, schedule="interleaved", sharding="flat"
    ),
    "flat copies, tensor": case(
        "qwen3_30b_a3b_proxy", 8, batch=16, tp=2, ep=2, dp_replicate=2, sharding="flat", bucket_mb=1
    ),
    "flat, narrow sums, pairs": case(
        "deepseek_v3_proxy",
        8,
        1,
        layers=4,
        batch=16,
        pp=2,
        vpp=2,
        ep=2,
        schedule="dualpipe_v",
        sharding="flat",
        precision={"reduce": "bfloat16"},
    ),
    "flat, four steps": case(
        "deepseek_v3_proxy",
        8,
        1,
        batch=16,
        pp=2,
        ep=2,
        sharding="flat",
        param_sync="hierarchical",
        ranks_per_host=2,
    ),
    "flat, four steps, rounded parts": case(
        "qwen3_30b_a3b_proxy",
        8,
        batch=16,
        ep=2,
        sharding="flat",
        param_sync="hierarchical",
        ranks_per_host=4,
        precision={"reduce": "bfloat16_all_to_all"},
    ),
    "linear attention, tensor": small_hybrid(8, batch=16, tp=2, pp=2, ep=2, again=("attention",)),
    "adapters, tensor": adapted(case("deepseek_v3_proxy", 4, batch=8, tp=2, ep=2)),
    "adapters, flat pipeline": adapted(case("deepseek_v3_proxy", 8, 1, batch=16, pp=2, ep=2, sharding="flat")),
    "adapters, copies in a pipeline": adapted(
        case("qwen3_30b_a3b_proxy", 8, 1, layers=4, batch=16, pp=2, ep=2, dp_replicate=2)
    ),
    "frozen ends, tensor": frozen(case("qwen3_30b_a3b_proxy", 4, batch=8, tp=2, ep=2), "*.router.*", "embedding.*"),
    "uneven experts": case("kimi_k2_proxy", 8, batch=16, micro_batch=2, pp=2, ep=2),
}


def rehearsed(chosen: Case) -> DryRun:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dry_run(chosen.run, chosen.world, chosen.rank)


def same_messages(chosen: Case, seen: DryRun) -> None:
    said = messages(chosen.run, chosen.world, chosen.rank)
    assert [tuple(message) for message in said] == [tuple(collective) for collective in seen.collectives]


def near(chosen: Case, seen: DryRun) -> None:
    workload = workload_of_run(chosen.run, cluster_of("H100", chosen.world))
    assert allocated(memory_at(workload, chosen.stage)) == pytest.approx(seen.peak_total, rel=0.05)


@pytest.mark.parametrize(
    "name",
    slow_except(
        SMALL,
        "four contexts",
        "bounded rows",
        "chunks, split",
        "flat",
        "narrow rows",
        "narrow parts",
        "flat, rounded parts",
        "linear attention, tensor",
        "adapters, tensor",
    ),
)
def test_messages_are_those_of_the_step(name: str) -> None:
    same_messages(SMALL[name], rehearsed(SMALL[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_few_layers(name: str) -> None:
    seen = rehearsed(SHORT[name])
    near(SHORT[name], seen)
    same_messages(SHORT[name], seen)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_recipes(name: str) -> None:
    seen = rehearsed(WHOLE[name])
    near(WHOLE[name], seen)
    same_messages(WHOLE[name], seen)
