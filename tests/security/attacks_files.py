"""Attacks by somebody who can write where moefold looks: caches of compiled code, links, names, open directories."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import numpy as np

from moefold.api.runs import check, load_run
from moefold.checkpoint.files import write_file
from moefold.checkpoint.run_lock import take_incarnation
from moefold.cli.main import main
from moefold.config.loading import dump_run
from moefold.config.run import RunConfig
from moefold.data.token_writers import MegatronWriter
from moefold.errors import MoefoldError
from moefold.ops import compiled_cache
from moefold.private_files import replace_file
from moefold.train.callbacks.jsonl import cut_after
from moefold.train.train_context import record_settings

ROOT = Path(__file__).parents[2]
VICTIM = "the user's own file\n"


# ---- executed files ----


@contextmanager
def cache_under(place: Path) -> Iterator[Path]:
    """The user's cache, as the user's own process makes it."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(place / "cache")}):
        yield compiled_cache.cache_directory()


def planted_library(folder: Path, stem: str) -> Path:
    """A file that is right in all but its origin: its name has the hash of its content."""
    content = b"\x7fELF not a library, and loading it is what must not happen"
    path = folder / f"{stem}.{hashlib.sha256(content).hexdigest()}.so"
    path.write_bytes(content)
    return path


def loaded(stem: str, planted: Path) -> str | None:
    """Load a library as kernels do; what was opened is what would have been executed."""
    opened: list[str] = []

    def build(made: Path) -> None:
        made.write_bytes(b"compiled by the user")

    with mock.patch.object(ctypes, "CDLL", lambda path, mode=0: opened.append(str(path))), suppress(MoefoldError):
        compiled_cache.load_library(stem, build)
    foreign = [path for path in opened if Path(path).read_bytes() != b"compiled by the user"]
    return f"{foreign} was loaded instead of {planted}" if foreign else None


def give_away(path: Path) -> None:
    """Make a file somebody else's: by its owner if we may, else by who we say that we are."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)


def foreign_library(place: Path) -> str | None:
    with cache_under(place) as folder:
        planted = planted_library(folder, "glu-1")
        give_away(planted)
        if os.geteuid() == 0:
            return loaded("glu-1", planted)
        with mock.patch.object(os, "geteuid", lambda: 12345):
            return loaded("glu-1", planted)


def library_in_an_open_directory(place: Path) -> str | None:
    for mode in (0o777, 0o770, 0o720, 0o1777):
        with cache_under(place) as folder:
            planted = planted_library(folder, "glu-1")
            folder.chmod(mode)
            if (gained := loaded("glu-1", planted)) is not None:
                return f"mode {mode:o}: {gained}"
            folder.chmod(0o700)
    return None


def library_under_an_open_directory(place: Path) -> str | None:
    with cache_under(place) as folder:
        planted = planted_library(folder, "glu-1")
        (place / "cache").chmod(0o777)
        return loaded("glu-1", planted)


def library_behind_a_link(place: Path) -> str | None:
    with cache_under(place) as folder:
        (place / "elsewhere").mkdir()
        planted = planted_library(place / "elsewhere", "glu-1")
        (folder / planted.name).symlink_to(planted)
        return loaded("glu-1", planted)


def changed_library(place: Path) -> str | None:
    """Bytes of a library that was compiled here change; and a library of the release before, without a hash."""
    with cache_under(place) as folder:
        planted = planted_library(folder, "glu-1")
        planted.write_bytes(b"\x7fELF changed")
        (folder / "glu-1.so").write_bytes(b"\x7fELF old")
        return loaded("glu-1", planted)


def compiler_cache_in_tmp(place: Path) -> str | None:
    """torch's own default is a name in /tmp that anybody can create first."""
    shared = place / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    planted = shared / "torchinductor_user"
    planted.mkdir()
    planted.chmod(0o777)
    with cache_under(place):
        with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(planted)}), suppress(MoefoldError):
            compiled_cache.use_private_compiler_caches()
            return f"torch's compiler would load from {planted}"
        with mock.patch.dict(os.environ):
            for variable in compiled_cache.COMPILER_CACHES:
                os.environ.pop(variable, None)
            compiled_cache.use_private_compiler_caches()
            for variable in compiled_cache.COMPILER_CACHES:
                used = Path(os.environ[variable])
                if not used.is_relative_to(place / "cache") or stat.S_IMODE(used.stat().st_mode) != 0o700:
                    return f"{variable} is {used}"
    return None


# ---- links ----


def written_through(place: Path, name: str, write: Callable[[Path], object]) -> str | None:
    """``name`` is a link to a file of the user when the user's command writes it."""
    victim, folder = place / "victim", place / "folder"
    victim.write_text(VICTIM)
    folder.mkdir(exist_ok=True)
    link = folder / name
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    with suppress(MoefoldError, OSError):
        write(link)
    changed = victim.read_text() != VICTIM
    if link.is_symlink():
        link.unlink()
    return f"{name}: the file behind the link was changed" if changed else None


def first_gain(place: Path, cases: dict[str, Callable[[Path], object]]) -> str | None:
    return next((gain for name, write in cases.items() if (gain := written_through(place, name, write))), None)


def links_in_a_run(place: Path) -> str | None:
    run = RunConfig()
    return first_gain(
        place,
        {
            "config.yaml": lambda link: list(record_settings(run, link.parent)),
            "config_history.jsonl": lambda link: replace_file(link, "{}"),
            "metrics.jsonl": lambda link: cut_after(link, 0),
            "run.lock": lambda link: take_incarnation(link.parent),
            "commit.lock": lambda link: take_incarnation(link.parent),
            "incarnation.json.tmp": lambda link: take_incarnation(link.parent),
            "manifest.json": lambda link: write_file(link, [b"x"]),
        },
    )


def links_for_a_real_run(place: Path) -> str | None:
    """A run that trains, started in a directory where every file name of it is a link already."""
    victim, folder = place / "victim", place / "runs" / "linked"
    victim.write_text(VICTIM)
    for name in ("metrics.jsonl", "corruption.jsonl", "config.yaml", "config_history.jsonl", "wandb_id", "report.html"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        words = ["debug_tiny", "--name", "linked", "--train.steps", "1", "--train.directory", str(place / "runs")]
        with suppress(MoefoldError, OSError):
            main(["train", *words, "--device", "cpu"])
        if victim.read_text() != VICTIM:
            return f"{name}: the file behind the link was changed"
    return None


def links_for_written_pages(place: Path) -> str | None:
    """Everything that a verb writes where its user says."""
    history, pipeline = place / "run", ("--stages", "2", "--microbatches", "4")
    history.mkdir()
    (history / "metrics.jsonl").write_text('{"kind": "start", "step": 0, "run": "x"}\n')
    return first_gain(
        place,
        {
            "report.html": lambda link: main(["report", str(history), "--out", str(link)]),
            "plan.html": lambda link: main(["plan", "debug_tiny", "--gpu", "H100", "--gpus", "8", "--html", str(link)]),
            "order.svg": lambda link: main(["schedule", "1f1b", *pipeline, "--svg", str(link)]),
            "order.json": lambda link: main(["schedule", "1f1b", *pipeline, "--trace", str(link)]),
            "bundle.zip": lambda link: main(["support-bundle", "--out", str(link)]),
        },
    )


def links_for_token_files(place: Path) -> str | None:
    def tokenize(link: Path) -> None:
        with MegatronWriter(str(link.parent / "x"), "uint16", resume_key="k") as writer:
            writer.add(np.arange(4))
            writer.mark(1)

    return first_gain(place, dict.fromkeys(("x.bin.tmp", "x.idx.tmp", "x.bin.mark.tmp"), tokenize))


# ---- names ----

BAD_NAMES = (
    *("../x", "/etc/x", "a/b", "a\\b", "..", ".ssh", "-rf", "--config", "", "a\nb", "a\rb", "a\x1b[2Jb", "a\tb"),
    *("a\x00b", "a\x7fb", "x" * 300, "\u202egnp.exe", "a\u2028b", "é" * 80),
)


def bad_names(place: Path) -> str | None:
    for name in BAD_NAMES:
        run = load_run("debug_tiny", {"train.directory": str(place)})
        if not any(problem.path == "name" for problem in check(RunConfig(name=name, model=run.model, train=run.train))):
            return f"the name {name!r} is accepted"
        with suppress(MoefoldError):
            main(["convert", "from-hf", str(place / "hf"), str(place), f"--name={name}"])
    return f"made {found}" if (found := list(place.iterdir())) else None


def names_on_the_terminal(place: Path) -> str | None:
    words = ["train", "debug_tiny", "--train.directory", str(place), "--name", "a\x1b]0;owned\x07\nmoefold: done"]
    done = subprocess.run(
        [sys.executable, "-m", "moefold.cli.main", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
    )
    if done.returncode == 0 or b"\x1b" in done.stderr + done.stdout or b"\nmoefold: done" in done.stderr:
        return f"the terminal is given {done.stderr[:200]!r}"
    return None


# ---- open directories ----


def open_configuration(place: Path) -> str | None:
    path = place / "run.yaml"
    path.write_text(dump_run(RunConfig()))
    for file_mode, folder_mode in ((0o666, 0o755), (0o602, 0o700), (0o644, 0o777)):
        path.chmod(file_mode)
        place.chmod(folder_mode)
        try:
            load_run(path)
        except MoefoldError:
            continue
        finally:
            place.chmod(0o700)
        return f"a configuration of mode {file_mode:o} in a directory of mode {folder_mode:o} is read"
    return None


def open_run_directory(place: Path) -> str | None:
    """A directory that anybody can put a checkpoint into."""
    run = place / "runs" / "x"
    for mode in (0o777, 0o1777, 0o703):
        run.mkdir(parents=True, exist_ok=True)
        run.chmod(mode)
        with suppress(MoefoldError):
            take_incarnation(run)
            return f"a run starts in a directory of mode {mode:o}"
    return None


ATTACKS = {
    "caches of compiled code": [
        ("somebody else's library in the cache", "it is executed", foreign_library),
        ("a library in a cache that others can write", "it is executed", library_in_an_open_directory),
        ("a library in a cache under a directory that others can write", "executed", library_under_an_open_directory),
        ("a link to a library in the cache", "it is executed", library_behind_a_link),
        ("a library whose bytes were changed", "it is executed", changed_library),
        ("a cache of torch's compiler that others made first", "its libraries are executed", compiler_cache_in_tmp),
    ],
    "files that are written": [
        ("links in the place of a run's files", "a file of the user is overwritten", links_in_a_run),
        ("links in the directory of a run that trains", "a file of the user is overwritten", links_for_a_real_run),
        ("links in the place of pages and pictures", "a file of the user is overwritten", links_for_written_pages),
        ("links in the place of temporary token files", "a file of the user is overwritten", links_for_token_files),
    ],
    "names": [
        ("names of runs that are paths or options", "a directory elsewhere", bad_names),
        ("escape sequences in a run's name", "the terminal obeys them", names_on_the_terminal),
    ],
    "directories that are open to all": [
        ("a configuration that everybody can write", "the run is another's", open_configuration),
        ("a run's directory that everybody can write", "another's checkpoint is resumed", open_run_directory),
    ],
}
