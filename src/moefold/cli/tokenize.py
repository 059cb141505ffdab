"""`moefold tokenize`: text and JSONL files into token files, in parallel."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

from moefold.cli.run_argument import Subparsers, with_progress
from moefold.errors import DataError
from moefold.units import format_bytes

EXAMPLES = """examples:
  moefold tokenize books/ notes.txt --out data/books
  moefold tokenize web.jsonl --tokenizer tokenizer.json --append-eod --out data/web --workers 16
  moefold tokenize web.jsonl --tokenizer tokenizer.json --append-eod --format npy --out data/web

A text file is one document, and so is a line of a .jsonl file. Folders are searched for text files recursively.
Documents keep the order of the input, and the output is the same for any number of workers. Train on it with
--data.train data/books."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "tokenize",
        help="turn text or JSONL into token files",
        description="Turn text and JSONL files, or folders of them, into a token file to train on.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text files, .jsonl files, folders")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="path of the output, without its suffix")
    parser.add_argument(
        "--tokenizer", default="bytes", metavar="T", help="`bytes` (default), or a tokenizer.json, or a folder with one"
    )
    parser.add_argument(
        "--format",
        choices=("bin", "npy"),
        default="bin",
        help="bin: Megatron .bin and .idx (default); npy: a raw array as OLMo reads it, without an index of documents",
    )
    parser.add_argument("--jsonl-key", default="text", metavar="KEY", help="key of the text in a JSONL line (text)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--append-eod", action="store_true", help="append an end-of-document token to every document")
    parser.add_argument("--eod-token", metavar="WORD", help="that token's text (default: the usual ones)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from moefold.data.token_writers import open_writer
    from moefold.data.tokenization import TokenizeOptions, input_files, split_tasks, tokenize

    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    if workers < 1:
        raise DataError(f"--workers {workers}: use 1 or more")
    options = TokenizeOptions(args.tokenizer, args.eod_token, args.append_eod, args.jsonl_key)
    vocab_size = options.open().vocab_size
    began = time.monotonic()
    files, others = input_files(args.inputs)
    tasks = list(split_tasks(files))
    empty = read = 0
    with open_writer(args.out, args.format, _smallest_dtype(args.format, vocab_size), args.overwrite) as writer:
        for done in with_progress(tokenize(tasks, options, writer, workers), len(tasks), "tokenizing"):
            empty, read = empty + done.num_empty, read + done.num_bytes
        if not writer.num_tokens:
            raise DataError(f"{', '.join(args.inputs)[:200]}: no text in {len(files):,} files")
    facts = {
        "files": [str(path) for path in writer.targets],
        "inputs": len(files),
        "documents": writer.num_documents,
        "tokens": writer.num_tokens,
        "empty": empty,
        "others": others,
        "bytes": read,
        "vocab_size": vocab_size,
        "dtype": writer.dtype.name,
        "seconds": round(time.monotonic() - began, 3),
    }
    print(json.dumps(facts) if args.json else _report(facts))
    return 0


def _smallest_dtype(kind: str, vocab_size: int) -> str:
    from moefold.data.token_files import raw_dtype

    if kind == "npy":
        return raw_dtype(vocab_size)
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "int32"


def _report(facts: dict[str, Any]) -> str:
    speed = format_bytes(facts["bytes"] / max(facts["seconds"], 1e-3))
    left_out = f"; {facts['empty']:,} empty documents left out" if facts["empty"] else ""
    left_out += f"; {facts['others']:,} files in folders are not text and were left out" if facts["others"] else ""
    return (
        f"{' and '.join(facts['files'])}\n"
        f"{facts['documents']:,} documents, {facts['tokens']:,} tokens ({facts['dtype']}) from {facts['inputs']:,} "
        f"files{left_out}\n{facts['seconds']:.1f} s, {speed}/s; vocabulary of {facts['vocab_size']:,}"
    )
