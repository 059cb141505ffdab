"""The papers' tables of optimisations, one after the other, beside what the planner predicts of each step.

A table is data: each row has the published figure and what changes in the workload. Where the planner has no such
switch (a kernel that was fused, a process that was bound to its cores), the row says so. So two things can be read: how
well single steps are predicted, and what the planner cannot see.

    python -m benchmarks.optimization_tables          writes the tables into docs/walls.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from moefold.blueprint.model_shape import Attention, Layer, ModelShape, MoE
from moefold.config.data import DataConfig
from moefold.config.memory import MemoryConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.plan.predict import predict
from moefold.plan.workload import MEGATRON_PRECISION, Framework, Workload, changed, in_format
from moefold.recipes.catalog import RECIPES

Change = Callable[[Workload], Workload]
PAGE = Path(__file__).parent.parent / "docs" / "walls.md"
BEGIN, END = "<!-- optimisation tables: begin -->", "<!-- optimisation tables: end -->"


class Row(NamedTuple):
    """``change`` from the row before; None where the planner has no such switch."""

    name: str
    published: float
    change: Change | None


class Table(NamedTuple):
    title: str
    unit: str
    start: Workload
    rows: tuple[Row, ...]


class Predicted(NamedTuple):
    """Of a row: throughput in the table's unit, which gives the first row its published figure where it is relative."""

    row: Row
    throughput: float


def _same(workload: Workload) -> Workload:
    return workload


def _with(**sections: dict[str, Any]) -> Change:
    return lambda workload: changed(workload, **sections)


def _graphs(workload: Workload) -> Workload:
    scope = ("attn", "moe_router", "moe_preprocess")
    return changed(workload, kernels={"graphs": "partial", "graph_scope": scope})


def _then(first: Change, second: Change) -> Change:
    return lambda workload: second(first(workload))


def _narrow(workload: Workload) -> Workload:
    return changed(workload, precision=vars(in_format(workload.run.precision, "fp8_tensor")))


# ---- DeepSeek-V3 on 256 GB200: the guide of Megatron Core and Transformer Engine, its table of section 3 ----

_DEEPSEEK = RunConfig(
    model=replace(RECIPES["deepseek_v3"]().model, num_mtp=0),
    parallel=ParallelConfig(
        pp=8, vpp=4, ep=32, schedule="interleaved", stages="Et|(tt|)*30L", sharding="zero1", dispatcher="all_to_all"
    ),
    precision=replace(in_format(MEGATRON_PRECISION, "mxfp8"), moments="bfloat16"),
    data=DataConfig(4096, 2048),
    memory=MemoryConfig(recompute=("feed_forward", "mla_up")),
)
GB200 = Table(
    "DeepSeek-V3 on 256 GB200, MXFP8, pp8 vpp4 ep32 (guide of Megatron Core, 2025)",
    "TFLOPS/GPU",
    Workload(_DEEPSEEK, cluster_of("GB200", 256), Framework("megatron", date=2025.75)),
    (
        Row("baseline: NCCL all-to-all", 494.46, _same),
        Row("scaling factors allocated at once, faster permute", 529.55, None),
        Row("router fused", 540.00, None),
        Row("DeepEP", 566.07, _with(parallel={"dispatcher": "deepep"})),
        Row("up-projections not recomputed", 610.71, _with(memory={"recompute": ("feed_forward", "activation")})),
        Row("CUDA graphs of attention, router and preprocessing", 663.27, _graphs),
        Row("DeepEP tuned", 691.49, None),
        Row("processes bound to NUMA nodes", 762.12, None),
        Row("quantisation: PDL, scaling factors swizzled in one kernel", 797.67, None),
        Row("CUDA graphs of the shared expert", 829.93, None),
        Row("HybridEP", 943.56, _with(parallel={"dispatcher": "hybridep"})),
        Row("processes bound, again", 956.21, None),
        Row("quantisation fused with norms", 970.01, None),
    ),
)

# ---- MegaScale-MoE, table 5: 352B on 240 H800, batch 720 ----

_MEGASCALE_LAYER = Layer(
    Attention(heads=32, kv_heads=8, qk_dim=128, v_dim=128), MoE(experts=32, top_k=3, dim=14336, shared_hidden_dim=14336)
)
_MEGASCALE = RunConfig(
    parallel=ParallelConfig(tp=8, pp=15, ep=1, etp=8, sharding="zero1", dispatcher="all_to_all"),
    precision=MEGATRON_PRECISION,
    data=DataConfig(8192, 720),
    memory=MemoryConfig(recompute=("norms", "activation")),
)
_SEQUENCE_AND_EXPERTS = _with(parallel={"tp": 1, "cp": 8, "ep": 8, "etp": 1})
MEGASCALE = Table(
    "352B on 240 H800, BF16, pp15 (MegaScale-MoE, table 5)",
    "times the baseline",
    Workload(
        _MEGASCALE,
        cluster_of("H800", 240),
        Framework("megatron", date=2025.0),
        shape=ModelShape(4096, 65536, (_MEGASCALE_LAYER,) * 60),
    ),
    (
        Row("baseline: TP of attention and experts, nothing overlapped", 1.00, _same),
        Row("SP of attention, EP of experts", 1.13, _SEQUENCE_AND_EXPERTS),
        Row("overlap between operators", 1.22, _with(parallel={"overlap": ("ep",)})),
        Row("overlap inside of operators", 1.28, None),
    ),
)

# ---- MoE parallel folding, table 2: Mixtral 8x22B on 128 H100 ----

_MIXTRAL = RunConfig(
    model=RECIPES["mixtral_8x22b"]().model,
    parallel=ParallelConfig(tp=2, pp=8, ep=4, etp=2, sharding="zero1", dispatcher="all_to_all"),
    precision=MEGATRON_PRECISION,
    data=DataConfig(4096, 256),
)
_FOLDED, _UNFOLDED = _with(parallel={"ep": 8, "etp": 1}), _with(parallel={"ep": 4, "etp": 2})
FOLDING = Table(
    "Mixtral 8x22B on 128 H100, tp2 pp8 (MoE parallel folding, table 2)",
    "TFLOPS/GPU",
    Workload(_MIXTRAL, cluster_of("H100", 128), Framework("megatron", date=2025.3)),
    (
        Row("BF16, ep4 etp2", 458.3, _same),
        Row("BF16, folded: ep8 etp1", 487.7, _FOLDED),
        Row("FP8, ep4 etp2", 575.1, _then(_UNFOLDED, _narrow)),
        Row("FP8, folded: ep8 etp1", 631.7, _FOLDED),
    ),
)

TABLES = (GB200, MEGASCALE, FOLDING)


def predictions(table: Table) -> list[Predicted]:
    workload, found = table.start, []
    per_unit = 0.0
    for row in table.rows:
        workload = workload if row.change is None else row.change(workload)
        made = predict(workload)
        if table.unit == "times the baseline":
            per_unit = per_unit or made.tokens_per_second_per_gpu
            found.append(Predicted(row, made.tokens_per_second_per_gpu / per_unit))
        else:
            found.append(Predicted(row, made.tflops_per_gpu))
    return found


def as_markdown(table: Table) -> str:
    digits = 2 if table.unit == "times the baseline" else 0
    lines = [
        f"**{table.title}**, {table.unit}:",
        "",
        "| step | published | gain | predicted | gain |",
        "|---|---:|---:|---:|---:|",
    ]
    before: Predicted | None = None
    for each in predictions(table):
        row, gains = each.row, ("", "")
        if before is not None:
            gains = (_gain(row.published / before.row.published), _gain(each.throughput / before.throughput))
        predicted = f"{each.throughput:.{digits}f}"
        if row.change is None:
            predicted, gains = "no such switch", (gains[0], "")
        lines.append(f"| {row.name} | {row.published:.{digits}f} | {gains[0]} | {predicted} | {gains[1]} |")
        before = each
    return "\n".join(lines)


def _gain(factor: float) -> str:
    return f"{factor - 1:+.1%}"


def section() -> str:
    return "\n\n".join([BEGIN, *map(as_markdown, TABLES), END])


def main() -> None:
    text = PAGE.read_text("utf-8")
    start, end = text.index(BEGIN), text.index(END) + len(END)
    PAGE.write_text(text[:start] + section() + text[end:], "utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
