"""YAML text or plain data -> RunConfig and back; every problem at once, each with its dotted key and what would work.

Three steps. `config/strict.py` parses text into plain data. A copy keeps only values that a configuration can hold.
pydantic then fills the dataclasses in strict mode, so text is never read as a number; it is given JSON, because strict
mode accepts a mapping for a dataclass only from JSON. Whether sizes fit together is checked in `checks`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import cache, lru_cache, reduce
from math import isfinite
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from moefold.config.renamed_keys import renamed_key, renamed_value
from moefold.config.run import RunConfig
from moefold.config.strict import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_VALUES,
    ROOT,
    ScalarError,
    joined,
    read_scalar,
    read_yaml,
    shown,
)
from moefold.errors import ConfigError, Problem, UnknownNameError, did_you_mean
from moefold.private_files import by_everybody
from moefold.redaction import without_login

_MAX_PROBLEMS = 50
_SURROGATE = re.compile("[\ud800-\udfff]")
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dataclass_type": "a section of keys",
    "dict_type": "a section of keys",
}


# A recipe by its name.
FindRecipe = Callable[[str], RunConfig]


def load_run_file(path: str | Path, recipe: FindRecipe | None = None) -> RunConfig:
    """The run that a YAML file describes. With ``recipe`` it may inherit: `recipe: NAME`."""
    try:
        with open(path, "rb") as file:
            # One byte more than allowed is enough to know.
            content = file.read(MAX_BYTES + 1)
            everybody = by_everybody(Path(path), os.fstat(file.fileno()))
    except OSError as error:
        fix = f"give the path of a run file; `moefold init RECIPE > {Path(path).name}` writes one"
        raise ConfigError(Problem(str(path), f"cannot be read: {error.strerror}", fix)) from None
    if everybody is not None:
        raise ConfigError(Problem(str(path), f"{everybody}, so anybody can have changed it", "`chmod o-w` it"))
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"line {content[: error.start].count(10) + 1}, byte 0x{content[error.start]:02x}"
        raise ConfigError(Problem(str(path), f"{place}: is not UTF-8", "save it as UTF-8 text")) from None
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        fix = f"`moefold init RECIPE > {Path(path).name}` writes one with every key"
        raise ConfigError(Problem(str(path), "has no keys", fix))
    return parse_run(text, recipe)


def parse_run(text: str, recipe: FindRecipe | None = None) -> RunConfig:
    """The run that YAML text describes."""
    try:
        data, problems = read_yaml(text)
    except ScalarError as error:
        raise ConfigError(Problem(ROOT, str(error))) from None
    if recipe is not None and isinstance(data, dict) and "recipe" in data:
        data = _inherited(data, recipe, problems)
    return run_from_mapping({} if data is None else data, problems)


def _inherited(data: dict[str, Any], recipe: FindRecipe, problems: list[Problem]) -> dict[str, Any]:
    """The recipe's tree with the keys of ``data`` put in; sections are joined key by key, lists are replaced."""
    name = data["recipe"]
    try:
        tree = asdict(recipe(name if isinstance(name, str) else _quoted(name)))
    except UnknownNameError as error:
        # Without a recipe, every key that the file leaves out would be a problem as well.
        raise ConfigError(Problem("recipe", str(error)), *problems) from None
    _put_all(tree, [(path, value) for path, value in _leaves(data) if path != ["recipe"]], problems)
    return tree


def _leaves(section: Mapping[str, Any], above: Sequence[str] = ()) -> Iterator[tuple[list[str], object]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, [*above, key])
        else:
            yield [*above, key], value


def run_from_mapping(data: object, earlier: Sequence[Problem] = ()) -> RunConfig:
    """The run that nested dicts describe; absent keys have their defaults. `earlier` problems are reported as well."""
    copier = _PlainCopy(list(earlier))
    plain = copier.copy(data, ROOT, 0)
    problems, more = copier.problems, 0
    try:
        run = _adapter().validate_json(json.dumps(plain), strict=True)
        if not problems:
            return run
    except ValidationError as error:
        # Explaining a problem is slower than finding it, so a file of ten thousand wrong keys is cut off here.
        problems += map(_explained, error.errors(include_url=False)[:_MAX_PROBLEMS])
        more = max(0, error.error_count() - _MAX_PROBLEMS)
    more += max(0, len(problems) - _MAX_PROBLEMS)
    rest = [Problem(ROOT, f"and {more} more problems")] if more else []
    raise ConfigError(*problems[:_MAX_PROBLEMS], *rest)


def override(run: RunConfig, changes: Sequence[str] | Mapping[str, object]) -> RunConfig:
    """The run with some dotted keys changed: `["--parallel.ep", "8"]`, `["parallel.ep=8"]` or `{"parallel.ep": "8"}`.

    A list is written `[attention,experts]`. A section that is null gets its defaults when one of its keys is set.
    """
    pairs = changes.items() if isinstance(changes, Mapping) else _pairs(changes)
    tree: dict[str, Any] = asdict(run)
    problems: list[Problem] = []
    read: list[tuple[list[str], object]] = []
    for path, value in pairs:
        try:
            read.append((path.split("."), _read_word(value) if isinstance(value, str) else value))
        except ScalarError as error:
            problems.append(Problem(shown(path), str(error)))
    _put_all(tree, read, problems)
    return run_from_mapping(tree, problems)


def _put_all(tree: dict[str, Any], leaves: Sequence[tuple[list[str], object]], problems: list[Problem]) -> None:
    # A change of kind is applied first: it clears its section, so that the other keys belong to the new kind.
    for parts, value in sorted(leaves, key=lambda leaf: leaf[0][-1] != "kind"):
        try:
            _set(tree, parts, value)
        except ScalarError as error:
            problems.append(Problem(shown(".".join(parts)), str(error)))


def plain_data(run: RunConfig) -> dict[str, Any]:
    """The run as nested dicts to be written down: without the logins of its addresses."""
    found: dict[str, Any] = _without_logins(asdict(run))
    return found


def _without_logins(value: Any) -> Any:
    if isinstance(value, str):
        return without_login(value)
    if isinstance(value, dict):
        return {key: _without_logins(inner) for key, inner in value.items()}
    return type(value)(map(_without_logins, value)) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=8)  # Every rank needs it at every start; those that are forked inherit it.
def dump_run(run: RunConfig) -> str:
    """YAML text that `parse_run` reads back as the same run, but for logins in addresses, which are left out."""
    return yaml.dump(plain_data(run), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def dump_value(value: object) -> str:
    """One value on one line, as `parse_run` reads it; without the logins of addresses."""
    plain = list(value) if isinstance(value, tuple) else value
    if isinstance(plain, list):
        plain = [asdict(each) if is_dataclass(each) and not isinstance(each, type) else each for each in plain]
    plain = _without_logins(plain)
    text = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=True)
    return text.removesuffix("...\n").strip()


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `read_scalar` would read as something else."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    try:
        plain = text.isprintable() and read_scalar(text) == text
    except ScalarError:
        plain = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


class _PlainCopy:
    """Copies values that a configuration can hold and records a problem for each that it cannot."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.num_values = 0

    def copy(self, value: object, path: str, depth: int) -> object:
        self.num_values += 1
        # This also ends the recursion into a mapping that contains itself.
        if depth > MAX_DEPTH or self.num_values > MAX_VALUES:
            raise ConfigError(Problem(path, f"more than {MAX_DEPTH} levels or {MAX_VALUES:,} values"))
        if isinstance(value, Mapping):
            inner = [(str(key), joined(path, str(key)), item) for key, item in value.items()]
            return {key: self.copy(item, at, depth + 1) for key, at, item in inner if self.fits(key, item, at)}
        if isinstance(value, list | tuple):
            return [self.copy(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return value if self.fits("", value, path) else None

    def fits(self, key: str, value: object, path: str) -> bool:
        wrong = None
        if _SURROGATE.search(key) or (isinstance(value, str) and _SURROGATE.search(value)):
            wrong = "text that is not Unicode"
        elif isinstance(value, float) and not isfinite(value):
            wrong = f"{value} is not a finite number"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            wrong = f"a whole number of {value.bit_length()} bits does not fit into 64"
        elif not isinstance(value, str | int | float | Mapping | list | tuple | None):
            wrong = f"a {type(value).__name__} cannot be part of a configuration"
        if wrong:
            self.problems.append(Problem(path, wrong))
        return wrong is None


def _pairs(words: Sequence[str]) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    rest = iter(words)
    for word in rest:
        path, equals, value = word.removeprefix("--").partition("=")
        following = value if equals else next(rest, None)
        if following is None:
            raise ConfigError(Problem(shown(path), "no value given", f"write --{shown(path)} VALUE"))
        pairs.append((path, following))
    return pairs


def _read_word(text: str) -> object:
    if len(text) > 1 and text[0] == "[" and text[-1] == "]":
        return [read_scalar(word.strip()) for word in text[1:-1].split(",") if word.strip()]
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else read_scalar(text)


def _set(tree: dict[str, Any], parts: list[str], value: object) -> None:
    section = tree
    for i, part in enumerate(parts[:-1]):
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ScalarError(f"{shown('.'.join(parts[: i + 1]))} is a value, not a section of keys")
    if parts[-1] == "kind" and section.get("kind") != value and len(_locate(parts[:-1])[1]) > 1:
        section.clear()
    section[parts[-1]] = value


def _elsewhere(name: str) -> str:
    """Where else the key exists, such as optim.lr for train.lr; at most three places."""
    paths = [".".join(path) for path, _ in _leaves(asdict(RunConfig())) if path[-1] == name]
    return f"{' and '.join(paths)} exists; " if 0 < len(paths) <= 3 else ""


def _explained(found: Any) -> Problem:
    """One of pydantic's errors as a Problem."""
    names, sections, parent = _locate(found["loc"])
    path = reduce(joined, names, ROOT)
    kind, given = found["type"], found["input"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        if (renamed := renamed_key(path, given)) is not None:
            return Problem(path, renamed)
        known = [field.name for field in fields(parent)]
        hint = did_you_mean(names[-1], known) or _elsewhere(names[-1])
        return Problem(path, "unknown key", f"{hint}known here: {', '.join(known)}")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        kinds = list(_kinds(sections))
        given = given.get("kind") if isinstance(given, dict) else given
        missing = "is missing" if kind == "union_tag_not_found" else f"cannot be {_quoted(given)}"
        return Problem(f"{path}.kind", missing, f"{did_you_mean(str(given), kinds)}choose from {', '.join(kinds)}")
    if kind == "literal_error":
        value = renamed_value(path, given)
        renamed = f"it is called {value}; " if value else ""
        return Problem(path, f"cannot be {_quoted(given)}", f"{renamed}choose {found['ctx']['expected']}")
    if kind in _WANTED:
        quotes = isinstance(given, str) and not isinstance(_safely_read(given), str)
        fix = "remove the quotes" if quotes else ""
        if _WANTED[kind] == "a section of keys":
            fix = "write its keys below it, each with a space after its colon"
        return Problem(path, f"must be {_WANTED[kind]}, not {_quoted(given)}", fix)
    return Problem(path, found["msg"])


def _quoted(given: object) -> str:
    if given is None or isinstance(given, bool):
        return json.dumps(given)
    if isinstance(given, dict):
        return "a section of keys"
    return "a list" if isinstance(given, list) else shown(repr(given))


def _safely_read(text: str) -> object:
    try:
        return read_scalar(text)
    except ScalarError:
        return text


def _locate(loc: Sequence[str | int]) -> tuple[list[str], tuple[type, ...], type]:
    """The keys down to a place, the dataclasses allowed there, and the dataclass around it.

    Where a section is one of several kinds, pydantic puts the kind into the path; it is dropped, as users do not write
    it.
    """
    names: list[str] = []
    here: tuple[type, ...] = (RunConfig,)
    parent: type = RunConfig
    for part in loc:
        if len(here) > 1 and part in _kinds(here):
            here = (_kinds(here)[str(part)],)
            continue
        names.append(str(part))
        if here:
            parent = here[0]
            here = _sections(get_type_hints(parent).get(str(part)))
    return names, here, parent


def _sections(hint: object) -> tuple[type, ...]:
    """The dataclasses that a type hint allows."""
    if isinstance(hint, type) and is_dataclass(hint):
        return (hint,)
    return tuple(section for part in get_args(hint) for section in _sections(part))


def _kinds(sections: tuple[type, ...]) -> dict[str, type]:
    """The dataclasses that have a `kind`, by its value."""
    return {str(field.default): section for section in sections for field in fields(section) if field.name == "kind"}


@cache
def _adapter() -> TypeAdapter[RunConfig]:
    return TypeAdapter(RunConfig)
