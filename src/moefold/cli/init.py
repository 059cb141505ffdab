"""`moefold init`: a run file to start from, with what the recipe says and what every key means.

The file inherits: `recipe: NAME` stands for everything that it does not mention. So the model is not repeated, and the
sections that people change are written out, with the recipe's values and the comments of the configuration classes.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Set
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from moefold.api.runs import load_run
from moefold.checks.run_all import RULES_TO_TRAIN
from moefold.cli.run_argument import Subparsers, add_run_argument
from moefold.config.loading import dump_value
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.recipes.catalog import recipe_name

WIDTH = 100
# In the order in which people fill them in.
SECTIONS = ("data", "train", "optim", "parallel", "memory", "precision")
EXAMPLES = """examples:
  moefold init qwen3_30b_a3b > run.yaml
  moefold init debug_tiny --train.steps 50 --name hello > hello.yaml

Then fill in what is REQUIRED; `moefold check run.yaml` lists what is missing, `moefold train run.yaml` trains."""


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "init",
        help="write a commented run file that inherits from a recipe",
        description="Write a commented run file that inherits from a recipe.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_argument(parser)
    parser.add_argument("--name", dest="run_name", metavar="NAME", help="of the run, and of the directory it writes")
    parser.add_argument("--json", action="store_true", help="print the same as one JSON object, without comments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    base = recipe_name(args.name)
    chosen = load_run(base, args.changes)
    name = args.run_name or f"my_{base.partition('@')[0]}"
    if args.json:
        sections = asdict(chosen)
        print(json.dumps({"recipe": base, "name": name} | {key: sections[key] for key in SECTIONS}, indent=2))
    else:
        print("\n".join(run_file(base, name, chosen)))
    return 0


def run_file(base: str, name: str, run: RunConfig) -> Iterator[str]:
    yield from _comment(
        f"A run that inherits from the recipe {base}: keys that are not in this file have the recipe's values, the "
        f"model among them (`moefold check {base}` shows its sizes). Whatever is as the recipe has it can be deleted.",
        "",
    )
    yield f"recipe: {base}"
    yield f"name: {dump_value(name)}"
    required = {problem.path for rule in RULES_TO_TRAIN if isinstance(problem := rule(run), Problem)}
    for section in SECTIONS:
        yield ""
        yield from _section(section, getattr(run, section), "", required)


def _section(path: str, value: Any, indent: str, required: Set[str] = frozenset()) -> Iterator[str]:
    yield from _comment(section_comment(type(value)), indent)
    yield f"{indent}{path.rpartition('.')[2]}:"
    comments, inner = key_comments(type(value)), indent + "  "
    for field in fields(value):
        entry, key = getattr(value, field.name), f"{path}.{field.name}"
        if key in required:
            yield from _comment("REQUIRED.", inner)
        yield from _comment(comments.get(field.name, ""), inner)
        if is_dataclass(entry):
            yield from _section(key, entry, inner)
        elif isinstance(entry, tuple) and any(map(is_dataclass, entry)):
            yield f"{inner}{field.name}:"
            yield from (f"{inner}  - {dump_value(asdict(item))}" for item in entry)
        else:
            yield f"{inner}{field.name}: {dump_value(entry)}"


def _comment(text: str, indent: str) -> Iterator[str]:
    # Comments of the classes speak Python.
    lines = textwrap.wrap(text.replace("None", "null"), WIDTH - len(indent) - 2)
    yield from (f"{indent}# {line}" for line in lines)


_FIELD = re.compile(r"    ([a-z_0-9]+): ")
_COMMENT = re.compile(r"    # ?(.*)")


def key_comments(section: type) -> dict[str, str]:
    """By field of a configuration class: the comment lines directly above it, as one text; fields without one are
    absent."""
    assert is_dataclass(section)
    known = {field.name for field in fields(section)}
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(section).splitlines():
        if comment := _COMMENT.fullmatch(line):
            above.append(comment[1])
            continue
        if (field := _FIELD.match(line)) and field[1] in known and above:
            found[field[1]] = " ".join(above)
        above = []
    return found


def section_comment(section: type) -> str:
    """The first paragraph of its docstring."""
    return " ".join(textwrap.dedent(section.__doc__ or "").strip().split("\n\n")[0].split())
