"""Makes every mistake and prints what moefold answers; `python -m tests.mistakes.answers FILE` writes the golden file.

In one process, each in a folder of its own, with the prepared folders linked into it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from tests.mistakes.mistakes import MISTAKES, Mistake

from moefold.cli.main import main

GOLDEN = Path(__file__).with_name("answers.txt")
# Of libraries, versions and machines: they differ where the answer does not.
_CHANGING = (
    (re.compile(r"torch \d[\w.+]*"), "torch VERSION"),
    # Lists that grow with every recipe, verb and family.
    (re.compile(r"(known(?: here)?: [\w-]+, [\w-]+), (?:[\w-]+, ){3,}[\w-]+"), r"\1, ..."),
)


def prepare(folder: Path) -> Path:
    """A finished run, its export and token files, for the mistakes that need one."""
    with _quiet(folder):
        for words in (
            "train debug_tiny --name run --train.steps 2 --train.directory .",
            "convert to-hf run hf",
            "tokenize text.txt --out data/bytes",
        ):
            (folder / "text.txt").write_text("some text, zz, of bytes\n" * 50)
            assert main(shlex.split(words)) == 0, words
    return folder


def answer(mistake: Mistake, folder: Path, prepared: Path) -> str:
    """The command, its exit code and everything that it printed, with machine-dependent words replaced."""
    for name in ("run", "hf", "data"):
        (folder / name).symlink_to(prepared / name)
    for name, content in mistake.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with _quiet(folder, mistake.env) as (out, err):
        try:
            code = main(shlex.split(mistake.words))
        except SystemExit as exit:
            code = exit.code
    said = out.getvalue() + err.getvalue()
    for path, name in ((str(folder), "{tmp}"), (str(prepared), "{prepared}")):
        said = said.replace(path, name)
    for pattern, name in _CHANGING:
        said = pattern.sub(name, said)
    lines = "\n".join(f"    {line}".rstrip() for line in said.rstrip().splitlines())
    return f"# {mistake.name}\n$ moefold {mistake.words}".rstrip() + f"\n{lines}\n    [exit {code}]\n"


@contextlib.contextmanager
def _quiet(folder: Path, env: dict[str, str] | None = None) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    before, out, err = os.getcwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with (
            patch.dict(os.environ, {"COLUMNS": "120"} | (env or {})),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            yield out, err
    finally:
        os.chdir(before)


def all_answers() -> Iterator[tuple[Mistake, str]]:
    with tempfile.TemporaryDirectory() as name:
        prepared = Path(name) / "prepared"
        prepared.mkdir()
        prepare(prepared)
        for number, mistake in enumerate(MISTAKES):
            folder = Path(name) / str(number)
            folder.mkdir()
            yield mistake, answer(mistake, folder, prepared)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(text for _, text in all_answers()))
