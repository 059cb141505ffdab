"""`moefold eval`: how well a trained model predicts a text or tokens, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.generate import add_source, open_source
from moefold.cli.run_argument import Subparsers
from moefold.errors import ConfigError, DataError, Problem
from moefold.tables import text_table

if TYPE_CHECKING:
    from moefold.checkpoint.trained_model import TrainedModel
    from moefold.data.text_codec import TextCodec
    from moefold.model.scoring import Mask, Read

EXAMPLES = """examples:
  moefold eval runs/debug_small --text README.md
  moefold eval runs/my_run --data data/held_out --context 2048
  moefold eval exported --text book.txt --stride 256 --dtype float32 --json
  moefold eval Qwen3-30B-A3B --tasks arc_easy,hellaswag --limit 100
  moefold eval runs/my_run --tasks my_task --task-dir my_tasks

SOURCE is a run (its newest checkpoint), a checkpoint, or a Hugging Face directory. --text and --data print the loss in
nats per token and the perplexity; --text also bits per byte, which compares models of different tokenizers. A token is
predicted from at most --context tokens; with --stride S windows overlap, and each predicts S new ones. Where token
files have a loss mask, as those of conversations do, only its tokens count.
--tasks needs lm-evaluation-harness: pip install "moefold[eval]". Exits with 0."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "eval",
        help="perplexity on text or tokens, and tasks of lm-evaluation-harness",
        description="Evaluate a run's newest checkpoint, a checkpoint or a Hugging Face directory, on one process.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_source(parser)
    parser.add_argument("--text", metavar="FILE", help="a text file, by the model's tokenizer")
    parser.add_argument("--data", metavar="PATH", help="token files, as data.validation takes them, or `builtin`")
    parser.add_argument("--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness, separated by commas")
    parser.add_argument("--task-dir", metavar="DIR", help="folder of further task files")
    parser.add_argument("--limit", type=int, metavar="N", help="of --tasks: N examples each; else: N windows")
    parser.add_argument("--context", type=int, metavar="N", help="tokens before the predicted one (data.seq_len)")
    parser.add_argument("--stride", type=int, metavar="S", help="new tokens per window (default: --context)")
    parser.add_argument("--batch", type=int, default=4, metavar="B", help="windows at a time (4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _refuse(args)
    model, codec = open_source(args)
    context = args.context or model.run.data.seq_len
    if args.tasks:
        from moefold.api.lm_eval_adapter import evaluate_tasks

        return _report_tasks(
            args, evaluate_tasks(model, codec, args.tasks.split(","), args.task_dir, args.limit, context)
        )
    from moefold.model.scoring import perplexity, windows

    read, bounds, num_bytes, counted = _text(codec, Path(args.text)) if args.text else _data(model, args.data)
    cut = [
        window._replace(start=window.start + begin, first=window.first + begin, end=window.end + begin)
        for begin, end in bounds
        for window in windows(end - begin, context, args.stride or context)
    ][: args.limit]
    if not cut:
        raise DataError(f"{args.text or args.data}: has fewer than two tokens, so that none can be predicted")
    found = perplexity(model.decoder, read, cut, args.batch, _progress(len(cut)), counted)
    if not found.tokens:
        raise DataError(f"{args.data}: its loss mask counts no token of these {len(cut):,} windows")
    data: dict[str, object] = {
        "source": str(model.path),
        "data": args.text or args.data,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "accuracy": found.accuracy,
        "tokens": found.tokens,
        "counted": "all tokens" if counted is None else "those of the loss mask",
        "context": context,
        "stride": args.stride or context,
        "dtype": model.run.precision.compute,
    }
    if num_bytes is not None and args.limit is None:
        data["bits_per_byte"] = found.loss * found.tokens / math.log(2) / num_bytes
    if args.json:
        print(json.dumps(data, indent=2))
    else:
        print(text_table(("what", "value"), [(key, _shown(value)) for key, value in data.items()]))
    return 0


def _text(codec: TextCodec, path: Path) -> tuple[Read, list[tuple[int, int]], int | None, Mask | None]:
    from moefold.data.text_codec import read_text

    text = read_text(path)
    tokens = codec.encode(text)
    return lambda start, length: tokens[start : start + length], [(0, len(tokens))], len(text.encode()), None


def _data(model: TrainedModel, path: str) -> tuple[Read, list[tuple[int, int]], int | None, Mask | None]:
    """Documents apart where the run kept them apart in training, and conversations always: they have a loss mask."""
    from moefold.config.data import SourceConfig
    from moefold.data.sources import Source

    source = Source(SourceConfig(path), model.vocab_size, "validation")
    starts = [0, source.num_tokens]
    counted = source.loss_mask if source.has_loss_mask else None
    if model.run.data.packing != "concat" or counted is not None:
        starts = sorted({*starts, *source.document_starts_in(0, source.num_tokens).tolist()})
    return lambda start, length: source.window(start, length).tolist(), list(pairwise(starts)), None, counted


def _progress(total: int) -> Callable[[int], None]:
    last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > 2:
            last = time.monotonic()
            print(f"evaluating: {done:,} of {total:,} windows", file=sys.stderr, flush=True)

    return tell


def _report_tasks(args: argparse.Namespace, results: dict[str, dict[str, object]]) -> int:
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print(text_table(("task", "metric", "value"), list(_task_rows(results))))
    return 0


def _task_rows(results: dict[str, dict[str, object]]) -> Iterator[tuple[str, str, str]]:
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "alias":
                yield task, name, _shown(value)


def _shown(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _refuse(args: argparse.Namespace) -> None:
    problems = []
    given = [name for name in ("text", "data", "tasks") if getattr(args, name)]
    if len(given) != 1:
        said = " and ".join(f"--{name}" for name in given) or "nothing to evaluate on"
        problems.append(Problem("eval", said, "give one of --text FILE, --data PATH and --tasks NAMES"))
    for name in ("context", "stride", "batch", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            problems.append(Problem(f"--{name}", f"is {value}", "use 1 or more"))
    if args.context is not None and args.stride is not None and args.stride > args.context:
        problems.append(Problem("--stride", f"{args.stride} is more than --context {args.context}", "use at most that"))
    if args.task_dir and not args.tasks:
        problems.append(Problem("--task-dir", "is for --tasks", "name the tasks, or leave it out"))
    if problems:
        raise ConfigError(*problems)
