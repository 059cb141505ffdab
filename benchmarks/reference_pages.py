"""Write the reference pages from what they describe: verbs from their parsers, keys from the classes, errors by name.

    python -m benchmarks.reference_pages

A test holds docs/reference/ to what this writes. An example of a key is its value in the first published recipe that
does not have the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

from moefold import errors, units
from moefold.checks.run_all import RULES, RULES_TO_TRAIN, RULES_WITH_LAYOUT
from moefold.cli.init import key_comments, section_comment
from moefold.cli.main import VERBS, parser_of
from moefold.config.loading import dump_value
from moefold.config.run import RunConfig
from moefold.plan import preflight
from moefold.plan.search import search
from moefold.recipes.catalog import RECIPES, recipe
from moefold.tables import markdown_table

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
WRITTEN = "<!-- Written by `python -m benchmarks.reference_pages`; a test holds that this page is what it writes. -->"
EXAMPLES = ("deepseek_v3", "qwen3_30b_a3b", "gpt_oss_120b", "mixtral_8x7b", "olmoe_1b_7b", "debug_small")
# The unit of a key by the end of its dotted path: whole names, or what follows a `_`. The longest that fits counts.
UNITS = {
    "seq_len": "tokens",
    "data.global_batch": "sequences per step",
    "micro_batch": "sequences",
    "steps": "steps",
    "_every": "steps",
    "saving.every": "steps",
    "moe_every": "layers",
    "window_every": "layers",
    "nope_every": "layers",
    "full_attention_every": "layers",
    "decay": "steps",
    "prefetch": "steps",
    "warmup": "steps",
    "_seconds": "seconds",
    "timeout": "seconds",
    "minutes": "minutes",
    "_bytes": "bytes",
    "_mb": "MiB",
    "_gib": "GiB",
    "_us": "microseconds",
    "_gb_s": "1e9 bytes per second",
    "mb_per_s": "1e6 bytes per second",
    "vocab_size": "tokens",
    "_dim": "elements",
    "dim": "elements",
    "mscale_all_dim": "",
    "num_layers": "layers",
    "num_dense_layers": "layers",
    "num_experts": "experts",
    "top_k": "experts per token",
    "num_heads": "heads",
    "num_kv_heads": "heads",
    "tp": "ranks",
    "cp": "ranks",
    "pp": "ranks",
    "ep": "ranks",
    "etp": "ranks",
    "vpp": "stages per rank",
    "window": "tokens",
    "loss_scale.window": "steps",
    "stragglers.window": "steps",
}


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {"cli.md": cli_page(), "config.md": config_page(), "errors.md": errors_page()}


# ---- verbs ----


def cli_page() -> str:
    parser = parser_of(list(VERBS))
    lines = ["# Command line", "", WRITTEN, ""]
    lines += [
        "Exit codes: 0 done, 1 a negative result (a problem was found, a layout does not fit), 2 a wrong command.",
        "",
    ]
    for verb, child in _subparsers(parser):
        lines += _verb(f"moefold {verb}", child, "##")
    return "\n".join(lines).rstrip() + "\n"


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _verb(name: str, parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    yield from (f"{heading} {name}", "", " ".join((parser.description or "").split()), "")
    shown = (argparse._HelpAction, argparse._SubParsersAction)
    rows = [_option(action) for action in parser._actions if not isinstance(action, shown)]
    if rows:
        yield from (markdown_table(("option", "meaning"), rows), "")
    if parser.epilog:
        yield from ("```text", parser.epilog.strip(), "```", "")
    for verb, child in _subparsers(parser):
        yield from _verb(f"{name} {verb}", child, heading + "#")


def _option(action: argparse.Action) -> tuple[str, str]:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    takes = "" if action.nargs == 0 else str(value) if isinstance(value, str) else " ".join(value)
    takes = f"[{takes}]" if action.nargs in ("?", "*") and takes else f"{takes} ..." if action.nargs == "+" else takes
    words = [*(action.option_strings[-1:]), takes]
    meaning = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return f"`{' '.join(filter(None, words))}`", _cell(meaning)


# ---- keys ----


def config_page() -> str:
    lines = ["# Configuration keys", "", WRITTEN, ""]
    lines += [
        "Every key of a run file, and of the command line as `--section.key VALUE`. `moefold init RECIPE` writes a "
        "commented file to start from. An unknown key is refused with the nearest known one. The example is a "
        "published recipe's value.",
        "",
    ]
    lines += _section("", RunConfig, [recipe(name) for name in EXAMPLES if name in RECIPES])
    return "\n".join(lines).rstrip() + "\n"


def _section(path: str, section: type, found: list[object]) -> list[str]:
    comments, hints = key_comments(section), typing.get_type_hints(section)
    rows, below = [], []
    for field in dataclasses.fields(section):
        key = f"{path}.{field.name}" if path else field.name
        values = [getattr(each, field.name) for each in found if each is not None]
        inner = _sections_of(hints[field.name])
        if inner and not _is_listed(hints[field.name]):
            for kind in inner:
                of_kind = [value for value in values if isinstance(value, kind)]
                below += _section(f"{key}" if len(inner) == 1 else f"{key} ({kind.__name__})", kind, of_kind)
            continue
        rows.append(
            (
                f"`{key.partition(' ')[0]}`" if " (" not in key else f"`{key.partition(' ')[0]}.{field.name}`",
                f"`{_type(hints[field.name])}`",
                _default(field),
                _unit(key),
                _example(field, values),
                _cell(comments.get(field.name, "")),
            )
        )
    head = [f"## {path or 'run'}", "", _cell(section_comment(section)), ""]
    table = markdown_table(("key", "type", "default", "unit", "example", "meaning"), rows) if rows else ""
    return [*head, *([table, ""] if table else []), *below]


def _sections_of(hint: object) -> tuple[type, ...]:
    """Configuration classes that a key may hold."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return (hint,)
    return tuple(kind for each in typing.get_args(hint) for kind in _sections_of(each))


def _is_listed(hint: object) -> bool:
    return typing.get_origin(hint) is tuple


def _type(hint: object) -> str:
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type(each) for each in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"list of {_type(typing.get_args(hint)[0])}"
    return getattr(hint, "__name__", str(hint))


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{dump_value(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{dump_value(field.default_factory())}`"
    return "required"


def _unit(key: str) -> str:
    fitting = [end for end in UNITS if f".{key}".endswith(end if end.startswith("_") else f".{end}")]
    return UNITS[max(fitting, key=len)] if fitting else ""


def _example(field: dataclasses.Field[object], values: list[object]) -> str:
    others = [value for value in values if value != field.default and value not in (None, (), "")]
    if not others or any(map(dataclasses.is_dataclass, others[0] if isinstance(others[0], tuple) else ())):
        return ""
    return f"`{dump_value(others[0])}`"


# ---- errors ----


def errors_page() -> str:
    lines = ["# Errors", "", WRITTEN, ""]
    lines += [
        "Every error that a user can cause and fix derives from `moefold.MoefoldError` and says what happened, where, "
        "with the numbers, and what would work. The command line prints it without a traceback and exits with 2. Any "
        "other exception is a bug in moefold.",
        "",
    ]
    classes = [each for module in (errors, units, search, preflight) for each in _errors_of(module)]
    rows = [(f"`{each.__name__}`", f"`{each.__bases__[0].__name__}`", _cell(_first(each))) for each in classes]
    lines += [markdown_table(("error", "is a", "when"), rows), ""]
    lines += ["## Rules of a run", "", "`moefold check` lists every broken rule at once. Each is one function:", ""]
    rules = [*RULES, *RULES_WITH_LAYOUT, *RULES_TO_TRAIN]
    rows2 = [
        (_words(rule.__name__), f"`checks/{rule.__module__.rpartition('.')[2]}.py`", _cell(_first(rule)))
        for rule in rules
    ]
    lines += [markdown_table(("what must hold", "file", "more"), rows2)]
    return "\n".join(lines).rstrip() + "\n"


def _errors_of(module: types.ModuleType) -> list[type[errors.MoefoldError]]:
    """Those that a module defines, in the order of its source."""
    found = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
    return [each for each in found if issubclass(each, errors.MoefoldError)]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _first(found: object) -> str:
    """The first sentence or line of its docstring."""
    text = inspect.getdoc(found) or ""
    return " ".join(text.split("\n\n")[0].split())


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("``", "`").replace("<", "&lt;").strip()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")
        print(FOLDER / name)
