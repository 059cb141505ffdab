"""Run the commands of a tutorial, in order and in one empty directory, and put what they print into its page.

    python -m benchmarks.tutorial_outputs docs/tutorials/student.md

A block of kind `console` has a command after `$` and its output below. `<!-- lines: A-B -->` before it keeps those
lines of the output, `<!-- lines: WORD-N -->` N lines from the first that has the word. A block of kind `python` after
`<!-- file: NAME -->` is written to that file. Commands are words, not shell: `moefold ...` and `python NAME`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(?:<!-- (?P<what>lines|file): (?P<value>\S+) -->\n)?```(?P<kind>console|python)\n(?P<body>.*?)^```\n",
    re.MULTILINE | re.DOTALL,
)
WIDTH, LIMIT_SECONDS = 110, 1500


@dataclass(frozen=True)
class Done:
    """A command of a page and what it printed, as the page shows it."""

    command: str
    output: str


def renewed(page: str, directory: Path) -> tuple[str, list[Done]]:
    """The page with every output as it is now; a command that fails stops it."""
    ran: list[Done] = []

    def block(found: re.Match[str]) -> str:
        if found["kind"] == "python":
            if found["what"] == "file":
                (directory / found["value"]).write_text(found["body"], "utf-8")
            return found[0]
        command = found["body"].splitlines()[0].removeprefix("$ ")
        for more in found["body"].splitlines()[1:]:
            if not command.endswith("\\"):
                break
            command = f"{command}\n{more}"
        output = kept(run(command, directory), found["value"] if found["what"] == "lines" else None)
        ran.append(Done(command, output))
        note = f"<!-- lines: {found['value']} -->\n" if found["what"] == "lines" else ""
        return f"{note}```console\n$ {command}\n{output}```\n"

    return BLOCK.sub(block, page), ran


def run(command: str, directory: Path) -> str:
    words = shlex.split(command.replace("\\\n", " "))
    program = {"moefold": ["-m", "moefold.cli.main"], "python": []}[words[0]]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}",
        "COLUMNS": str(WIDTH),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        [sys.executable, *program, *words[1:]],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    # 1 is an answer too: a layout that does not fit, a check that found problems.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def kept(output: str, lines: str | None) -> str:
    """Those lines, each cut at the page's width; where some are left out, dots say so."""
    found = [line.rstrip()[:WIDTH] for line in output.splitlines()]
    first, last = _span(lines, found) if lines else (1, len(found))
    shown = found[first - 1 : last]
    return "".join(
        f"{line}\n" for line in [*(["..."] if first > 1 else []), *shown, *(["..."] if last < len(found) else [])]
    )


def _span(lines: str, found: list[str]) -> tuple[int, int]:
    begin, _, end = lines.rpartition("-")
    if begin.isdecimal():
        return int(begin), int(end)
    first = next(number for number, line in enumerate(found, 1) if begin in line)
    return first, first + int(end) - 1


def pages() -> Iterator[Path]:
    yield from sorted((ROOT / "docs" / "tutorials").glob("*.md"))


if __name__ == "__main__":
    for name in sys.argv[1:] or map(str, pages()):
        scratch = Path(tempfile.mkdtemp())
        text, ran = renewed(Path(name).read_text("utf-8"), scratch)
        Path(name).write_text(text, "utf-8")
        shutil.rmtree(scratch)
        print(f"{name}: {len(ran)} commands")
