"""Runs that no constant was fitted to: vTrain's table of one server with eight A100, beside what the planner predicts.

The collection that constants are fitted to has 52 rows of it, drawn at random. The table has 1,440: GPT models of 12 to
24 layers, 1,024 or 2,048 wide, in all layouts of 2 to 8 GPUs under Megatron-DeepSpeed (VIA-Research/vTrain on GitHub,
`data/ground_truth_single.csv`). Most of them wait for the host, so they are a test of launches and not of matmuls.

    python -m benchmarks.small_runs TABLE FOLDER      FOLDER is the collection, whose rows are left out
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.microbenchmarks import within, write_section
from moefold.errors import MoefoldError
from moefold.plan.published.points import published_workload, read_records
from moefold.plan.timing.step_time import step_time
from moefold.tables import markdown_table

BEGIN, END = "<!-- small runs: begin -->", "<!-- small runs: end -->"
# Not in the table, and what vTrain's own configurations have.
VOCAB = 51200
SERVER = 8


class Row(NamedTuple):
    """As the table has them, in its order; heads are the model's."""

    gpus: int
    batch: int
    microbatch: int
    dim: int
    heads: int
    layers: int
    seq_len: int
    tp: int
    dp: int
    pp: int


def read_table(text: str) -> dict[Row, float]:
    """Seconds of a step."""
    found: dict[Row, float] = {}
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        *sizes, milliseconds = line.split(",")
        if len(sizes) != len(Row._fields):
            raise MoefoldError(f"line {number}: {len(sizes) + 1} columns, and the table of vTrain has 11")
        found[Row(*map(int, sizes))] = float(milliseconds) / 1e3
    return found


def record_of(row: Row) -> Mapping[str, Any]:
    """In the collection's own words, so that it is read as its rows are."""
    return {
        "id": f"vtrain-single-{'-'.join(map(str, row))}",
        "date": "2024",
        "source": {"name": "vTrain data/ground_truth_single.csv"},
        "model": {
            "key": f"GPT h{row.dim} L{row.layers}", "family": "gpt_vtrain_single", "moe": False, "layers": row.layers,
            "hidden": row.dim, "heads": row.heads, "kv_heads": row.heads, "head_dim": row.dim // row.heads,
            "attn": "mha", "ffn": 4 * row.dim, "vocab": VOCAB, "act": "gelu", "tied": True,
        },
        "hardware": {"gpu": "A100", "num_gpus": row.gpus, "gpus_per_node": SERVER, "nvlink_domain": SERVER},
        "precision": "fp16", "seq_len": row.seq_len, "gbs": row.batch, "mbs": row.microbatch,
        "ga": row.batch // row.microbatch // row.dp,
        "parallel": {"tp": row.tp, "pp": row.pp, "cp": 1, "dp": row.dp},
        "flags": {"system": "Megatron-DeepSpeed", "pp_schedule": "1f1b"},
    }  # fmt: skip


def row_of(record: Mapping[str, Any]) -> Row:
    """Of a row that the collection has."""
    model, parallel = record["model"], record["parallel"]
    return Row(
        record["hardware"]["num_gpus"], record["gbs"], record["mbs"], model["hidden"], model["heads"], model["layers"],
        record["seq_len"], parallel["tp"], parallel["dp"], parallel["pp"],
    )  # fmt: skip


def error(row: Row, seconds: float) -> float:
    """Predicted time over measured time, less 1."""
    return step_time(published_workload(record_of(row))).total / seconds - 1


def rows(errors: Mapping[Row, float]) -> Iterator[tuple[str, ...]]:
    by_tp: dict[int, list[float]] = defaultdict(list)
    for row, each in errors.items():
        by_tp[row.tp].append(each)
    for tp, found in sorted(by_tp.items()):
        yield f"tp {tp}", *_line(found)
    yield "all", *_line(list(errors.values()))


def _line(errors: list[float]) -> tuple[str, ...]:
    mean = fmean(abs(each) for each in errors)
    return f"{len(errors):,}", f"{median(errors):+.0%}", f"{mean:.1%}", *within(errors)


def section(table: Mapping[Row, float], known: set[Row]) -> str:
    errors = {row: error(row, seconds) for row, seconds in table.items() if row not in known}
    header = ("layouts", "runs", "predicted time, median", "mean error", "half within", "nine of ten within")
    return f"{BEGIN}\n\n{markdown_table(header, list(rows(errors)))}\n\n{END}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small_runs",
        description="Predicted times of small runs that no constant was fitted to, into docs/plan.md.",
    )
    parser.add_argument("table", type=Path, help="ground_truth_single.csv of vTrain")
    parser.add_argument("folder", type=Path, help="the collection of published runs")
    args = parser.parse_args()
    known = {row_of(record) for record in read_records(args.folder) if record["id"].startswith("vtrain-single")}
    write_section(section(read_table(args.table.read_text("utf-8")), known), BEGIN, END)


if __name__ == "__main__":
    main()
