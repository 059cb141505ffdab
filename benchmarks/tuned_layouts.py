"""Write the layouts that recipes carry for kinds and numbers of GPUs: the planner's choice, with 5 % of memory free.

Rows that are in the file are kept unless they are named: `python -m benchmarks.tuned_layouts deepseek_v3@h100x1024`.
With `--published FOLDER`, a collection of published runs, every row gets the nearest of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import moefold
from moefold.plan.launch_command import changes_to_run, with_stages
from moefold.plan.published.points import nearest_record, read_records, record_words
from moefold.plan.published.records import Record

FILE = Path(moefold.__file__).parent / "recipes" / "tuned_layouts.json"
CLUSTERS = {
    "mixtral_8x7b": ("h100x16", "h100x64"),
    "mixtral_8x22b": ("h100x64", "h100x128"),
    "qwen3_30b_a3b": ("h100x8", "h100x64", "gb200x64"),
    "qwen3_235b_a22b": ("h100x256", "gb200x128"),
    "deepseek_v2_lite": ("h100x8", "h100x64"),
    "deepseek_v3": ("h100x1024", "h100x2048", "gb200x256"),
    "olmoe_1b_7b": ("h100x8", "h100x64"),
    "gpt_oss_20b": ("h100x8", "h100x64"),
    "gpt_oss_120b": ("h100x64",),
    "kimi_k2": ("h100x1024", "gb200x256"),
    "qwen3_30b_a3b+latent_efficiency": ("h100x64",),
    "qwen3_30b_a3b+latent_accuracy": ("h100x64",),
    "qwen3_235b_a22b+latent_efficiency": ("gb200x128",),
    "qwen3_235b_a22b+latent_accuracy": ("gb200x128",),
}


def row_of(name: str, where: str) -> dict[str, object]:
    gpu, _, number = where.rpartition("x")
    run = moefold.load_run(name)
    plan = moefold.plan(run, gpu=gpu.upper(), gpus=int(number))
    changes = changes_to_run(with_stages(plan.proposal.chosen.workload), run)
    return {
        "changes": changes,
        "step_seconds": float(f"{plan.step_seconds:.4g}"),
        "gib": round(plan.memory_bytes / 2**30, 1),
    }


def nearest_of(name: str, where: str, records: Iterable[Record]) -> dict[str, object] | None:
    gpu, _, number = where.rpartition("x")
    record = nearest_record(moefold.load_run(name), gpu.upper(), int(number), records)
    if record is None:
        return None
    what, source = record_words(record)
    rate = float(f"{record['target']['tokens_per_s_per_gpu']:.4g}")
    return {"id": record["id"], "what": what, "source": source, "tokens_per_gpu_second": rate}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuned_layouts", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="RECIPE@GPUxN", help="make these again")
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="find the nearest published run of every row")
    args = parser.parse_args(words)
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    records = read_records(args.published) if args.published else []
    for name, clusters in CLUSTERS.items():
        for where in clusters:
            row = known.setdefault(name, {}).get(where, {})
            if not row or f"{name}@{where}" in args.names:
                row = row_of(name, where) | {"nearest": row.get("nearest")}
                print(f"{name}@{where}: {row}", file=sys.stderr, flush=True)
            if records:
                row = row | {"nearest": nearest_of(name, where, records)}
            known[name][where] = row
            ordered = {
                name: {where: known[name][where] for where in each if where in known[name]}
                for name, each in CLUSTERS.items()
                if name in known
            }
            FILE.write_text(json.dumps(ordered, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
