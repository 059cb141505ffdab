"""`moefold tokenize`: text, conversations and preference pairs into token files, in parallel."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moefold.cli.run_argument import Subparsers
from moefold.errors import DataError
from moefold.units import format_bytes

if TYPE_CHECKING:
    from moefold.data.chat import ChatTokenizer
    from moefold.data.token_origin import Origin
    from moefold.data.token_writers import TokenWriter
    from moefold.data.tokenization import TaskResult, TokenizeOptions, Tokenizer

EXAMPLES = """examples:
  moefold tokenize books/ notes.txt --out data/books
  moefold tokenize web.jsonl.zst more/*.parquet --tokenizer tokenizer.json --append-eod --out data/web --workers 16
  moefold tokenize chat.jsonl --chat --tokenizer Qwen/Qwen3-30B-A3B -o data/chat
  moefold tokenize pairs.jsonl --preference --tokenizer models/qwen3 -o data/pairs
  moefold tokenize hf://ORG/DATASET --tokenizer tokenizer.json --out data/web

A text file is one document, and so is a line of a .jsonl file (plain, .gz or .zst) and a row of a .parquet file.
Folders are searched recursively. Conversations are rows with `messages`, and `tools` if there are any; a loss mask
says which tokens count. Documents keep the order of the input, and the output is the same for any number of workers.
A run that was killed goes on where it was when the same command is given again. Train on it with --data.train
data/books; look at it with `moefold data inspect data/books`."""

# Seconds between two notes of how far a run is, on disk and on stderr.
_MARK_SECONDS = 2.0


class Facts(NamedTuple):
    """What `--json` prints. ``others``: files of folders that were left out; ``resumed``: tasks of an earlier run."""

    files: list[str]
    kind: str
    inputs: int
    documents: int
    tokens: int
    empty: int
    others: int
    bytes: int
    vocab_size: int
    dtype: str
    resumed: int
    seconds: float


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "tokenize",
        help="turn text, JSONL, parquet or conversations into token files",
        description="Turn text, JSONL and parquet files, folders of them, or datasets into a token file to train on.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, or datasets hf://ORG/NAME")
    parser.add_argument("-o", "--out", required=True, metavar="PREFIX", help="path of the output, without its suffix")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="T",
        help="`bytes` (default), a tokenizer.json, a folder with one, or a model of the Hub",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--chat", dest="kind", action="store_const", const="chat", help="rows of `messages`")
    kinds.add_argument(
        "--preference",
        dest="kind",
        action="store_const",
        const="preference",
        help="rows of `chosen` and `rejected`, as messages or as text after a `prompt`",
    )
    parser.add_argument(
        "--loss-on", default="assistant", metavar="ROLES", help="roles whose tokens count in the loss (assistant)"
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a template in place of the tokenizer's own")
    parser.add_argument(
        "--format",
        choices=("bin", "npy"),
        default="bin",
        help="bin: Megatron .bin and .idx (default); npy: a raw array as OLMo reads it, without an index of documents",
    )
    parser.add_argument("--jsonl-key", default="text", metavar="KEY", help="key or column of the text in a row (text)")
    parser.add_argument("--split", default="train", metavar="NAME", help="split of a dataset (train)")
    parser.add_argument("--stream", action="store_true", help="read inputs with `datasets`, streamed")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--append-eod", action="store_true", help="append an end-of-document token to every document")
    parser.add_argument("--eod-token", metavar="WORD", help="that token's text (default: the usual ones)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, kind="text")


def run(args: argparse.Namespace) -> int:
    from moefold.data.hub_files import local_data
    from moefold.data.input_rows import input_bytes, input_files, input_identity, split_tasks
    from moefold.data.tokenization import tokenize

    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    if workers < 1:
        raise DataError(f"--workers {workers}: use 1 or more")
    options = _options(args)
    tokenizer = options.open()
    origin = _origin(args, options, tokenizer)
    began = time.monotonic()
    given = args.inputs if args.stream else [local_data(path) for path in args.inputs]
    inputs, others = input_files(given, args.split, args.stream)
    key = _resume_key(origin, options, input_identity(inputs))
    empty = read = 0
    with _open_writer(args, tokenizer.vocab_size, key) as writer:
        writer.origin = origin.to_json()
        first = writer.num_marked
        if first:
            print(f"going on after {writer.num_documents:,} documents of an interrupted run", file=sys.stderr)
        tasks = (task for number, task in enumerate(split_tasks(inputs)) if number >= first)
        results = tokenize(tasks, options, writer, workers)
        for done in _with_progress(_marked(results, writer), input_bytes(inputs), writer):
            empty, read = empty + done.num_empty, read + done.num_bytes
        if not writer.num_tokens:
            raise DataError(f"{', '.join(args.inputs)[:200]}: no text in {len(inputs):,} files")
    facts = Facts(
        files=[str(path) for path in writer.targets],
        kind=options.kind,
        inputs=len(inputs),
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        empty=empty,
        others=others,
        bytes=read,
        vocab_size=tokenizer.vocab_size,
        dtype=writer.dtype.name,
        resumed=first,
        seconds=round(time.monotonic() - began, 3),
    )
    print(json.dumps(facts._asdict()) if args.json else _report(facts))
    return 0


def _options(args: argparse.Namespace) -> TokenizeOptions:
    from moefold.data.hub_files import local_tokenizer
    from moefold.data.tokenization import BYTES, TokenizeOptions

    if args.kind != "text" and (args.append_eod or args.eod_token or args.format != "bin"):
        raise DataError(
            f"{args.kind} data ends as its template says and has a mask: without --append-eod, --eod-token, --format"
        )
    template = None
    if args.chat_template is not None:
        try:
            template = Path(args.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"{args.chat_template}: is no template: {error}") from error
    roles = tuple(role.strip() for role in args.loss_on.split(",") if role.strip())
    if not roles:
        raise DataError("--loss-on names no role; use assistant, or assistant,tool")
    name = args.tokenizer if args.tokenizer == BYTES else local_tokenizer(args.tokenizer)
    return TokenizeOptions(name, args.eod_token, args.append_eod, args.jsonl_key, args.kind, roles, template)


def _origin(args: argparse.Namespace, options: TokenizeOptions, tokenizer: Tokenizer | ChatTokenizer) -> Origin:
    from moefold.data.token_origin import Origin
    from moefold.data.tokenization import BYTES, tokenizer_sha256

    # A name for people: of a path the last part, as other machines have other folders.
    path = Path(args.tokenizer)
    name = (path.parent.name or path.name) if path.name == "tokenizer.json" else path.name
    chat = options.kind != "text"
    return Origin(
        kind=options.kind,
        tokenizer=name if os.path.exists(args.tokenizer) else args.tokenizer,
        tokenizer_sha256=None if options.tokenizer == BYTES else tokenizer_sha256(options.tokenizer),
        vocab_size=tokenizer.vocab_size,
        end_token=tokenizer.end if options.append_end else None,
        loss_on=options.loss_on if chat else (),
        chat_template_sha256=getattr(tokenizer, "template_sha256", None),
        has_loss_mask=chat,
    )


def _resume_key(origin: Origin, options: TokenizeOptions, identity: list[list[object]]) -> str:
    """A run goes on only with the same tokenizer, options and inputs."""
    from moefold.data.input_rows import TASK_BYTES

    facts = [1, TASK_BYTES, origin.to_json(), options.append_end, options.end_token, options.jsonl_key, identity]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _open_writer(args: argparse.Namespace, vocab_size: int, key: str) -> TokenWriter:
    from moefold.data.token_files import raw_dtype
    from moefold.data.token_writers import ArrayWriter, MegatronWriter

    if args.format == "npy":
        return ArrayWriter(args.out, raw_dtype(vocab_size), args.overwrite, key)
    dtype = "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "int32"
    return MegatronWriter(args.out, dtype, args.overwrite, key, with_loss_mask=args.kind != "text")


def _marked(results: Iterable[TaskResult], writer: TokenWriter) -> Iterator[TaskResult]:
    """Note on disk every few seconds how many tasks are written."""
    last, first = time.monotonic(), writer.num_marked
    for number, result in enumerate(results, first + 1):
        if time.monotonic() - last > _MARK_SECONDS:
            writer.mark(number)
            last = time.monotonic()
        yield result


def _with_progress(results: Iterable[TaskResult], total: int | None, writer: TokenWriter) -> Iterator[TaskResult]:
    """A bar on a terminal, a line every few seconds elsewhere; on stderr, so that stdout has only output."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("tokenizing"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[tokens]}"))
    show = sys.stderr.isatty()
    console = Console(stderr=True)
    read, last = 0, time.monotonic()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not show, transient=True) as progress:
        bar = progress.add_task("tokenizing", total=total, tokens="")
        for result in results:
            read += result.num_bytes
            progress.update(bar, completed=read, tokens=f"{writer.num_tokens:,} tokens")
            if not show and time.monotonic() - last > _MARK_SECONDS:
                last = time.monotonic()
                of = "" if total is None else f" of {format_bytes(total)}"
                line = f"tokenizing: {format_bytes(read)}{of}, {writer.num_tokens:,} tokens"
                print(line, file=sys.stderr, flush=True)
            yield result


def _report(facts: Facts) -> str:
    left_out = f"; {facts.empty:,} empty documents left out" if facts.empty else ""
    left_out += f"; {facts.others:,} files in folders have no known ending and were left out" if facts.others else ""
    pairs = f" ({facts.documents // 2:,} pairs)" if facts.kind == "preference" else ""
    return (
        f"{' and '.join(facts.files)}\n"
        f"{facts.documents:,} documents{pairs}, {facts.tokens:,} tokens ({facts.dtype}) from {facts.inputs:,} files"
        f"{left_out}\n{facts.seconds:.1f} s, {format_bytes(facts.bytes / max(facts.seconds, 1e-3))}/s; "
        f"vocabulary of {facts.vocab_size:,}"
    )
