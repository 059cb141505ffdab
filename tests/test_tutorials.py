"""Tutorials: their commands exist, and what the pages show is what the commands print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.architecture.test_commands import problem

from benchmarks.tutorial_outputs import BLOCK, kept, pages, renewed

# Verbs whose output is the same on every machine; of others the numbers differ.
EXACT = ("check", "init", "layout", "plan", "schedule")


def commands(page: Path) -> list[tuple[str, str]]:
    """Each command and its output as the page has it."""
    found = []
    for block in BLOCK.finditer(page.read_text("utf-8")):
        if block["kind"] == "console":
            command, _, output = block["body"].partition("\n")
            while command.endswith("\\"):
                more, _, output = output.partition("\n")
                command = f"{command}\n{more}"
            found.append((command.removeprefix("$ "), output))
    return found


@pytest.mark.parametrize("page", [*pages()], ids=lambda page: page.stem)
def test_commands_are_accepted_and_have_an_output(page: Path) -> None:
    found = commands(page)
    assert len(found) >= 2
    for command, output in found:
        assert output.strip(), f"{command}: run `python -m benchmarks.tutorial_outputs {page.name}`"
        if command.startswith("moefold "):
            assert problem(command.replace("\\\n", " ")) is None


@pytest.mark.slow
@pytest.mark.parametrize("page", [*pages()], ids=lambda page: page.stem)
def test_a_page_shows_what_its_commands_print(page: Path, tmp_path: Path) -> None:
    _, ran = renewed(page.read_text("utf-8"), tmp_path)
    for (command, shown), now in zip(commands(page), ran, strict=True):
        assert command == now.command
        if command.split()[1] in EXACT:
            assert shown == now.output, command
        else:
            assert without_numbers(shown) == without_numbers(now.output), command


def without_numbers(output: str) -> list[str]:
    """The words of each line without those that have a digit; the order of measured rows may differ."""
    return sorted(" ".join(re.findall(r"(?<![\w.])[A-Za-z_]{2,}(?=[ :=]|$)", line)[:2]) for line in output.splitlines())


def test_kept_lines() -> None:
    output = "a 1\nb 2\nc 3\nd 4\n"
    assert kept(output, None) == output
    assert kept(output, "1-2") == "a 1\nb 2\n...\n"
    assert kept(output, "c-1") == "...\nc 3\n...\n"
