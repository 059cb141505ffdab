"""A process of its own that opens poisoned files with every loader, watched by an audit hook. See test_hf_poison.py.

usage: open_poisons.py CORPUS PLACES   (a folder of files; a folder with a good directory for each kind of loader)
"""

from __future__ import annotations

import json
import shutil
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moefold.checkpoint.hf.hf_conversion import import_directory
from moefold.checkpoint.hf.hf_directory import INDEX, SINGLE, HfDirectory
from moefold.checkpoint.single_process import StoredWeights
from moefold.config.loading import load_run_file
from moefold.data.token_files import open_token_file
from moefold.errors import MoefoldError

NEVER = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.", "socket.", "pickle.find_class")
NEVER += ("marshal.", "ctypes.dlopen", "code.__new__")


def slots(places: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Loader and slot -> the file that the poison takes the place of, and how it is opened."""
    hf, saved, data = places / "hf", places / "saved" / "step_00000000", places / "data"

    def open_hf() -> None:
        import_directory(HfDirectory(hf), places / "runs", "x")

    def read_tokens(path: Path) -> None:
        file = open_token_file(str(path), 256)
        file.window(0, min(4, file.num_tokens))

    return {
        "run configuration": (places / "run.yaml", lambda: load_run_file(places / "run.yaml")),
        "hf config.json": (hf / "config.json", open_hf),
        "hf weights": (hf / SINGLE, open_hf),
        "hf index": (hf / INDEX, open_hf),
        "hf pickle beside": (hf / "pytorch_model.bin", open_hf),
        "hf tokenizer": (hf / "tokenizer_config.json", open_hf),
        "checkpoint manifest": (saved / "manifest.json", lambda: StoredWeights(saved)),
        "checkpoint table": (saved / "ranks_00000/rank_00000.json", lambda: StoredWeights(saved)),
        "checkpoint data": (saved / "ranks_00000/rank_00000.safetensors", lambda: StoredWeights(saved)),
        "data .idx": (data / "good.idx", lambda: read_tokens(data / "good")),
        "data .bin": (data / "good.bin", lambda: read_tokens(data / "good")),
        "data .npy": (data / "array.npy", lambda: read_tokens(data / "array.npy")),
    }


class Watch:
    """Notes what a loader must not cause: code from text or from files under ``home``, processes, sockets."""

    def __init__(self, home: Path) -> None:
        self.seen: list[str] = []
        self.on, self.home = False, str(home)
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event.startswith(NEVER):
            self.note(event, args)
        elif event == "exec":
            name = getattr(args[0], "co_filename", "<string>")
            if (name.startswith("<") and not name.startswith("<frozen")) or self.home in name:
                self.note(event, args)
        elif event == "compile" and (args[1] is None or str(args[1]).startswith("<")):
            self.note(event, args)

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        caller = sys._getframe(2).f_code.co_filename
        # Annotations of our own classes are read as Python by `typing`, and an installed module may still be imported;
        # where its code comes from is seen when it is executed.
        annotation = event in ("compile", "exec") and caller == typing.__file__ and "canary" not in str(args)
        module = event == "marshal.loads" and caller == "<frozen importlib._bootstrap_external>"
        if not (annotation or module):
            self.seen.append(f"{event} {str(args)[:200]} from {caller}")


def main(corpus: Path, places: Path) -> None:
    table = slots(places)
    watch = Watch(corpus.parent)
    for slot, (target, load) in table.items():
        had_file = target.exists()
        kept = target.read_bytes() if had_file else b""
        if had_file:
            attempt(load)  # lazy imports of the loaders themselves, before the watch begins
            shutil.rmtree(places / "runs", ignore_errors=True)
        for poison in sorted(corpus.iterdir()):
            shutil.copyfile(poison, target)
            watch.on = True
            try:
                answer = attempt(load)
            finally:
                watch.on = False
            print(json.dumps({"slot": slot, "poison": poison.name, "answer": answer}))
            shutil.rmtree(places / "runs", ignore_errors=True)
        target.write_bytes(kept) if had_file else target.unlink()
    print(json.dumps({"events": watch.seen}))


def attempt(load: Callable[[], Any]) -> str:
    try:
        load()
    except MoefoldError as error:
        return f"refused: {str(error)[:300]}"
    return "opened"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
