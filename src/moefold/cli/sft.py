"""`moefold sft`: fine-tune a published model on conversations; the same command again resumes."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.cli.run_argument import Subparsers, add_device_option, launched_ranks, take_changes
from moefold.config.model import LoraConfig
from moefold.errors import ConfigError, MoefoldError, Problem

if TYPE_CHECKING:
    from moefold.train.finetune_run import Prepared

EXAMPLES = """examples:
  moefold sft my_chat --from Qwen3-30B-A3B --data chat.jsonl --lora 16
  moefold sft my_chat --from Qwen3-30B-A3B --data chat.jsonl --freeze-router --epochs 2 --optim.lr 5e-6
  moefold sft proxy --from exported --data tokens/chat --lora 8 --nproc 4 --parallel.ep 4
  moefold sft my_chat --from Qwen3-30B-A3B --data chat.jsonl --prepare && torchrun --master-port 29500 \\
      --nproc-per-node 8 -m moefold.cli.main sft my_chat --parallel.ep 8
  moefold sft my_chat                       resumes, or trains what was prepared

--data is a file of conversations (`messages`), which the model's own tokenizer and chat template turn into tokens with
a loss mask in the run's directory, or the prefix of token files. The run lives in --out/NAME and is an ordinary one:
`moefold train`, `moefold report` and `moefold convert` take it. Where nothing is said: all weights at lr 1e-5, or
adapters at 2e-4; cosine after 3 % warmup; no weight decay; one epoch; 32 samples per step of at most 4,096 tokens.
Adapters are written for PEFT by `moefold convert to-peft`, and merged by `moefold convert to-hf --merge`."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "sft",
        help="fine-tune a published model on conversations: all weights, or LoRA",
        description="Supervised fine-tuning from a Hugging Face directory, in any layout. The same command again "
        "resumes. Any key of the run can be changed: --parallel.ep 8 --optim.lr 1e-5",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.set_defaults(run=run, beta=None, kind="chat")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `moefold dpo` too."""
    parser.add_argument("name", metavar="RUN", help="name of the run, which is created in --out/RUN")
    parser.add_argument("--from", dest="source", metavar="HF_DIR", help="a directory with config.json and safetensors")
    parser.add_argument("--data", metavar="DATA", help="conversations (.jsonl, .parquet), or the prefix of token files")
    parser.add_argument("--out", default="runs", metavar="DIR", help="directory of runs (runs)")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank instead of all weights")
    parser.add_argument("--alpha", type=float, metavar="A", help="adapters count alpha / rank times (2 * rank)")
    parser.add_argument("--targets", metavar="P,P", help="patterns of weights with adapters (attention, feed-forward)")
    parser.add_argument("--adapters", metavar="DIR", help="go on with adapters in PEFT's format")
    parser.add_argument("--freeze-router", action="store_true", help="do not train routers (with LoRA they never are)")
    parser.add_argument("--balance", choices=("off", "keep"), default="off", help="balance losses of the model (off)")
    parser.add_argument("--epochs", type=float, default=1.0, metavar="N", help="passes over the data (1)")
    parser.add_argument("--prepare", action="store_true", help="write the run's directory, and do not train")
    parser.add_argument("--nproc", type=int, metavar="N", help="CPU ranks to start on this machine (default 1)")
    add_device_option(parser)
    parser.add_argument("--patience", type=float, default=600.0, metavar="S", help="seconds a rank waits for its peers")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    take_changes(parser)


def run(args: argparse.Namespace) -> int:
    config = Path(args.out) / args.name / "config.yaml"
    if config.exists():
        _refuse_new_answers(args, config)
    elif launched_ranks() > 1:
        raise MoefoldError(f"{config} is not there: prepare the run with --prepare in one process, then launch ranks")
    else:
        prepared = _prepare(args)
        for note in prepared.notes:
            print(f"{args.verb}: {note}", file=sys.stderr)
        if args.prepare:
            facts = {"run": str(config.parent), "config": str(config), "notes": prepared.notes}
            text = f"prepared {config.parent}; train it with `moefold {args.verb} {args.name}`"
            print(json.dumps(facts) if args.json else text)
            return 0
    return _train(args, config)


def _refuse_new_answers(args: argparse.Namespace, config: Path) -> None:
    """What was decided when the run was prepared cannot be said differently now; layouts can."""
    said = {"--from": args.source, "--data": args.data, "--adapters": args.adapters, "--lora": args.lora}
    given = [option for option, value in said.items() if value is not None]
    if args.prepare:
        raise ConfigError(Problem("--prepare", f"{config.parent} exists already", "choose another name"))
    if given:
        print(
            f"{args.verb}: {config.parent} exists and goes on; {', '.join(given)} were used when it began",
            file=sys.stderr,
        )


def _train(args: argparse.Namespace, config: Path) -> int:
    from moefold.api.runs import load_run
    from moefold.train.callbacks.registry import default_callbacks
    from moefold.train.fault_tolerance.signals import INTERRUPTED
    from moefold.train.trainer import Trainer

    asked = load_run(config, args.changes)
    reporters = default_callbacks(args.json)
    trainer = Trainer(asked, reporters=reporters, nproc=args.nproc, patience=args.patience, device=args.device)
    return INTERRUPTED if trainer.fit(args.stop) == "interrupted" else 0


def _prepare(args: argparse.Namespace) -> Prepared:
    from moefold.cli.convert import _byte_bar, _check_name
    from moefold.data.hub_files import local_model
    from moefold.train.finetune_run import Finetuning, prepare

    _check_name(args.name)
    missing = [option for option, value in (("--from", args.source), ("--data", args.data)) if value is None]
    if missing:
        fix = f"moefold {args.verb} NAME --from HF_DIR --data {args.kind}.jsonl"
        raise ConfigError(*(Problem(option, "a new run needs it", fix) for option in missing))
    lora = _lora(args)
    source, root = Path(local_model(args.source)), Path(args.out) / args.name
    given = {"--from": source / "config.json", "--data": Path(args.data)}
    absent = {option: path for option, path in given.items() if not path.exists()}
    if Path(args.data + ".idx").exists() or "://" in args.data:
        absent.pop("--data", None)
    if absent:
        raise ConfigError(*(Problem(option, f"there is no {path}") for option, path in absent.items()))
    asked = Finetuning(
        name=args.name,
        directory=Path(args.out),
        tokens=_tokens(args, source, root),
        lora=lora,
        adapters=None if args.adapters is None else Path(args.adapters),
        freeze_router=args.freeze_router,
        balance=args.balance,
        epochs=args.epochs,
        beta=args.beta,
        changes=args.changes,
    )
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    with _byte_bar(size, "reading weights") as tick:
        return prepare(source, asked, tick)


def _lora(args: argparse.Namespace) -> LoraConfig | None:
    if args.lora is None:
        if args.alpha is not None or args.targets is not None:
            raise ConfigError(Problem("--alpha, --targets", "are about adapters", "add --lora RANK"))
        return None
    if args.adapters is not None:
        raise ConfigError(Problem("--lora", "rank and targets are those of --adapters", "leave one of the two out"))
    given = LoraConfig(rank=args.lora, alpha=2.0 * args.lora if args.alpha is None else args.alpha)
    if args.targets is None:
        return given
    return LoraConfig(given.rank, given.alpha, tuple(word.strip() for word in args.targets.split(",") if word.strip()))


def _tokens(args: argparse.Namespace, source: Path, root: Path) -> str:
    """The prefix of token files: as given, or of what the model's own tokenizer makes of conversations."""
    from moefold.checkpoint.files import make_directory
    from moefold.cli.main import main

    data: str = args.data
    if Path(data + ".idx").exists():
        return data
    prefix = root / "data" / args.kind
    if not Path(str(prefix) + ".idx").exists():
        make_directory(root)
        make_directory(prefix.parent)
        words = ["tokenize", data, f"--{args.kind}", "--tokenizer", str(source), "--out", str(prefix)]
        with redirect_stdout(sys.stderr):
            code = main(words)
        if code:
            raise MoefoldError(f"{data}: could not be tokenized; see above")
    return str(prefix)
