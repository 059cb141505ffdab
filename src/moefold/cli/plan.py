"""`moefold plan`: memory, step time, the binding wall, and the best layout of a run. No GPU, no torch."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.cli.run_argument import add_run_argument
from moefold.errors import ConfigError, MoefoldError, Problem
from moefold.hardware.cluster import GPUS
from moefold.private_files import replace_file
from moefold.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from moefold.plan.search.proposal import Question

EXAMPLES = """examples:
  moefold plan deepseek_v3 --gpu H100 --gpus 1024
  moefold plan qwen3_235b_a22b --gpu GB200 --gpus 256 --framework megatron --fix tp=1,ep=32,64 --html plan.html
  moefold plan deepseek_v3 --gpu GB200 --gpus 256 --recipes
  moefold plan my_run.yaml --gpus 64 --no-search --json
  moefold plan debug_10m --machine machine.json --gpus 4
  moefold plan deepseek_v3 --cluster my_cluster.yaml
  moefold plan deepseek_v3 --gpus 1024 --fit 60GiB
  moefold plan deepseek_v3 --gpus 1024 --anchor runs/measured
  moefold plan qwen3_30b_a3b --gpus 64 --framework megatron --anchor measured.yaml
  moefold plan deepseek_v3 --gpus 1024 --framework megatron --compare tp=1,pp=8,ep=32 tp=2,pp=8,ep=16
  moefold plan deepseek_v3 --gpus 2048 --serve
  moefold plan --records published.jsonl --predictions out.jsonl
  moefold plan --score published/ --page docs/planner-error.md

--framework moefold searches layouts that moefold can train; --framework megatron also options of other frameworks: FP8
GEMMs, DeepEP-class dispatchers, CUDA graphs. Options to pin with --fix: tp, cp, pp, vpp, ep, etp, sequences (per
microbatch), schedule, dispatcher, ep_overlap, delay_wgrad, recompute, graphs, format, sharding, replicate, savings,
clones (of hot experts, slots of a rank), dense_order and expert_order (which axes have neighbouring ranks). Layouts
that the framework's own validator refuses are never proposed: that of every release whose rules are known, or of one:
--framework megatron@0.19.1.
Exits with 0 when the layout fits, 1 when it does not, 2 when the command is wrong or nothing fits."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict memory, step time and the binding wall of a run, and search the best layout",
        description="Predict peak memory, step time and the binding wall of a run on a cluster, and search layouts.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser, optional=True)
    _add_cluster(parser)
    _add_search(parser)
    _add_goodput(parser)
    _add_output(parser)
    parser.set_defaults(run=run)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (H100)")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many of them")
    parser.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="a machine that `moefold bench calibrate` measured, instead of --gpu",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="a YAML file with a cluster of your own (GPU, network, cost per hour), instead of --gpu",
    )
    parser.add_argument("--domain", type=int, metavar="N", help="GPUs per NVLink domain (the GPU's usual)")
    parser.add_argument("--nic", type=float, metavar="GB/S", help="network bandwidth per GPU (the GPU's usual)")


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--global-batch", type=int, metavar="N", help="sequences per step (the run's)")
    parser.add_argument("--seq", type=int, metavar="N", help="tokens per sequence (the run's)")
    parser.add_argument(
        "--framework",
        metavar="NAME[@RELEASE]",
        default="moefold",
        help="whose options to search: moefold, megatron, fsdp2 (torchtitan), or megatron@0.19.1 (moefold)",
    )
    parser.add_argument(
        "--fix", default="", metavar="OPTIONS", help="pin options: tp=1,ep=32,64,recompute=mla_up+norms"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("OPTIONS", "OPTIONS"),
        help="two plans side by side, each pinned as by --fix; the rest is searched, or the run's own with --no-search",
    )
    parser.add_argument(
        "--recipes", action="store_true", help="search precision recipes too (else moefold's stay as in the run)"
    )
    parser.add_argument("--no-search", action="store_true", help="predict the run's own layout only")
    parser.add_argument(
        "--imbalance", type=float, default=1.0, metavar="X", help="rows of the most loaded rank over the mean (1)"
    )
    parser.add_argument("--headroom", type=float, metavar="X", help="fraction of memory to leave free (0.05)")
    parser.add_argument(
        "--fit", metavar="SIZE", help="fit into SIZE, such as 80GiB, whatever the GPU has (headroom: 0 unless given)"
    )
    parser.add_argument(
        "--anchor",
        metavar="RUN_DIR|FILE|FILE.jsonl:ID",
        help="a run that was measured, by which predictions are rescaled (docs/plan.md)",
    )


def _add_goodput(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mtbf-hours", type=float, metavar="H", help="GPU hours per failure (50,000)")
    parser.add_argument("--restart-seconds", type=float, metavar="S", help="from a failure to the next step (600)")
    parser.add_argument("--save-seconds", type=float, metavar="S", help="a checkpoint blocks training for (estimated)")
    parser.add_argument("--write-seconds", type=float, metavar="S", help="and is complete on disk after (estimated)")
    parser.add_argument("--tokens", default="1T", metavar="N", help="tokens to train on, such as 14.8T (1T)")
    parser.add_argument(
        "--batch-ramp",
        default="",
        metavar="RAMP",
        help="smaller batches at first: 3072:120B,6144:150B sequences:tokens",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained HTML page")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the schedule for chrome://tracing or Perfetto"
    )
    parser.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=8765,
        metavar="PORT",
        help="serve the page with a form on 127.0.0.1 (8765)",
    )
    parser.add_argument("--records", type=Path, metavar="FILE", help="predict published records, one JSON per line")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="where to write them (stdout)")
    parser.add_argument(
        "--score", type=Path, metavar="FOLDER", help="measure the planner's error against published runs"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="with --score: write the page of errors")
    parser.add_argument("--constants", type=Path, metavar="FILE", help="with --score: write the fitted constants")


def run(args: argparse.Namespace) -> int:
    if args.records is not None:
        from moefold.cli.plan_records import run_records

        return run_records(args.records, args.predictions, args.json)
    if args.score is not None:
        from moefold.cli.plan_records import run_score

        return run_score(args.score, args.predictions, args.page, args.constants, args.json, _progress())
    if args.name is None:
        raise MoefoldError("no RUN given; name a RUN, or give --records FILE; see `moefold plan --help`")
    from moefold.api.plans import answer

    question = question_of(args)
    if args.serve is not None:
        _refuse_beside_server(args)
        from moefold.cli.plan_serve import serve

        return serve(question, args.serve)
    if args.compare is not None:
        return _compare(question, args)
    plan = answer(question, _progress())
    _write_files(plan, args.html, args.trace)
    if args.json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        from moefold.plan.report.proposal_report import terminal_report

        _print(terminal_report(plan.proposal))
    return 0 if plan.fits else 1


def _compare(question: Question, args: argparse.Namespace) -> int:
    if beside := [name for name in ("html", "trace") if getattr(args, name)]:
        raise MoefoldError(
            f"--{beside[0]} and --compare: two plans are printed as text or --json; leave one of them out"
        )
    from moefold.plan.report.side_by_side import compare, comparison_data, comparison_report

    found = compare(question, args.compare, _progress())
    if args.json:
        print(json.dumps(comparison_data(found), indent=2))
    else:
        _print(comparison_report(found))
    return 0 if found.fits else 1


def _refuse_beside_server(args: argparse.Namespace) -> None:
    """A server answers until it is interrupted, so nothing would be written beside it."""
    if beside := [name for name in ("json", "html", "trace", "compare") if getattr(args, name)]:
        raise MoefoldError(
            f"--{beside[0]} and --serve: the server runs until Ctrl-C and writes no file; leave one of them out (the "
            "server has /plan.json)"
        )


def _write_files(plan: Any, html: Path | None, trace: Path | None) -> None:
    if html is not None:
        _write(html, plan.html(), "--html")
    if trace is not None:
        from moefold.plan.timing.step_timeline import step_timeline, step_trace

        _write(trace, json.dumps(step_trace(step_timeline(plan.proposal.chosen.workload, most_boxes=4_000))), "--trace")


def _write(path: Path, text: str, option: str) -> None:
    try:
        replace_file(path, text)
    except OSError as error:
        raise MoefoldError(f"{path}: cannot be written: {error.strerror}; choose another {option}") from error
    print(f"wrote {path}", file=sys.stderr)


def question_of(args: argparse.Namespace) -> Question:
    """The question to the planner; raises with every problem of the options."""
    from moefold.api.plans import cluster_for
    from moefold.api.runs import load_run
    from moefold.plan.framework_rules import named_release
    from moefold.plan.published.anchor_file import read_anchor
    from moefold.plan.search.batch_ramp import parse_ramp
    from moefold.plan.search.goodput import USUAL_MTBF_HOURS, USUAL_RESTART_SECONDS
    from moefold.plan.search.proposal import Question

    named, asked = load_run(args.name), load_run(args.name, args.changes)
    framework, release = named_release(args.framework)
    fit = None if args.fit is None else parse_bytes(args.fit)
    if args.gpu is not None and args.cluster is not None:
        raise ConfigError(Problem("gpu", f"is {args.gpu}, and {args.cluster} names one too", "leave one of them out"))
    cluster = cluster_for(
        args.gpu or "H100",
        args.gpus,
        machine=args.machine,
        described=args.cluster,
        domain=args.domain,
        nic_gb_s=args.nic,
        global_batch=args.global_batch,
        seq=args.seq,
        imbalance=args.imbalance,
        headroom=args.headroom,
        fit=fit,
    )
    batch = args.global_batch or asked.data.global_batch
    data = replace(asked.data, global_batch=batch, seq_len=args.seq or asked.data.seq_len)
    return Question(
        run=replace(asked, data=data),
        name=args.name,
        cluster=cluster,
        named=named,
        dotted=_dotted(args.changes),
        framework=framework,
        release=release,
        fixed=args.fix,
        recipes=args.recipes,
        searching=not args.no_search,
        imbalance=args.imbalance,
        headroom=args.headroom if fit is None else args.headroom or 0.0,
        mtbf_hours=USUAL_MTBF_HOURS if args.mtbf_hours is None else args.mtbf_hours,
        restart_seconds=USUAL_RESTART_SECONDS if args.restart_seconds is None else args.restart_seconds,
        save_seconds=args.save_seconds,
        write_seconds=args.write_seconds,
        tokens=parse_count(args.tokens),
        batch_ramp=parse_ramp(args.batch_ramp),
        anchor=None if args.anchor is None else read_anchor(args.anchor, cluster),
    )


def _dotted(changes: list[str]) -> dict[str, str]:
    """Overrides `--a.b 1` and `--a.b=1` by their keys."""
    found: dict[str, str] = {}
    words = iter(changes)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        found[key] = value if equals else next(words, "")
    return found


def _print(report: Any) -> None:
    from rich.console import Console

    width = max(100, min(160, shutil.get_terminal_size((140, 24)).columns))
    Console(width=width, highlight=False, soft_wrap=False).print(report)


def _progress() -> Callable[[str, int, int], None]:
    """A line on stderr that is rewritten on a terminal; elsewhere one line per stage of the search."""
    live = sys.stderr.isatty()

    def say(what: str, done: int, total: int) -> None:
        if live:
            end = "\n" if done == total else ""
            print(f"\r{what}: {done:,} of {total:,}    ", end=end, file=sys.stderr, flush=True)
        elif done == total:
            print(f"{what}: {total:,}", file=sys.stderr, flush=True)

    return say
