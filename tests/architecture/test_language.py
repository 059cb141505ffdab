"""One word per concept: the words that were replaced (`old_words.py`) come back nowhere, nor do their files.

Files and configuration keys are looked for as text, symbols as identifiers of the syntax tree and between backticks,
phrases in prose. History may use any word: the changelog, the decision log, and the table by which a configuration with
an old key is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.old_words import FILES, KEYS, PHRASES, SCOPES, SYMBOLS
from tests.architecture.sources import PACKAGE, ROOT, files, identifiers, report, shown, text_of, tree_of

HISTORY = (
    "docs/decisions/",
    "src/moefold/config/renamed_keys.py",
    "tests/brain/test_renamed_keys.py",
    "tests/checkpoint/test_cli_inspect.py",
    "tests/mistakes/",
    "tests/architecture/",
)

# (word, where) -> why it is the right word there.
JUSTIFIED = {
    ("card", "src/moefold/html/"): "a box of a page",
    ("card", "src/moefold/plan/report/"): "a box of a page",
    ("card", "src/moefold/train/report/"): "a box of a page",
    ("card", "tests/security/"): "a box of a page",
}


def prose_files() -> list[Path]:
    return [path for path in [*files("src", "docs", "tests"), ROOT / "README.md"] if is_present_day(path)]


def is_present_day(path: Path) -> bool:
    return not shown(path).startswith(HISTORY)


def excused(word: str, path: Path) -> bool:
    return any(word == other and shown(path).startswith(where) for other, where in JUSTIFIED)


def found_in(path: Path) -> Iterator[tuple[str, str, int]]:
    """Every old word of a file: itself, the word to use, the line."""
    text = text_of(path)
    yield from matches(text, FILE_MENTION, FILES)
    yield from matches(text, MODULE, FILES)
    yield from matches(text, KEY, KEYS)
    yield from matches(text, PHRASE, PHRASES)
    symbols = [*matches(text, BACKTICKED, SYMBOLS)]
    if path.suffix == ".py":
        symbols += [(name, SYMBOLS[name], line) for name, line in identifiers(tree_of(path)) if name in SYMBOLS]
    yield from (found for found in symbols if shown(path).startswith(SCOPES.get(found[0], "")))


def matches(text: str, pattern: re.Pattern[str], words: dict[str, str]) -> Iterator[tuple[str, str, int]]:
    for match in pattern.finditer(text):
        word = match[1]
        if words is FILES:
            word = word.replace(".", "/")
        elif words is PHRASES:
            word = " ".join(word.replace("#", " ").split()).lower()
        yield word, words[word], text.count("\n", 0, match.start()) + 1


def any_of(words: dict[str, str]) -> str:
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


FILE_MENTION = re.compile(rf"(?<![\w/])(?:src/)?(?:moefold[./])?({any_of(FILES)})\.py\b")
MODULE = re.compile(rf"\bmoefold\.({any_of(FILES)})\b".replace("/", r"\."))
KEY = re.compile(rf"(?<!\w)({any_of(KEYS)})(?![\w-])")
PHRASE = re.compile(rf"(?i)\b({any_of(PHRASES)})\b".replace(r"\ ", r"\s+(?:#\s+)?"))
BACKTICKED = re.compile(rf"`({any_of(SYMBOLS)})\b[^`\n]*`")


def test_old_words_are_gone() -> None:
    offenders = [
        f"{shown(path)}:{line}: {word}, say {new}"
        for path in prose_files()
        for word, new, line in found_in(path)
        if not excused(word, path)
    ]
    assert not offenders, report(offenders)


def test_old_files_are_gone() -> None:
    offenders = [f"{old}.py is {new}.py" for old, new in FILES.items() if (PACKAGE / f"{old}.py").exists()]
    assert not offenders, report(offenders)


def test_an_old_word_is_noticed() -> None:
    assert [word for word, _, _ in matches("`Hop.go` and `Hoppers`", BACKTICKED, SYMBOLS)] == ["Hop"]
    assert [word for word, _, _ in matches("see moefold/ops/here.py, shops/here.py", FILE_MENTION, FILES)] == [
        "ops/here"
    ]
    assert [word for word, _, _ in matches("from moefold.ops.here import x", MODULE, FILES)] == ["ops/here"]
    keys = [word for word, _, _ in matches("--optim.rate 3, run.optim.rates_of, a.most_skips", KEY, KEYS)]
    assert keys == ["optim.rate", "most_skips"]
    assert [word for word, _, _ in matches("gradients that are Put\n    # off", PHRASE, PHRASES)] == ["put off"]
    assert [name for name, _ in identifiers(ast.parse("def f(a): return f'{a.take_off()}'"))] == [
        "f",
        "a",
        "take_off",
        "a",
    ]
