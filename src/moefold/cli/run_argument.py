"""The RUN argument of many verbs, with its dotted overrides, and a progress bar.

RUN is a recipe's name or a YAML file: `moefold check deepseek_v3 --parallel.ep 32 --data.micro_batch=2`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

# What a verb is added to.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
RUN_HELP = "a recipe's name, also NAME@GPUxN (see `moefold check --list`), or the path of a YAML file"


def add_run_argument(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Declares RUN (`args.name`) and lets dotted options through (`args.changes`)."""
    parser.add_argument("name", nargs="?" if optional else None, metavar="RUN", help=RUN_HELP)
    note = "Any key of the run can be changed: --parallel.ep 8 --model.num_layers 4"
    parser.description = f"{parser.description} {note}" if parser.description else note
    take_changes(parser)


def take_changes(parser: argparse.ArgumentParser) -> None:
    """Lets dotted options through (`args.changes`)."""
    parse = parser.parse_known_args

    # Dotted options are removed before argparse parses, which would take their values for RUN. Which keys exist depends
    # on the run, and `override` explains a wrong one.
    def without_changes(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words, changes = split_changes(args or ())
        found, rest = parse(words, namespace)
        found.changes = changes
        return found, rest

    parser.parse_known_args = without_changes  # type: ignore[method-assign, assignment]


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch sees a GPU, else cpu")


def launched_ranks() -> int:
    """How many ranks torchrun, srun or mpirun started with this one; 1 without a launcher, also in a job of many tasks:
    a verb that needs no ranks may be typed in its shell."""
    from moefold.comm.launchers import LAUNCHERS, place_of

    if not any(each.rank in os.environ and each.world in os.environ for each in LAUNCHERS):
        return 1
    place = place_of(os.environ)
    return 1 if place is None else place.world


def split_changes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(other words, the words of `--dotted.key VALUE` and `--dotted.key=VALUE`)."""
    others: list[str] = []
    changes: list[str] = []
    rest = iter(words)
    for word in rest:
        key, equals, _ = word.partition("=")
        if not (key.startswith("--") and "." in key):
            others.append(word)
            continue
        changes.append(word)
        if not equals:
            changes += [value for value in (next(rest, None),) if value is not None]
    return others, changes


Item = TypeVar("Item")


def with_progress(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """A progress bar on a terminal, a line per 20 items elsewhere; on stderr, so that stdout has only output."""
    from rich.console import Console
    from rich.progress import track

    if sys.stderr.isatty():
        yield from track(items, what, total=total, console=Console(stderr=True))
        return
    for number, item in enumerate(items, 1):
        yield item
        if number % 20 == 0 or number == total:
            print(f"{what}: {number} of {total}", file=sys.stderr, flush=True)
