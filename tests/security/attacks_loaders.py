"""Files from elsewhere: poisoned, pointing outside of their directory, or far larger than they look."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from tests.checkpoint.poisons import evil_module, poisons
from tests.checkpoint.test_hf_poison import good_places
from tests.checkpoint.test_hf_refusals import CONFIG, MODEL, good_tensors, write_directory

from moefold.checkpoint.hf.hf_config import read_config
from moefold.checkpoint.hf.hf_conversion import import_directory
from moefold.checkpoint.hf.hf_directory import INDEX, SINGLE, HfDirectory
from moefold.checkpoint.hf.untrusted_files import SafetensorsFile, parse_object
from moefold.checkpoint.manifest import read_manifest
from moefold.config.loading import parse_run
from moefold.data.input_rows import rows_of, split_tasks
from moefold.data.token_files import open_token_file
from moefold.errors import MoefoldError
from moefold.hardware.machine import read_machine
from moefold.train.fault_tolerance.flight_recorder import read_dump

ROOT = Path(__file__).parents[2]
# A sample for every commit; `tests/checkpoint/test_hf_poison.py` has them all.
SAMPLE = (
    "exec.p4.pkl",
    "globals.bin",
    "in_dict.pt",
    "zip_pt.pt",
    "object1.npy",
    "header1.npy",
    "apply.yaml",
    "hydra.json",
)


def poisoned_files(place: Path) -> str | None:
    """In every slot of every loader, in a process that notes what is executed, imported or started."""
    canary, corpus, places = place / "canary", place / "corpus", place / "places"
    corpus.mkdir()
    places.mkdir()
    files = poisons(str(canary), CONFIG)
    for name in (*SAMPLE, "switch_auto_map.json", "switch_attention.json"):
        (corpus / name).write_bytes(files[name])
    good_places(places)
    (places / "hf" / "evil.py").write_text(evil_module(str(canary)))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/checkpoint/open_poisons.py"), str(corpus), str(places)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    if done.returncode or canary.exists():
        return f"exit code {done.returncode}, canary {canary.exists()}: {done.stderr[-300:]}"
    events = json.loads(done.stdout.splitlines()[-1])["events"]
    return f"a loader caused {events[:3]}" if events else None


class Evil:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.canary),)


def poisoned_dump(place: Path) -> str | None:
    """Dumps of torch's flight recorder are pickles, and are read for a support bundle."""
    for number, protocol in enumerate((0, 2, 4, 5)):
        path = place / f"rank_{number}"
        path.write_bytes(pickle.dumps({"entries": [Evil(place / "canary")]}, protocol))
        with suppress(MoefoldError):
            read_dump(path)
            return f"protocol {protocol} is read"
    return "it ran" if (place / "canary").exists() else None


def bounded(action: Callable[[], object], seconds: float = 2.0, megabytes: int = 600) -> str | None:
    """Refused, or read, in time and without much memory."""
    began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        action()
    except MoefoldError:
        pass
    except (Exception, MemoryError) as error:
        return f"raises {type(error).__name__}: {str(error)[:100]}"
    took, grown = time.thread_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return f"took {took:.1f} s and {grown:.0f} MB" if took > seconds or grown > megabytes else None


def first_unbounded(cases: dict[str, Callable[[], object]]) -> str | None:
    return next((f"{name} {gain}" for name, action in cases.items() if (gain := bounded(action))), None)


def bomb_in_a_dump(place: Path) -> str | None:
    """Lists that contain the list before them twice: a small file of 2^40 values. And one that contains itself."""
    levels: list[object] = ["x"]
    for _ in range(40):
        levels = [levels, levels]
    (place / "rank_0").write_bytes(pickle.dumps(levels, 4))
    itself: list[object] = []
    itself.append(itself)
    (place / "rank_1").write_bytes(pickle.dumps(itself, 4))
    deep: list[object] = []
    for _ in range(150):
        deep = [deep]
    (place / "rank_2").write_bytes(pickle.dumps(deep, 4))
    names = ("rank_0", "rank_1", "rank_2")
    return first_unbounded({name: lambda name=name: json.dumps(read_dump(place / name)) for name in names})  # type: ignore[misc]


def bombs_in_text(place: Path) -> str | None:
    """Aliases, brackets and digits in configurations; nesting and repeated keys in JSON of models."""
    alias = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(8)
    )
    deep = b'{"a":' * 100_000
    return first_unbounded(
        {
            "aliases": lambda: parse_run(alias),
            "brackets": lambda: parse_run("name: " + "[" * 200_000),
            "digits": lambda: parse_run("seed: " + "9" * 200_000),
            "tags": lambda: parse_run("seed: !!python/object/apply:os.system ['true']"),
            "nested JSON": lambda: parse_object(deep, "config.json"),
            "nested lists": lambda: parse_object(b'{"a":' + b"[" * 300_000, "config.json"),
            "large exponents": lambda: parse_object(b'{"a": 1e999999999}', "config.json"),
            "long numbers": lambda: parse_object(b'{"a": ' + b"9" * 900_000 + b"}", "config.json"),
            "huge sizes": lambda: read_config(CONFIG | {"num_hidden_layers": 10**15, "vocab_size": 10**18}),
        }
    )


def packed_bombs(place: Path) -> str | None:
    """Rows that unpack to a thousand times their size, without a line's end."""
    path, text = place / "rows.jsonl.gz", place / "text.txt.gz"
    for each in (path, text):
        with gzip.open(each, "wb", compresslevel=1) as file:
            for _ in range(80):
                file.write(b" " * (8 << 20))

    def read(name: Path) -> None:
        for task in split_tasks([str(name)]):
            for chunk in task:
                for _ in rows_of(chunk, ["text"]):
                    pass

    # The bound itself is 256 MB, and decompressing it takes its time.
    cases = ((each.name, bounded(partial(read, each), 20, 1100)) for each in (path, text))
    return next((f"{name} {gain}" for name, gain in cases if gain), None)


def lying_sizes(place: Path) -> str | None:
    """Headers that promise more than the file has."""
    weights, index = place / "x.safetensors", place / "x.idx"
    (place / "x.bin").write_bytes(bytes(64))

    def tensors(header: bytes, length: int | None = None) -> None:
        weights.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header)
        file = SafetensorsFile(weights)
        for name in file.entries:
            file.read(name)

    def tokens(counts: tuple[int, int]) -> None:
        index.write_bytes(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x08" + np.array(counts, "<i8").tobytes())
        open_token_file(str(place / "x"), 256)

    huge = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    many = json.dumps({"w": {"dtype": "F32", "shape": [2**31, 2**31, 4], "data_offsets": [0, 0]}}).encode()
    return first_unbounded(
        {
            "a header of 2^63 bytes": lambda: tensors(b"{}", 2**63),
            "a header of 100 MB": lambda: tensors(b"{}", 100 << 20),
            "a tensor of 4 TB": lambda: tensors(huge),
            "sizes whose product overflows": lambda: tensors(many),
            "2^62 documents": lambda: tokens((2**62, 2**62)),
            "-1 documents": lambda: tokens((-1, -1)),
        }
    )


def names_outside(place: Path) -> str | None:
    """Indexes of weights, and manifests, that name files of the user."""
    secret = place / "secret.safetensors"
    tensors = good_tensors()
    write_directory(place / "good", tensors)
    secret.write_bytes((place / "good" / SINGLE).read_bytes())
    names = ("../secret.safetensors", str(secret), "a/../../secret.safetensors", "link.safetensors", "..", "x\x00y", "")
    for name in names:
        folder = place / "hf"
        write_directory(folder, tensors)
        (folder / SINGLE).unlink()
        (folder / "link.safetensors").unlink(missing_ok=True)
        (folder / "link.safetensors").symlink_to(secret)
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
        (folder / INDEX).write_text(json.dumps(index))
        with suppress(MoefoldError):
            import_directory(HfDirectory(folder), place / "runs", "x")
            return f"weights are read from {name!r}"
    step = place / "step_00000001"
    for name in ("manifest.json", "rank_00000.json"):
        step.mkdir(exist_ok=True)
        (step / "manifest.json").unlink(missing_ok=True)
        (step / name).symlink_to(secret)
        with suppress(MoefoldError):
            read_manifest(step)
            return f"{name} is read behind a link"
    return None


def weights_behind_a_link(place: Path) -> str | None:
    """Files of a downloaded directory that are links to files of the user."""
    for name in (SINGLE, "config.json", "tokenizer.json"):
        folder = place / f"hf_{name}"
        write_directory(folder, good_tensors())
        secret = place / "secret"
        secret.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b'{"secret": 1}')
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        with suppress(MoefoldError):
            import_directory(HfDirectory(folder), place / "runs", "x")
            copied = [path for path in (place / "runs").rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
            if name != "tokenizer.json" or copied:
                return f"{name} is read behind a link"
    return None


def code_in_a_model_directory(place: Path) -> str | None:
    """config.json that names code beside it; nothing asks for it to be trusted, and nothing can."""
    canary = place / "canary"
    for name, content in poisons(str(canary), CONFIG).items():
        if name.startswith("switch_"):
            folder = place / name
            write_directory(folder, good_tensors())
            (folder / "config.json").write_bytes(content)
            (folder / "evil.py").write_text(evil_module(str(canary)))
            with suppress(MoefoldError):
                HfDirectory(folder).close()
    return "it ran" if canary.exists() or "evil" in sys.modules else None


def escape_from_a_template(place: Path) -> str | None:
    """Chat templates are programs: they must not reach Python."""
    from transformers.utils.chat_template_utils import render_jinja_template

    canary = place / "canary"
    for text in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        f"{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}",
        f"{{{{ self.__init__.__globals__['__builtins__']['open']('{canary}', 'w') }}}}",
        f"{{{{ messages.append.__self__.__class__.__base__.__subclasses__() }}}}{canary}",
        "{% for i in range(10**9) %}x{% endfor %}",
    ):
        try:
            shown, _ = render_jinja_template(conversations=[[{"role": "user", "content": "x"}]], chat_template=text)
        except Exception:
            continue
        if canary.exists() or "class" in str(shown):
            return f"{text} gives {str(shown)[:100]}"
    return None


def broken_machine_files(place: Path) -> str | None:
    path = place / "machine.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        read_machine(path)

    contents = (b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"gpu": 1e999}', b"9" * 100_000, b" " * (64 << 20))
    cases = ((each[:20], bounded(partial(read, each))) for each in contents)
    return next((f"{name!r} {gain}" for name, gain in cases if gain), None)


assert MODEL is not None
ATTACKS = {
    "files from elsewhere": [
        ("poisoned files in every slot of every loader, under audit", "code runs", poisoned_files),
        ("a pickle in the place of a flight recorder's dump", "code runs", poisoned_dump),
        ("code beside a model that its config.json names", "it is imported", code_in_a_model_directory),
        ("a chat template that reaches for Python", "code runs", escape_from_a_template),
        ("file names outside of their directory, in an index or a manifest", "another file is read", names_outside),
        ("links in a downloaded directory", "another file is read or copied", weights_behind_a_link),
    ],
    "bombs": [
        ("a dump of 2^40 values in a kilobyte", "memory, or no end", bomb_in_a_dump),
        ("aliases, brackets, digits and nesting", "memory, or no end", bombs_in_text),
        ("packed rows of a thousand times their size", "memory", packed_bombs),
        ("headers that promise more than there is", "memory", lying_sizes),
        ("files of measured machines that are none", "an exception without the file's name", broken_machine_files),
    ],
}
SLOW = (poisoned_files, packed_bombs)
