"""`moefold data`: what is in token files or rows (`inspect`), and whether files are what was written (`verify`)."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moefold.cli.run_argument import Subparsers, with_progress
from moefold.errors import DataError

if TYPE_CHECKING:
    from rich.text import Text

    from moefold.data.token_report import Report, Shown

EXAMPLES = """examples:
  moefold data inspect data/chat --tokenizer models/qwen3
  moefold data inspect chat.jsonl --tokenizer models/qwen3 --samples 5
  moefold data inspect data/pairs --tokenizer models/qwen3 --document 12

Tokens that count in the loss are green, the others grey; of a preference pair both answers stand side by side. A file
of rows is tokenized in memory, its first 1,000 rows, as `moefold tokenize` would: nothing is written."""
VERIFY_EXAMPLES = """examples:
  moefold data verify data/books
  moefold data verify data/ --json
  moefold data verify megatron/web_text_document --write

Every block of four megabytes is compared with PREFIX.hashes.json, which `moefold tokenize` writes. Files of other
programs have none: --write makes it from what the files are now. Exit code 1: a block differs."""
_BAR = 40


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "data",
        help="look at token files and at data before it is tokenized",
        description="Look at token files and at data before it is tokenized.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="VERB", title="verbs", required=True)
    inspect = verbs.add_parser(
        "inspect",
        help="samples, lengths and loss masks",
        description="Show samples with their loss masks, a histogram of lengths, and how much counts in the loss.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("path", metavar="PREFIX", help="token files, or a file of rows (.jsonl, .parquet, ...)")
    inspect.add_argument("--tokenizer", metavar="T", help="shows text instead of ids; rows need one")
    inspect.add_argument("--samples", type=int, default=3, metavar="N", help="documents or pairs to show (3)")
    inspect.add_argument("--document", type=int, metavar="I", help="show from this document on")
    inspect.add_argument("--most", type=int, default=400, metavar="TOKENS", help="show so many tokens of each (400)")
    inspect.add_argument("--loss-on", default="assistant", metavar="ROLES", help="roles that count, of rows")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=run)
    verify = verbs.add_parser(
        "verify",
        help="compare token files with the hashes they were written with",
        description="Compare whole token files with the hashes they were written with, block by block.",
        epilog=VERIFY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument("path", metavar="PREFIX", help="a pair without its suffix, an .npy file, or a folder")
    verify.add_argument("--write", action="store_true", help="write hashes for files that have none")
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    verify.set_defaults(run=run_verify)


def run(args: argparse.Namespace) -> int:
    from moefold.data.input_rows import is_rows

    report, others = _inspect_rows(args) if is_rows(args.path) else _inspect_tokens(args)
    if args.json:
        print(json.dumps({"path": args.path, **others, **_as_json(report)}))
    else:
        _print(args.path, report, others)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from moefold.data.block_hashes import BlockHashes, compare_part, hashes_path, hashes_text, read_hashes
    from moefold.data.byte_ranges import is_url
    from moefold.data.sources import source_paths
    from moefold.data.token_files import open_token_file
    from moefold.private_files import replace_file

    if args.write and is_url(args.path):
        raise DataError(f"{args.path}: hashes are written beside local files; copy them there, or tokenize there")
    found: list[VerifiedFile] = []
    for path in source_paths(args.path):
        parts, expected = open_token_file(path, 1 << 31).parts, read_hashes(path)
        now: dict[str, BlockHashes] = {}
        for part in parts:
            known = None if expected is None else expected.get(part.ending)
            now[part.ending], wrong = compare_part(part, known, partial(with_progress, what=f"comparing {part.name}"))
            state = "damaged" if wrong else "no hashes" if known is None else "same"
            found.append(VerifiedFile(part.name, part.size, state, [part.describe(block) for block in wrong]))
        if args.write and expected is None:
            replace_file(Path(hashes_path(parts[0].name)), hashes_text(now))
            found[-len(parts) :] = [each._replace(state="hashes written") for each in found[-len(parts) :]]
    damaged = any(each.damaged for each in found)
    if args.json:
        print(json.dumps({"files": [each._asdict() for each in found], "damaged": damaged}))
        return int(damaged)
    for each in found:
        hint = "; make them with --write" if each.state == "no hashes" else ""
        print(f"{each.file}: {each.state}{hint}")
        for where in each.damaged:
            print(f"  {where}: is not what was written")
    return int(damaged)


class VerifiedFile(NamedTuple):
    """``state``: same, damaged, no hashes, or hashes written; ``damaged`` has the places."""

    file: str
    bytes: int
    state: str
    damaged: list[str]


def _inspect_tokens(args: argparse.Namespace) -> tuple[Report, dict[str, object]]:
    from moefold.data.hub_files import local_tokenizer
    from moefold.data.token_report import TokenDocuments, shown, summarize
    from moefold.data.tokenization import BYTES, open_tokenizer, tokenizer_sha256

    found = TokenDocuments(args.path, 1 << 31)
    origin = found.origin
    made_of_bytes = origin is not None and origin.tokenizer == BYTES
    name = args.tokenizer or (BYTES if made_of_bytes else None)
    tokenizer = None
    if name is not None:
        name = name if name == BYTES else local_tokenizer(name)
        tokenizer = open_tokenizer(name)
        if origin is not None and tokenizer_sha256(name) != origin.tokenizer_sha256:
            raise DataError(
                f"{args.path}: was made with the tokenizer {origin.tokenizer}, and {args.tokenizer} is another"
            )
    num_runs = -(-found.file.num_documents // (1 << 14))
    runs = found.runs() if num_runs < 20 else with_progress(found.runs(), num_runs, "reading")
    report = summarize("unknown" if origin is None else origin.kind, runs, found.file.has_loss_mask)
    numbers = _numbers(args, report)
    report.samples = [shown(number, found.document(number), tokenizer, args.most) for number in numbers]
    return report, {"origin": None if origin is None else asdict(origin)}


def _inspect_rows(args: argparse.Namespace) -> tuple[Report, dict[str, object]]:
    import numpy as np

    from moefold.data.hub_files import local_tokenizer
    from moefold.data.token_report import MAX_ROWS, kind_of_rows, shown, summarize, tokenized_rows
    from moefold.data.tokenization import BYTES, TokenizeOptions

    kind = kind_of_rows(args.path)
    name = args.tokenizer or BYTES
    roles = tuple(role.strip() for role in args.loss_on.split(",") if role.strip())
    options = TokenizeOptions(name if name == BYTES else local_tokenizer(name), kind=kind, loss_on=roles)
    tokenizer = options.open()
    documents = tokenized_rows(args.path, options, tokenizer)
    lengths = np.asarray([len(document.ids) for document in documents], np.int64)
    counted = np.asarray([int(document.mask.sum()) for document in documents], np.int64)
    report = summarize(kind, [(lengths, counted)], kind != "text")
    report.samples = [shown(i, documents[i], tokenizer, args.most) for i in _numbers(args, report)]
    return report, {"rows": f"the first {MAX_ROWS:,} at most"}


def _numbers(args: argparse.Namespace, report: Report) -> range:
    """Documents to show; of pairs both."""
    pairs = report.kind == "preference"
    first = (args.document or 0) // 2 * 2 if pairs else args.document or 0
    if first < 0 or (args.document is not None and first >= report.documents):
        raise DataError(f"{args.path}: no document {args.document:,}; there are {report.documents:,}")
    return range(first, min(first + args.samples * (2 if pairs else 1), report.documents))


def _as_json(report: Report) -> dict[str, object]:
    histogram = [bar._asdict() for bar in report.histogram]
    samples = [{**each._asdict(), "parts": [part._asdict() for part in each.parts]} for each in report.samples]
    return {**vars(report), "histogram": histogram, "samples": samples}


def _print(path: str, report: Report, others: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    origin = others.get("origin")
    made = f", made with the tokenizer {origin['tokenizer']}" if isinstance(origin, dict) else ""
    kind = "" if report.kind == "unknown" else f" of {report.kind}"
    console.print(
        f"{path}: {report.documents:,} documents{kind}, {report.tokens:,} tokens{made}", markup=False, soft_wrap=True
    )
    if report.has_loss_mask:
        share = report.counted / max(report.tokens, 1)
        none = f"; in {report.unlabelled:,} documents none does" if report.unlabelled else ""
        console.print(f"{report.counted:,} tokens count in the loss ({share:.1%}){none}", markup=False, soft_wrap=True)
    console.print(
        f"lengths {report.shortest:,} to {report.longest:,}, median {report.median:,}", markup=False, soft_wrap=True
    )
    most = max((bar.documents for bar in report.histogram), default=1)
    for bar in report.histogram:
        drawn = "█" * -(-bar.documents * _BAR // most)
        console.print(f"{bar.first:>12,} - {bar.last:<12,}{bar.documents:>12,}  {drawn}", markup=False, soft_wrap=True)
    if report.kind != "preference":
        for each in report.samples:
            console.print(Text(f"\ndocument {each.document:,}: {_size(each)}", style="bold"))
            console.print(_coloured(each))
        return
    for chosen, rejected in zip(report.samples[::2], report.samples[1::2]):
        table = Table(title=f"pair {chosen.document // 2:,}", expand=True)
        table.add_column(f"chosen: {_size(chosen)}")
        table.add_column(f"rejected: {_size(rejected)}")
        table.add_row(_coloured(chosen), _coloured(rejected))
        console.print(table)


def _size(each: Shown) -> str:
    return f"{each.tokens:,} tokens, {each.counted:,} count"


def _coloured(each: Shown) -> Text:
    from rich.text import Text

    found = Text()
    for part in each.parts:
        found.append(part.text, style="green" if part.counts else "bright_black")
    return found
