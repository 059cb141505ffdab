"""`moefold convert`: checkpoints to and from Hugging Face's format, and dense models upcycled to MoE."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moefold.checks.train import name_problem
from moefold.errors import ConfigError, ConversionError, Problem
from moefold.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from moefold.checkpoint.hf.hf_conversion import Converted
    from moefold.checkpoint.tensor_spec import TensorSource
    from moefold.cli.run_argument import Subparsers
    from moefold.config.model import ModelConfig

EXAMPLES = """examples:
  moefold convert to-hf runs/debug_small/checkpoints/step_00000200 exported
  moefold convert to-hf runs/my_run exported --dtype bfloat16 --max-shard 2GB --tokenizer runs/my_run/tokenizer
  moefold convert to-hf runs/my_lora exported --merge
  moefold convert to-peft runs/my_lora adapters --base Qwen/Qwen3-30B-A3B
  moefold convert from-hf OLMoE-1B-7B runs --name olmoe_more
  moefold convert upcycle Qwen3-0.6B runs --name qwen3_8x --experts 8 --top-k 2
  moefold convert upcycle Qwen3-0.6B runs --name qwen3_fine --experts 32 --top-k 8 --shards 4
  moefold convert upcycle Qwen3-0.6B runs --name qwen3_scaled --experts 64 --top-k 8 --shards 8 --scheme scaled

Families: those of the recipes (`moefold check --list`), and two dense ones to upcycle: llama and qwen3.
from-hf and upcycle create a run at step 0 in OUT/NAME, without data if the source has none; train it with
`moefold train OUT/NAME/config.yaml --data.train FOLDER --train.steps N --optim.lr X`."""
_DTYPES = ("float32", "bfloat16", "float64")
_WITH_TRANSFORMERS = "compare logits with transformers afterwards"
_TOLERANCE = 1e-4


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "convert",
        help="to and from Hugging Face, and from dense to MoE",
        description="Convert weights, one tensor at a time; no code in a Hugging Face directory is ever executed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="WHAT", required=True)
    _add_to_hf(verbs)
    _add_to_peft(verbs)
    _add_from_hf(verbs)
    _add_upcycle(verbs)


def _add_verb(verbs: Subparsers, name: str, summary: str) -> argparse.ArgumentParser:
    examples = [line for line in EXAMPLES.splitlines() if f" convert {name} " in line]
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog="\n".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _add_to_hf(verbs: Subparsers) -> None:
    parser = _add_verb(verbs, "to-hf", "checkpoint -> a directory that transformers loads")
    parser.add_argument("source", metavar="CHECKPOINT", help="a checkpoint, or a run (its newest checkpoint)")
    parser.add_argument("out", metavar="OUT", help="the directory to create")
    parser.add_argument("--max-shard", default="5GB", metavar="SIZE", help="largest file (5GB)")
    parser.add_argument("--context", type=int, metavar="N", help="max_position_embeddings to write (the run's seq_len)")
    parser.add_argument("--tokenizer", metavar="DIR", help="copy tokenizer files from here (default: those of the run)")
    parser.add_argument("--no-mtp", action="store_true", help="leave out MTP modules")
    parser.add_argument("--merge", action="store_true", help="add LoRA adapters to the weights they are beside")
    _add_shared(parser, "dtype to write (that of the checkpoint)", _WITH_TRANSFORMERS)
    parser.set_defaults(run=to_hf)


def _add_to_peft(verbs: Subparsers) -> None:
    parser = _add_verb(verbs, "to-peft", "LoRA adapters of a checkpoint -> a directory that PEFT loads")
    parser.add_argument("source", metavar="CHECKPOINT", help="a checkpoint, or a run (its newest checkpoint)")
    parser.add_argument("out", metavar="OUT", help="the directory to create")
    parser.add_argument("--base", metavar="NAME", help="base_model_name_or_path to write: where the weights are")
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype to write (float32)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=to_peft)


def _add_from_hf(verbs: Subparsers) -> None:
    parser = _add_verb(verbs, "from-hf", "a directory of safetensors -> a run at step 0")
    parser.add_argument(
        "source", metavar="HF_DIR", help="a directory with config.json and safetensors, or hf://ORG/NAME"
    )
    _add_target(parser, _WITH_TRANSFORMERS)
    parser.set_defaults(run=from_hf)


def _add_upcycle(verbs: Subparsers) -> None:
    parser = _add_verb(verbs, "upcycle", "a dense model -> an MoE model initialised from it")
    parser.add_argument("source", metavar="SOURCE", help="a dense checkpoint, run, or Hugging Face directory")
    _add_target(parser, "compare the initial logits with the dense model's")
    parser.add_argument("--experts", type=int, required=True, metavar="N", help="number of experts")
    parser.add_argument("--top-k", type=int, required=True, metavar="K", help="experts per token")
    parser.add_argument(
        "--shards",
        type=int,
        default=1,
        metavar="G",
        help="split the feed-forward into G experts (granularity; default 1)",
    )
    parser.add_argument(
        "--scheme",
        choices=("exact", "scaled"),
        default="exact",
        help="exact: the initial output equals the dense model's (default); scaled: softmax then top-k and scaled "
        "weights (He et al. 2024), which is close to it",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the router's init (0)")
    parser.set_defaults(run=upcycle)


def _add_target(parser: argparse.ArgumentParser, check_help: str) -> None:
    parser.add_argument("out", metavar="OUT", help="directory of runs; the run is created in OUT/NAME")
    parser.add_argument("--name", required=True, metavar="NAME", help="name of the run")
    _add_shared(parser, "dtype of the parameters (float32)", check_help)


def _add_shared(parser: argparse.ArgumentParser, dtype_help: str, check_help: str) -> None:
    parser.add_argument("--dtype", choices=_DTYPES, help=dtype_help)
    parser.add_argument("--check", action="store_true", help=check_help)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def to_hf(args: argparse.Namespace) -> int:
    import torch

    from moefold.checkpoint.hf.hf_conversion import TOKENIZER, Export, export
    from moefold.checkpoint.hf.logits_check import largest_difference
    from moefold.checkpoint.single_process import StoredWeights

    stored = StoredWeights(_checkpoint(Path(args.source)))
    weights, model = _without_adapters(stored, stored.run.model, args.merge)
    max_shard = parse_bytes(args.max_shard)
    beside = stored.path.parent.parent / TOKENIZER
    tokenizer = Path(args.tokenizer) if args.tokenizer else beside if beside.is_dir() else None
    dtype = getattr(torch, args.dtype) if args.dtype else stored.dtype("parameter/embedding.weight")
    plan = Export(model, args.context or stored.run.data.seq_len, dtype, max_shard, tokenizer, not args.no_mtp)
    with _byte_bar(_size(weights), "writing") as tick:
        done = export(weights, plan, Path(args.out), tick)
    return _report(args, done, lambda: largest_difference(weights, model, done.path, dtype))


def _without_adapters(source: TensorSource, model: ModelConfig, merge: bool) -> tuple[TensorSource, ModelConfig]:
    from moefold.checkpoint.lora_weights import Merged

    if model.lora is None:
        if merge:
            raise ConfigError(Problem("--merge", "this checkpoint has no adapters", "leave it out"))
        return source, model
    if not merge:
        fix = "add --merge, or write the adapters alone: moefold convert to-peft"
        raise ConfigError(
            Problem("model.lora", "the checkpoint has adapters, which transformers' files cannot hold", fix)
        )
    merged = Merged(source, model)
    return merged, merged.model


def to_peft(args: argparse.Namespace) -> int:
    import torch

    from moefold.checkpoint.hf.peft_adapters import peft_layout, write_adapters
    from moefold.checkpoint.single_process import StoredWeights

    stored = StoredWeights(_checkpoint(Path(args.source)))
    model = stored.run.model
    if model.lora is None:
        raise ConfigError(Problem(args.source, "has no adapters", "train with model.lora.rank, or convert to-hf"))
    layout = peft_layout(model)
    files = write_adapters(stored, model, Path(args.out), getattr(torch, args.dtype or "float32"), args.base)
    report = {
        "path": args.out,
        "files": files,
        "tensors": len(layout.tensors),
        "rank": model.lora.rank,
        "alpha": model.lora.alpha,
        "target_modules": len(layout.target_modules),
        "target_parameters": len(layout.target_parameters),
    }
    load = "load it with peft.PeftModel.from_pretrained"
    text = f"{args.out}: {len(layout.tensors):,} tensors, rank {model.lora.rank}; {load}"
    print(json.dumps(report, indent=2) if args.json else text)
    return 0


def from_hf(args: argparse.Namespace) -> int:
    import torch

    from moefold.checkpoint.hf.hf_conversion import import_directory
    from moefold.checkpoint.hf.hf_directory import HfDirectory
    from moefold.checkpoint.hf.logits_check import largest_difference
    from moefold.data.hub_files import local_model

    _check_name(args.name)
    directory = HfDirectory(Path(local_model(args.source)), getattr(torch, args.dtype) if args.dtype else None)
    if args.check and directory.config.quantization is not None:
        fix = "convert without it, then `moefold convert to-hf ... --check` compares the weights that were read"
        raise ConversionError(Problem("--check", "transformers would read these quantized weights in another way", fix))
    dtype = directory.dtype("parameter/embedding.weight")
    with _byte_bar(directory.num_bytes, "reading") as tick:
        done, run = import_directory(directory, Path(args.out), args.name, tick)
    return _report(args, done, lambda: largest_difference(directory, run.model, directory.path, dtype))


def upcycle(args: argparse.Namespace) -> int:
    import torch

    from moefold.checkpoint.hf.hf_conversion import import_upcycled
    from moefold.checkpoint.hf.hf_directory import HfDirectory
    from moefold.checkpoint.hf.logits_check import difference_between
    from moefold.checkpoint.single_process import StoredWeights
    from moefold.checkpoint.upcycle import Upcycling

    _check_name(args.name)
    path = Path(args.source)
    source = (
        HfDirectory(path, getattr(torch, args.dtype) if args.dtype else None)
        if (path / "config.json").exists()
        else StoredWeights(_checkpoint(path))
    )
    with _byte_bar(_size(source) * args.experts, "upcycling") as tick:
        how = Upcycling(args.experts, args.top_k, args.shards, args.scheme)
        done, upcycled = import_upcycled(source, Path(args.out), args.name, how, args.seed, tick)
    dense = source.config.model if isinstance(source, HfDirectory) else source.run.model
    tolerance = _TOLERANCE if args.scheme == "exact" else None
    return _report(args, done, lambda: difference_between((source, dense), (upcycled, upcycled.model)), tolerance)


def _checkpoint(path: Path) -> Path:
    """A checkpoint itself, or the newest of a run."""
    from moefold.checkpoint.load import latest

    for root in (path / "checkpoints", path):
        if not (path / "manifest.json").exists() and root.is_dir() and (found := latest(root)) is not None:
            return found
    return path


def _check_name(name: str) -> None:
    if (problem := name_problem(name, "--name")) is not None:
        raise ConfigError(problem)


def _size(source: TensorSource) -> int:
    return sum(prod(source.shape(name)) * source.dtype(name).itemsize for name in source.names())


def _report(
    args: argparse.Namespace,
    done: Converted,
    difference: Callable[[], tuple[float, float]],
    tolerance: float | None = _TOLERANCE,
) -> int:
    """Print what was written, and with --check whether logits agree, or without a tolerance how much they differ."""
    report: dict[str, Any] = {**asdict(done), "path": str(done.path)}
    lines = [f"{done.path}: {done.tensors:,} tensors of {done.family}, {format_bytes(done.bytes)}", *done.notes]
    equal = True
    if args.check:
        largest, spread = difference()
        equal = tolerance is None or largest <= tolerance * max(spread, 1.0)
        verdict = "approximate" if tolerance is None else "equal" if equal else "DIFFERENT"
        report["check"] = {"largest_difference": largest, "spread": spread, "verdict": verdict}
        report["check"] |= {} if tolerance is None else {"equal": equal}
        lines.append(f"logits {verdict}: largest difference {largest:.2g}, where they spread by {spread:.2g}")
    print(json.dumps(report, indent=2) if args.json else "\n  ".join(lines))
    return 0 if equal else 1


@contextmanager
def _byte_bar(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A progress bar of bytes on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty() or not total:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
