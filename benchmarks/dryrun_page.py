"""Renews the tables of the dry run's page, each from the command that stands above it.

    python -m benchmarks.dryrun_page docs/dryrun.md

A command is a block of code with `moefold dryrun ... --rank stages`; the Markdown table after it is replaced by what
the command finds. A test holds the page to what it would be.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from moefold.cli.main import main as moefold
from moefold.dryrun.dry_run import STAGE_COLUMNS, stage_row
from moefold.tables import markdown_table

# The command, and the table after it.
_TABLE = re.compile(r"```\n(moefold dryrun [^`]*--rank stages[^`]*)```\n\n((?:\|.*\n)*)")


def commands(page: str) -> list[list[str]]:
    """The words of every command that has a table."""
    return [_words(found[1]) for found in _TABLE.finditer(page)]


def _words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def tables(page: str) -> list[str]:
    return [found[2] for found in _TABLE.finditer(page)]


def rows_of(words: list[str]) -> list[tuple[str, ...]]:
    """What a command finds, of all pipeline ranks or of one rank."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        if moefold([*words[1:], "--json"]) != 0:
            raise RuntimeError(f"{shlex.join(words)} failed: {out.getvalue()}")
    found = json.loads(out.getvalue())
    return [stage_row(each["rank"], each["peak_total"], each["peak"]) for each in found.get("ranks", [found])]


def table_of(words: list[str]) -> str:
    """The same as Markdown."""
    return markdown_table(STAGE_COLUMNS, rows_of(words)) + "\n"


def renewed(page: str) -> str:
    return _TABLE.sub(lambda found: f"```\n{found[1]}```\n\n{table_of(_words(found[1]))}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text("utf-8")), "utf-8")
