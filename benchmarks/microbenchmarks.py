"""Single operations that others have measured, beside what the planner's rates make of them: a table of docs/plan.md.

A run's time is a sum of operations, and constants fitted to runs can hide that single operations are predicted wrongly,
as long as the errors cancel. Here nothing can cancel: a matmul of one shape, an attention of one length, one exchange.
The shape is what the planner makes of it: a rate for all matmuls, bytes at the memory's rate, tiles and waves of tiles
that are filled in part. What else a shape does (a short sum, a short time) is what these errors show.

    python -m benchmarks.microbenchmarks FOLDER       FOLDER has microbench.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from moefold.blueprint.model_shape import MoE
from moefold.config.data import DataConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.plan.op_costs import attention_tails, in_waves, roofline
from moefold.plan.op_sizes import Sizes, sizes_of
from moefold.plan.timing.constants import CURRENT
from moefold.plan.timing.throughput import Rates, dispatch_seconds, rates_of
from moefold.plan.traffic import dispatch_bytes
from moefold.plan.workload import MEGATRON_PRECISION, Framework, Workload, in_format
from moefold.recipes.catalog import recipe
from moefold.tables import markdown_table

PAGE = Path(__file__).parent.parent / "docs" / "plan.md"
BEGIN, END = "<!-- single operations: begin -->", "<!-- single operations: end -->"
# Below so many rows, columns or terms a matmul is called small.
SMALL = 512
# The collection counts attention over the whole square: some of its forward rates are above a GPU's peak. Kernels of
# causal attention compute half of that, and the planner counts that half.
CAUSAL = 0.5
FORMATS = {"bf16": "bfloat16", "mxfp8": "mxfp8", "fp8_blockwise": "fp8_blockwise"}
Measurement = dict[str, Any]


class Compared(NamedTuple):
    """Predicted time over measured time, less 1."""

    kind: str
    gpu: str
    error: float


def workload_on(
    gpu: str, form: str = "bfloat16", ep: int = 1, gpus: int = 8, dispatcher: str = "all_to_all"
) -> Workload:
    """DeepSeek-V3's layers, as the exchanges were measured with."""
    run = RunConfig(
        model=recipe("deepseek_v3").model,
        parallel=ParallelConfig(ep=ep, sharding="zero1", dispatcher=dispatcher),  # type: ignore[arg-type]
        precision=in_format(MEGATRON_PRECISION, form),  # type: ignore[arg-type]
        data=DataConfig(4096, gpus),
    )
    return Workload(run, cluster_of(gpu, gpus), Framework("megatron", date=2026.0))


def compared(measured: Measurement) -> Compared | None:
    """None where it is not said how large the operation was, or on which GPU."""
    kind, gpu, form = measured["kind"], measured.get("gpu", ""), FORMATS.get(measured.get("dtype") or "")
    if kind == "ep_comm" and "time_us" in measured:
        return _exchange(measured)
    if form is None or "tflops" not in measured or "shape" not in measured:
        return None
    shape, workload = measured["shape"], workload_on(gpu, form)
    rates, sizes = rates_of(workload, CURRENT, float(shape.get("seq_len", 4096))), sizes_of(workload)
    if kind == "gemm":
        name, seconds_per_flop = _matmul(shape, sizes, rates)
    elif kind == "grouped_gemm":
        name, seconds_per_flop = _grouped(shape, sizes, rates)
    else:
        name, seconds_per_flop = _attention(kind, shape, sizes, rates)
    return Compared(name, gpu, measured["tflops"] * 1e12 * seconds_per_flop - 1)


def _matmul(shape: Measurement, sizes: Sizes, rates: Rates) -> tuple[str, float]:
    m, n, k = (float(shape[side]) for side in "mnk")
    moved = shape.get("b", 1) * (2 * (m * k + k * n) + _out_bytes(shape) * m * n)
    flops = 2.0 * shape.get("b", 1) * m * n * k
    name = f"every side at least {SMALL}" if min(m, n, k) >= SMALL else f"a side below {SMALL}"
    return f"matmul, {name}", rates.gemm * roofline(
        in_waves(flops, shape.get("b", 1) * m * n, k, sizes), moved, sizes
    ) / flops


def _grouped(shape: Measurement, sizes: Sizes, rates: Rates) -> tuple[str, float]:
    """Of every expert as many rows: tiles are filled as far as that number fills them. Weight gradients are added up in
    the format of the main gradients, or written."""
    experts, m, n, k = (float(shape[side]) for side in ("ng", "M", "N", "K"))
    sums = _out_bytes(shape | {"out_dtype": shape["main_grad_dtype"]}) if shape["stage"] == "bwd_grad_w" else 2.0
    moved = experts * (2 * m * (n + k) + sums * n * k)
    flops = 2.0 * experts * m * n * k
    tiled = 2.0 * experts * ceil(m / sizes.tile) * sizes.tile * n * k
    name = f"grouped GEMM, {'under' if m < SMALL else 'at least'} {SMALL} rows per expert"
    return name, rates.grouped * roofline(tiled, moved, sizes) / flops


def _attention(kind: str, shape: Measurement, sizes: Sizes, rates: Rates) -> tuple[str, float]:
    forward, backward = attention_tails(float(shape["batch"] * shape["head_num"] * shape["seq_len"]), sizes)
    if kind == "sdpa_fwd":
        return "attention, forward", CAUSAL * forward * rates.attention_forward
    return "attention, backward", CAUSAL * backward * rates.attention_backward


def _out_bytes(shape: Measurement) -> float:
    wide = 4.0 if shape.get("out_dtype") == "fp32" else 2.0
    return 2 * wide if shape.get("accumulate") == "True" else wide


def _exchange(measured: Measurement) -> Compared:
    """Rows of 4,096 tokens to the experts, or back: rows in bfloat16 both ways."""
    ep, plain = measured["ep"], measured["backend"] != "hybridep"
    workload = workload_on(measured["gpu"], ep=ep, gpus=max(ep, 8), dispatcher="all_to_all" if plain else "hybridep")
    moe = next(layer.feed for layer in workload.model.layers if isinstance(layer.feed, MoE))
    seconds = dispatch_seconds(dispatch_bytes(workload, replace(moe, experts=measured["experts"])), workload, CURRENT)
    where = "inside of a domain" if ep <= workload.cluster.usable_domain else "between hosts"
    name = f"{'all-to-all' if plain else 'HybridEP'}, {where}"
    return Compared(name, measured["gpu"], seconds / (measured["time_us"] * 1e-6) - 1)


def rows(measurements: list[Measurement]) -> Iterator[tuple[str, ...]]:
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    everything = [each for measured in measurements if (each := compared(measured)) is not None]
    for each in everything:
        found[each.kind, each.gpu].append(each.error)
    for (kind, gpu), errors in sorted(found.items()):
        yield kind, gpu, str(len(errors)), f"{median(errors):+.0%}", *within(errors)
    yield "all", "", str(len(everything)), "", *within([each.error for each in everything])


def within(errors: list[float]) -> tuple[str, str]:
    """Half of the errors are no larger, and nine of ten."""
    sizes = [abs(error) for error in errors]
    return f"{median(sizes):.0%}", f"{quantiles(sizes, n=10)[-1] if len(sizes) > 1 else sizes[0]:.0%}"


def section(folder: Path) -> str:
    measurements = [json.loads(line) for line in (folder / "microbench.jsonl").read_text("utf-8").splitlines()]
    header = ("operation", "GPU", "number", "predicted time, median", "half within", "nine of ten within")
    return f"{BEGIN}\n\n{markdown_table(header, list(rows(measurements)))}\n\n{END}"


def write_section(made: str, begin: str, end: str) -> None:
    """Into the page, in the place of what is between the marks that it begins and ends with."""
    before, rest = PAGE.read_text("utf-8").split(begin)
    PAGE.write_text(before + made + rest.split(end)[1], "utf-8")
    print(made)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.microbenchmarks",
        description="Predicted times of single operations over measured ones, into docs/plan.md.",
    )
    parser.add_argument("folder", type=Path, help="has microbench.jsonl")
    write_section(section(parser.parse_args().folder), BEGIN, END)


if __name__ == "__main__":
    main()
