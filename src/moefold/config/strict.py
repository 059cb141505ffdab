"""Strict reading: an unknown key is an error, and YAML text becomes plain data by a few rules without surprises.

By YAML's own rules `1e-3` is text, `010` is eight, `no` is false, the last of repeated keys wins, an alias can expand
one line to gigabytes and a tag can name a Python object. So only YAML's parser is used here; what its events mean is
decided by these rules:

    null ~ (nothing)        null            true false              a boolean; yes, no, on and off are text
    8 -1 10_000             an integer      0.5 1e-3 3. .inf .nan   a float
    010                     refused: eight to some readers, ten to others
    "8" '8' and the rest    text

Keys are text and occur once. Anchors, aliases and tags are refused. Size, depth and number of values are bounded, so
that any file is refused quickly. `STRICT` is how every section's dataclass refuses a key that it does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from moefold.errors import ConfigError, Problem

STRICT: dict[str, Any] = {"extra": "forbid"}


MAX_BYTES, MAX_DEPTH, MAX_VALUES = 250_000, 32, 4_000
ROOT = "<root>"

_CONSTANTS = {"": None, "~": None} | {
    spelling: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for spelling in (word, word.capitalize(), word.upper())
}
_INTEGER = re.compile(r"[-+]?[0-9](_?[0-9])*")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST_NUMBER = 40

# The C parser where PyYAML was built with it: ten times faster, same events.
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ScalarError(ValueError):
    """An unquoted word that is ambiguous, or a number that is too long."""


def read_scalar(text: str) -> object:
    """The value of an unquoted word; the same in a file and on the command line."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if not (text[0] in "+-." or text[0].isdigit()):
        return text
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    if not (_INTEGER.fullmatch(text) or _FLOAT.fullmatch(text)):
        return text
    if len(text) > _LONGEST_NUMBER:
        raise ScalarError(f"a number of {len(text)} characters is longer than any that is meant")
    if not _INTEGER.fullmatch(text):
        return float(text)
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0":
        raise ScalarError(f"{text} is octal to some readers; write {text[: -len(digits)]}{digits.lstrip('0_') or 0}")
    return int(text)


def read_yaml(text: str) -> tuple[object, list[Problem]]:
    """The one document in `text`, without the entries that had a problem, and those problems.

    Raises ConfigError where reading cannot continue: broken syntax, or more data than a configuration ever has.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(Problem(ROOT, f"{len(text):,} characters", f"a configuration has at most {MAX_BYTES:,}"))
    try:
        return _Reader(text).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ROOT
        raise ConfigError(Problem(where, f"not YAML: {error.problem or error.context}", _mend(text, error))) from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise ConfigError(Problem(ROOT, f"not YAML text: {shown(' '.join(str(error).split()))}")) from None


def _mend(text: str, error: yaml.MarkedYAMLError) -> str:
    """What would work, for the mistakes that the parser's own words do not explain."""
    mark, begun = error.problem_mark, error.context_mark
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "the line is indented by a tab; use spaces"
    if begun and mark and begun.line != mark.line:
        return f"see line {begun.line + 1}: a bracket or a quote is not closed there, or the lines are not aligned"
    return ""


class _Reader:
    """Builds values from the parser's events, one document deep."""

    def __init__(self, text: str) -> None:
        self.events: Iterator[Any] = yaml.parse(text, Loader=_Parser)
        self.problems: list[Problem] = []
        self.num_values = 0

    def document(self) -> tuple[object, list[Problem]]:
        next(self.events)
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return None, []
        value = self.value(next(self.events), ROOT, 0)
        next(self.events)
        if not isinstance(next(self.events), yaml.StreamEndEvent):
            raise ConfigError(Problem(ROOT, "more than one document", "remove the second `---`"))
        return value, self.problems

    def value(self, event: Any, path: str, depth: int) -> object:
        self.refuse_unsupported(event, path, depth)
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else read_scalar(event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.sequence(path, depth)
        return self.mapping(path, depth)

    def refuse_unsupported(self, event: Any, path: str, depth: int) -> None:
        self.num_values += 1
        line = f"line {event.start_mark.line + 1}: "
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise ConfigError(Problem(path, f"{line}anchors and aliases are not read", "write the value out"))
        if event.tag:
            raise ConfigError(Problem(path, f"{line}tag {shown(event.tag)} is not read", "remove it"))
        if depth > MAX_DEPTH:
            raise ConfigError(Problem(path, f"{line}nested more than {MAX_DEPTH} deep"))
        if self.num_values > MAX_VALUES:
            raise ConfigError(Problem(path, f"{line}more than {MAX_VALUES:,} values"))

    def sequence(self, path: str, depth: int) -> list[object]:
        values: list[object] = []
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            values += self.kept(event, f"{path}[{len(values)}]", depth)
        return values

    def mapping(self, path: str, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        line_of: dict[str, int] = {}
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            line = event.start_mark.line + 1
            if not isinstance(event, yaml.ScalarEvent):
                raise ConfigError(Problem(path, f"line {line}: a key must be one word"))
            self.refuse_unsupported(event, path, depth)
            key, inner = event.value, joined(path, event.value)
            kept = self.kept(next(self.events), inner, depth)
            if key in line_of:
                self.problems.append(
                    Problem(inner, f"line {line}: this key is in line {line_of[key]} already", "remove one of them")
                )
            elif kept:
                values[key] = kept[0]
            line_of.setdefault(key, line)
        return values

    def kept(self, event: Any, path: str, depth: int) -> list[object]:
        """The value in a list, or an empty list where it has a problem."""
        try:
            return [self.value(event, path, depth + 1)]
        except ScalarError as error:
            self.problems.append(Problem(path, f"line {event.start_mark.line + 1}: {error}"))
            return []


def joined(path: str, key: str) -> str:
    """The dotted path of a key inside the section at `path`."""
    # A dot inside a key must not look like two keys.
    name = shown(repr(key) if "." in key else key)
    return name if path == ROOT else f"{path}.{name}"


def shown(text: str) -> str:
    """Any text, made printable for a message: short, on one line, visible."""
    visible = text if text.isprintable() and text.strip() else ascii(text)
    return visible if len(visible) <= 60 else f"{visible[:57]}..."
