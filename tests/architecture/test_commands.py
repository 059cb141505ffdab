"""Commands in code blocks of the docs are accepted by the command line: verbs, options, dotted keys of a recipe."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.architecture.sources import ROOT, files, report, shown, text_of

from moefold.cli.main import VERBS, main, parser_of
from moefold.config.loading import override
from moefold.errors import MoefoldError
from moefold.recipes.catalog import recipe

BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\S+/bin/)?moefold [a-z].*$", re.MULTILINE)
# Words that stand for what the reader puts in.
PLACEHOLDER = re.compile(r"\b(RUN|NAME|DIR|OTHER)\b")


def commands() -> Iterator[tuple[str, str]]:
    """Every command, joined over continued lines, with its page."""
    for path in [ROOT / "README.md", *files("docs", suffixes=(".md",))]:
        for block in BLOCK.findall(text_of(path)):
            for line in COMMAND.findall(re.sub(r"\\\n\s*", "", block)):
                command = line.partition("#")[0].strip()
                if not PLACEHOLDER.search(command):
                    yield shown(path), command


def problem(command: str) -> str | None:
    words = shlex.split(command)[1:]
    if words[0] not in VERBS:
        return "no such verb"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser_of([words[0]]).parse_args(words)
        if changes := getattr(args, "changes", None):
            # Fine-tuning makes a run of a new name.
            named = args.name and words[0] not in ("sft", "dpo") and not args.name.endswith(".yaml")
            override(recipe(args.name if named else "debug_small"), changes)
    except SystemExit:
        return said.getvalue().splitlines()[-1]
    except MoefoldError as error:
        return str(error)
    return None


def test_every_command_is_accepted() -> None:
    found = list(commands())
    assert len(found) > 30
    offenders = [f"{page}: {command}: {what}" for page, command in found if (what := problem(command))]
    assert not offenders, report(offenders)


def test_the_corpus_of_the_readme_can_be_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that gains a JSONL file which is no text would stop the first command that a new user runs."""
    (command,) = [command for page, command in commands() if page == "README.md" and " tokenize " in command]
    words = shlex.split(command)[1:]
    words[words.index("--out") + 1] = str(tmp_path / "corpus")
    monkeypatch.chdir(ROOT)
    assert main(words) == 0 and (tmp_path / "corpus.bin").stat().st_size > 1_000_000


@pytest.mark.parametrize(
    "command", ["moefold fly", "moefold layout --wings 2", "moefold train debug_small --data.wings 2"]
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    assert problem(command)
