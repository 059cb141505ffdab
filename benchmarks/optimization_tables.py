"""The papers' tables of optimisations, one after the other, beside what the planner predicts of each step.

A table is data: each row has the published figure and what changes in the workload. Where the planner has no such
switch (a kernel that was fused, a process that was bound to its cores), the row says so. So two things can be read: how
well single steps are predicted, and what the planner cannot see.

Tables 3, 4, 5 and 20 of the Megatron Core report have bytes as well, and runs that differ in more than one thing. A
step of all tables together is a published change for which there is a prediction; ``signs`` says of each whether it
goes the way that was measured.

    python -m benchmarks.optimization_tables          writes the tables into docs/walls.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.report_runs import GIB, PROBS_INSIDE, TABLE_3, TABLE_3_RANK, TABLE_5, TABLE_20, Sections, both
from moefold.blueprint.model_shape import Attention, Layer, ModelShape, MoE
from moefold.config.data import DataConfig
from moefold.config.memory import MemoryConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.plan.memory.peak import memory_at, predict_memory
from moefold.plan.predict import predict
from moefold.plan.workload import MEGATRON_PRECISION, Framework, Workload, changed, in_format
from moefold.recipes.catalog import RECIPES
from moefold.tables import markdown_table

Switch = Callable[[Workload], Workload]
PAGE = Path(__file__).parent.parent / "docs" / "walls.md"
BEGIN, END = "<!-- optimisation tables: begin -->", "<!-- optimisation tables: end -->"


class Row(NamedTuple):
    """``change`` from the row before; None where the planner has no such switch."""

    name: str
    published: float
    change: Switch | None


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


def _with(**sections: dict[str, Any]) -> Switch:
    return lambda workload: changed(workload, **sections)


def _graphs(workload: Workload) -> Workload:
    scope = ("attn", "moe_router", "moe_preprocess")
    return changed(workload, kernels={"graphs": "partial", "graph_scope": scope})


def _fused_router(workload: Workload) -> Workload:
    return replace(workload, framework=replace(workload.framework, fused_router=True))


def _then(first: Switch, second: Switch) -> Switch:
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
        Row("router fused", 540.00, _fused_router),
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
        # Of one microbatch: exchanges run beside the shared expert, not beside another microbatch.
        Row("overlap between operators", 1.22, _with(parallel={"overlap": ("shared_experts",)})),
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

# ---- the Megatron Core report: bytes of its tables 3 and 4, and of the sections beside them ----


class Bytes(NamedTuple):
    """GiB that the report prints, and those predicted; negative where something is saved."""

    name: str
    published: float
    predicted: float


def levels() -> list[Bytes]:
    """Table 3: what a rank holds."""
    memory = memory_at(TABLE_3, TABLE_3_RANK)
    weights = memory.of("weights") + memory.of("gradients")
    return [
        Bytes("weights and gradients", 36.4, weights / GIB),
        Bytes("main weights and optimizer states", 32.1, memory.of("optimizer") / GIB),
        Bytes("activations", 131.0, memory.of("activations") / GIB),
        Bytes("total", 199.5, (weights + memory.of("optimizer") + memory.of("activations")) / GIB),
    ]


def savings() -> list[Bytes]:
    """Table 4 and sections 4.1.2, 4.1.3 and 4.1.6: what a change makes of activations, or of optimizer states."""
    inside: Sections = PROBS_INSIDE
    narrow: Sections = {"precision": {"recipe": "fp8_tensor"}}
    fp8 = changed(TABLE_3, **both(inside, narrow))
    cases: list[tuple[str, float, Workload, Sections]] = [
        ("memory-efficient permutation (4.1.2)", -26.3, TABLE_3, inside),
        ("FP8 activations (4.1.3)", -16.0, TABLE_3, narrow),
        ("MLA's up-projections recomputed (table 4)", -30.4, fp8, {"memory": {"recompute": ("mla_up",)}}),
        ("SwiGLU recomputed (table 4)", -3.8, fp8, {"memory": {"recompute": ("activation",)}}),
        ("norms recomputed (table 4)", -8.2, fp8, {"memory": {"recompute": ("norms",)}}),
        ("bfloat16 moments (4.1.6: 10 to 12)", -11.0, TABLE_3, {"precision": {"moments": "bfloat16"}}),
    ]
    found = []
    for name, published, before, change in cases:
        line: Literal["optimizer", "activations"] = "optimizer" if "moments" in name else "activations"
        held = [memory_at(each, TABLE_3_RANK).of(line) for each in (before, changed(before, **change))]
        found.append(Bytes(name, published, (held[1] - held[0]) / GIB))
    return found


class Change(NamedTuple):
    """A published change and the predicted one, as factors less 1."""

    name: str
    published: float
    predicted: float


# Memory in GB and TFLOPS/GPU, before and after.
_OFFLOADING = ((169, 151, 945, 930), (172, 175, 800, 920))


def offloading() -> list[Change]:
    """Table 5."""
    found = []
    for (name, (before, after)), figures in zip(TABLE_5.items(), _OFFLOADING, strict=True):
        memory = predict_memory(after).total / predict_memory(before).total
        found.append(Change(f"{name}: memory", figures[1] / figures[0] - 1, memory - 1))
        speed = predict(after).tflops_per_gpu / predict(before).tflops_per_gpu
        found.append(Change(f"{name}: throughput", figures[3] / figures[2] - 1, speed - 1))
    return found


def runs() -> list[Change]:
    """Table 20: of one model, each row over the next. Qwen's last one has sequences of a length of its own."""
    found = []
    for first, second in pairwise(TABLE_20):
        if first.model != second.model or first.batch[0] != second.batch[0]:
            continue
        model, *names = first.model, *(f"{each.gpus} {each.gpu}, {each.form}" for each in (first, second))
        predicted = predict(first.workload()).tflops_per_gpu / predict(second.workload()).tflops_per_gpu
        name = f"{model}: {' over '.join(names)}"
        found.append(Change(name, first.tflops / second.tflops - 1, predicted - 1))
    return found


def _report() -> list[str]:
    level_rows = [(each.name, f"{each.published:.1f}", f"{each.predicted:.1f}") for each in levels()]
    byte_rows = [(each.name, f"{each.published:+.1f}", f"{each.predicted:+.1f}") for each in savings()]
    changes = [(each.name, f"{each.published:+.1%}", f"{each.predicted:+.1%}") for each in (*offloading(), *runs())]
    return [
        "**DeepSeek-V3, BF16, pp4 vpp4 ep64 on 256 GPUs (Megatron Core report, tables 3 and 4)**, GiB of a rank:",
        markdown_table(("memory", "published", "predicted"), level_rows),
        markdown_table(("change", "published", "predicted"), byte_rows),
        "**Offloading and layouts (Megatron Core report, tables 5 and 20)**, change of memory or of TFLOPS/GPU:",
        markdown_table(("step", "published", "predicted"), changes),
    ]


def signs() -> Iterator[tuple[str, bool]]:
    """Of every step that there is a prediction of: whether it goes the way that was measured."""
    for table in TABLES:
        for before, after in pairwise(predictions(table)):
            if after.row.change is not None:
                published = after.row.published > before.row.published
                yield after.row.name, (after.throughput > before.throughput) == published
    changes: list[Bytes | Change] = [*savings(), *offloading(), *runs()]
    for each in changes:
        yield each.name, round(each.published, 3) * round(each.predicted, 3) > 0


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
    found = list(signs())
    right, wrong = sum(is_right for _, is_right in found), [name for name, is_right in found if not is_right]
    count = f"Of {len(found)} steps with a prediction {right} go the way that was measured; not: {'; '.join(wrong)}."
    return "\n\n".join([BEGIN, *map(as_markdown, TABLES), *_report(), count, END])


def main() -> None:
    text = PAGE.read_text("utf-8")
    start, end = text.index(BEGIN), text.index(END) + len(END)
    PAGE.write_text(text[:start] + section() + text[end:], "utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
