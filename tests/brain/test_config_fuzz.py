"""Ten thousand damaged configurations: each loads, or fails with one typed error that names the key; none takes long.

Each case starts from a valid run and suffers one to four injuries, drawn from the list below by its own number, so a
failing case can be repeated alone.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.marks import slow_except

from moefold.config.attention import MLAConfig, YarnConfig
from moefold.config.loading import dump_run, override, parse_run
from moefold.config.moe import CapacityConfig
from moefold.config.run import RunConfig
from moefold.errors import ConfigError

NUM_CASES, PER_TEST, SLOWEST = 10_000, 1_000, 0.5

VALUES = (
    *("null", "~", "", "true", "yes", "1", "-1", "0", "1e-3", "1e999", "010", "0x1F", "1_000", ".nan", "-.inf", "'8'"),
    *("9" * 25, "9" * 5_000, "1e" + "9" * 500, "[1, 2]", "{a: 1}", "[]", "{}", '"\\ud800"', '"\\x00"', "2001-12-14"),
    *(
        "!!python/object:os.system x",
        "!!binary aGk=",
        "!x 3",
        "&a 1",
        "*a",
        "<<",
        "gqa",
        "mla",
        "😀",
        "\u202e",
        "x" * 5_000,
    ),
    *("[" * 40, "{a: " * 40, "[" * 20_000, "{" * 20_000, "? " * 500, "- " * 500, "|\n    text", ">-\n    text"),
)
KEYS = (
    "kind",
    "ep",
    "tp",
    "model",
    "<<",
    "a.b",
    "",
    '""',
    "1",
    "null",
    "ключ",
    "k" * 3_000,
    "'a\\nb'",
    "? x\n",
    "*k",
    "&k k",
)
BYTES = "\x00\x01\x07\x1b\x7f\x85\u2028\ufeff\ufffe\ud800\t\r\n:-?[]{},#&*!|>'\"%@`é漢"
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi"))

Injury = Callable[[random.Random, str], str]


def any_line(rng: random.Random, text: str, change: Callable[[str], str]) -> str:
    lines = text.splitlines() or [""]
    at = rng.randrange(len(lines))
    return "\n".join([*lines[:at], change(lines[at]), *lines[at + 1 :]]) + "\n"


def indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" "))]


def replace_value(rng: random.Random, text: str) -> str:
    return any_line(rng, text, lambda line: line.partition(":")[0] + ": " + rng.choice(VALUES))


def misspell_key(rng: random.Random, text: str) -> str:
    def change(line: str) -> str:
        at = rng.randrange(len(line) + 1)
        return line[:at] + rng.choice("abcdefgh_") + line[at + rng.randrange(2) :]

    return any_line(rng, text, change)


def add_key(rng: random.Random, text: str) -> str:
    return any_line(rng, text, lambda line: f"{line}\n{indent_of(line)}{rng.choice(KEYS)}: {rng.choice(VALUES)}")


def repeat_line(rng: random.Random, text: str) -> str:
    return any_line(rng, text, lambda line: "\n".join([line] * rng.randint(2, 4)))


def drop_line(rng: random.Random, text: str) -> str:
    return any_line(rng, text, lambda line: "")


def shift_line(rng: random.Random, text: str) -> str:
    return any_line(rng, text, lambda line: " " * rng.randrange(9) + line.lstrip())


def break_bytes(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(BYTES) + text[at + rng.randrange(3) :]
    return text


def cut(rng: random.Random, text: str) -> str:
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[start:end]


def append(rng: random.Random, text: str) -> str:
    return text + rng.choice((BOMB, "---\nseed: 1\n", "...\n", "%YAML 9.9\n", "<<: {seed: 1}\n", rng.choice(VALUES)))


def nest_deeply(rng: random.Random, text: str) -> str:
    depth = rng.choice((5, 31, 33, 300))
    return text + "".join(f"{' ' * i}deep:\n" for i in range(depth))


def many_keys(rng: random.Random, text: str) -> str:
    return text + "".join(f"key{i}: {i}\n" for i in range(rng.choice((60, 2_000))))


INJURIES: tuple[Injury, ...] = (
    *(replace_value, replace_value, misspell_key, add_key, repeat_line, drop_line),
    *(shift_line, break_bytes, cut, append, nest_deeply),
)


def valid_texts() -> list[str]:
    plain = RunConfig()
    mla = override(
        plain, {"model.attention.kind": "mla", "model.rope.yarn.factor": "2.5", "model.moe.capacity.pad": "true"}
    )
    assert isinstance(mla.model.attention, MLAConfig) and mla.model.rope.yarn == YarnConfig(factor=2.5)
    assert mla.model.moe is not None and mla.model.moe.capacity == CapacityConfig(pad=True)
    dense = override(plain, {"model.moe": "null"})
    return [dump_run(run) for run in (plain, mla, dense)] + ["parallel: {ep: 8, tp: 2}\nmodel:\n  dim: 64\n"]


def damaged(case: int, texts: list[str]) -> str:
    rng = random.Random(case)
    text = rng.choice(texts)
    for _ in range(rng.randint(1, 4)):
        text = rng.choice(INJURIES)(rng, text)
    return many_keys(rng, text) if case % 97 == 0 else text


@pytest.mark.parametrize("first", slow_except(range(0, NUM_CASES, PER_TEST), 0, PER_TEST))
def test_every_case_loads_or_fails_with_one_typed_error(first: int) -> None:
    texts = valid_texts()
    parse_run(texts[0])
    outcomes = {"loads": 0, "refused": 0}
    for case in range(first, first + PER_TEST):
        text = damaged(case, texts)
        try:
            assert isinstance(parse_run(text), RunConfig)
            outcomes["loads"] += 1
        except ConfigError as error:
            outcomes["refused"] += 1
            assert error.problems, f"case {case} names no problem"
            assert all(names_a_place(problem.path) for problem in error.problems), f"case {case}: {error}"
            assert len(str(error)) < 40_000 and "Traceback" not in str(error)
        assert answered_quickly(text), f"case {case} takes over {SLOWEST} s"
    # Both ways out must be well trodden, or the injuries are too mild or too cruel.
    assert min(outcomes.values()) > PER_TEST // 100, outcomes


def answered_quickly(text: str, tries: int = 5) -> bool:
    """In time at least once: a busy core can make any single try slow, but not make a slow answer quick."""
    for _ in range(tries):
        start = time.thread_time()
        with suppress(ConfigError):
            parse_run(text)
        if time.thread_time() - start < SLOWEST:
            return True
    return False


def names_a_place(path: str) -> bool:
    syntax = path == "<root>" or re.fullmatch(r"line \d+, column \d+", path)
    return bool(syntax) or (path.isprintable() and path.strip() != "" and not path.startswith("."))


BIG = (
    ("one long line", "name: " + "x" * 240_000),
    ("many open brackets", "name: " + "[" * 240_000),
    ("many open braces", "{" * 240_000),
    ("many keys", "".join(f"k{i}: 1\n" for i in range(24_000))),
    ("many unknown keys", "".join(f"paralel{i}: 1\n" for i in range(4_900))),
    ("many list items", "name:\n" + "- a\n" * 60_000),
    ("many quotes", "name: '" + "''" * 120_000),
    ("many comments", "# x\n" * 60_000),
    ("many colons", ":" * 240_000),
    ("many question marks", "? " * 120_000),
    ("many dashes", "- " * 120_000),
    ("many documents", "---\n" * 60_000),
    ("many digits", "seed: " + "9" * 240_000),
    ("many underscores", "seed: 1" + "_1" * 120_000),
    ("a long key", "k" * 900 + ": 1"),
    ("an alias bomb", BOMB),
)


@pytest.mark.parametrize("text", [text for _, text in BIG], ids=[name for name, _ in BIG])
def test_a_large_hostile_file_is_refused_quickly(text: str) -> None:
    parse_run("")
    assert answered_quickly(text)
