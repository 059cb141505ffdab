"""Damaged inputs for every parser: each ends in a value or in one typed error that names its file, and none takes long.

`python -m tests.fuzz --cases 10000 --seed S --json docs/measured/fuzz.json`. A case is drawn by its parser, seed and
number, so a failing one can be repeated alone: `--parser NAME --first N --cases 1`. Text is damaged as bytes, and JSON
also as data, so that what lies behind the first syntax check is reached as well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.brain.test_machine import made_up
from tests.checkpoint.hf_sources import Imagined
from tests.checkpoint.test_hf_poison import write_megatron
from tests.checkpoint.test_hf_refusals import CONFIG, MODEL, good_tensors, write_directory
from tests.commit_seed import commit_seed

from moefold.checkpoint.files import FileRecord
from moefold.checkpoint.hf.hf_config import read_config
from moefold.checkpoint.hf.hf_directory import INDEX, SINGLE, HfDirectory
from moefold.checkpoint.hf.untrusted_files import SafetensorsFile, read_object
from moefold.checkpoint.manifest import canonical, read_manifest, read_table
from moefold.checkpoint.single_process import write_whole
from moefold.config.loading import dump_run, load_run_file, override
from moefold.config.run import RunConfig
from moefold.data.input_rows import rows_of, split_tasks
from moefold.data.token_files import open_token_file
from moefold.errors import MoefoldError
from moefold.hardware.cluster import cluster_of
from moefold.hardware.machine import machine_json, read_machine
from moefold.plan.report.form import question_of_form
from moefold.plan.search.proposal import Question
from moefold.recipes.catalog import recipe
from moefold.rl.weight_transport import receive_weights
from moefold.train.fault_tolerance.flight_recorder import read_dump
from moefold.train.report.history import read_history
from moefold.train.report.summary import summary

SLOWEST = 2.0
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    10**30,
    1.5,
    1e308,
    -0.0,
    "",
    "x",
    "../x",
    "\x00",
    "\ud800",
)
ODD += ([], {}, [[]], [None], {"": {}}, "a" * 5000, list(range(50)), "1e999", "\u202e")
PIECES = (
    b"",
    b"\x00",
    b"\xff\xff",
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b":",
    b",",
    b"\n",
    b"- ",
    b"&a ",
    b"*a",
    b"!!x ",
    b"1e999",
)
PIECES += (b"NaN", b"null", b"\xc3\x28", b"\xef\xbb\xbf", b"9" * 400, b"[" * 300, b"-", b"\\u0000", b"\x80\x04", b"../")
# May a message leave out the file: the text came from a command line, a request or another process.
NO_FILE = {"overrides", "requests", "weight headers"}


@dataclass
class Parser:
    """``good`` is damaged and given to ``parse``; ``name`` of the file must be in what it raises."""

    good: list[Any]
    parse: Callable[[bytes], object]
    name: str = ""


@dataclass
class Figures:
    cases: int = 0
    values: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)


def damaged_bytes(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5, 20))):
        at, size = chance.randrange(len(out) + 1), chance.choice((0, 1, 1, 4, 8, 40))
        kind = chance.randrange(6)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del out[at : at + size]
        elif kind == 2:
            out[at:at] = chance.choice(PIECES)
        elif kind == 3:
            out[at : at + size] = chance.randbytes(size)
        elif kind == 4:
            other = chance.randrange(len(out) + 1)
            out[at:at] = out[other : other + 8 * size]
        else:
            del out[at : len(out) if chance.random() < 0.2 else at + 1]
    return bytes(out)


def damaged_data(data: Any, chance: random.Random) -> Any:
    """JSON data with one place changed: another value, a key removed, added or renamed."""
    if isinstance(data, dict) and data and chance.random() < 0.85:
        key = chance.choice(list(data))
        changed = dict(data)
        kind = chance.randrange(6)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[str(chance.choice(("", "x", "auto_map", key + "x", "\x00")))] = chance.choice(ODD)
        else:
            changed[key] = damaged_data(data[key], chance)
        return changed
    if isinstance(data, list) and data and chance.random() < 0.85:
        at = chance.randrange(len(data))
        return [*data[:at], damaged_data(data[at], chance), *data[at + 1 :]]
    return chance.choice(ODD)


def mutant(good: Any, chance: random.Random) -> bytes:
    if isinstance(good, bytes):
        return damaged_bytes(good, chance)
    data = good
    for _ in range(chance.choice((1, 1, 2, 4))):
        data = damaged_data(data, chance)
    text = json.dumps(data).encode()
    return damaged_bytes(text, chance) if chance.random() < 0.3 else text


def into(path: Path, read: Callable[[], object], content: bytes) -> object:
    path.write_bytes(content)
    return read()


def parsers(place: Path) -> dict[str, Parser]:
    run = RunConfig(name="x", model=MODEL)
    found = {
        "run files": Parser(
            [dump_run(run).encode(), dump_run(recipe("deepseek_v3")).encode()], partial(load_run_text, place)
        ),
        "overrides": Parser([b"--parallel.ep\n8\nmodel.num_layers=4\n--optim.lr\n1e-3\ndata.train=x"], overridden),
    }
    found |= checkpoint_parsers(place, run) | model_parsers(place) | data_parsers(place) | run_parsers(place)
    question = Question(recipe("olmoe_1b_7b"), "olmoe_1b_7b", cluster_of("H100", 16))

    def request(content: bytes) -> object:
        from urllib.parse import parse_qsl

        return question_of_form(dict(parse_qsl(content.decode(errors="replace"))), question)

    asked = (
        b"run=olmoe_1b_7b&gpu=H100&gpus=16&framework=moefold&seq=4096&global_batch=256&nic=50&tp=1&ep=8&imbalance=1.2"
    )
    return found | {"requests": Parser([asked], request)}


def load_run_text(place: Path, content: bytes) -> object:
    return into(place / "run.yaml", lambda: load_run_file(place / "run.yaml", recipe), content)


def overridden(content: bytes) -> object:
    return override(recipe("debug_tiny"), content.decode(errors="replace").split("\n"))


def checkpoint_parsers(place: Path, run: RunConfig) -> dict[str, Parser]:
    step = write_whole(place / "saved", Imagined(MODEL), run, {})
    manifest = read_manifest(step)
    path, table = step / "manifest.json", manifest.table_path(step, 0)
    good, rows = json.loads(path.read_bytes()), json.loads(table.read_bytes())

    def read_hashed(content: bytes) -> object:
        """With the hash that a forger would write."""
        try:
            data = {key: value for key, value in json.loads(content).items() if key != "sha256"}
            content = canonical(data | {"sha256": hashlib.sha256(canonical(data)).hexdigest()})
        except (ValueError, AttributeError, RecursionError):
            pass
        return into(path, lambda: read_manifest(step), content)

    def read_rows(content: bytes) -> object:
        with suppress(ValueError, RecursionError):
            content = canonical(json.loads(content))
        record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
        files = type(manifest.files[0])(manifest.files[0].data, record)
        forged = replace(manifest, files=(files,))
        return into(table, lambda: read_table(step, forged, 0), content)

    return {
        "checkpoint manifests": Parser([good], read_hashed, path.name),
        "rank tables": Parser([rows], read_rows, table.name),
    }


def model_parsers(place: Path) -> dict[str, Parser]:
    folder, tensors = place / "hf", good_tensors()
    write_directory(folder, tensors)
    weights, index = folder / SINGLE, folder / INDEX
    header = weights.read_bytes()
    small = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    named = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, SINGLE)}

    def open_weights() -> None:
        file = SafetensorsFile(place / "w.safetensors")
        try:
            for name in file.entries:
                file.read(name) if file.entries[name].dtype in ("F32", "F16", "BF16", "F64") else None
        finally:
            file.close()

    def open_directory() -> None:
        HfDirectory(folder).close()

    return {
        "safetensors": Parser(
            [len(small).to_bytes(8, "little") + small + bytes(16), header],
            partial(into, place / "w.safetensors", open_weights),
            "w.safetensors",
        ),
        "config.json": Parser(
            [CONFIG], partial(into, place / "config.json", lambda: read_config(read_object(place / "config.json")))
        ),
        "weight indexes": Parser([named], partial(into, index, open_directory)),
    }


def data_parsers(place: Path) -> dict[str, Parser]:
    write_megatron(place / "good")
    np.save(place / "array.npy", np.arange(64, dtype=np.uint16))
    chat = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "text": "z"}

    def tokens(path: Path) -> object:
        file = open_token_file(str(path), 1 << 20)
        return file.window(0, min(4, file.num_tokens))

    def rows() -> list[object]:
        return [
            row.value
            for task in split_tasks([str(place / "x.jsonl")])
            for c in task
            for row in rows_of(c, ["messages"])
        ]

    return {
        "Megatron indexes": Parser(
            [(place / "good.idx").read_bytes()],
            partial(into, place / "good.idx", lambda: tokens(place / "good")),
            "good",
        ),
        "npy headers": Parser(
            [(place / "array.npy").read_bytes()],
            partial(into, place / "array.npy", lambda: tokens(place / "array.npy")),
            "array.npy",
        ),
        "JSONL rows": Parser([chat, json.dumps(chat).encode()], partial(into, place / "x.jsonl", rows), "x.jsonl"),
    }


def run_parsers(place: Path) -> dict[str, Parser]:
    folder = place / "run"
    folder.mkdir()
    start = {"kind": "start", "time": 1.0, "step": 0, "run": "x", "world": 2, "steps": 9, "config": {"model": {}}}
    step = {"kind": "step", "step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens": 5, "seconds": {"total": 1.0}}
    step |= {"balance": {"a": 0.1}, "counts": [[1, 2], [3, 4]], "counts_steps": 1, "metrics": {"m": 1.0}, "speed": {}}
    lines = b"\n".join(json.dumps(each).encode() for each in (start, step, step | {"step": 2}))
    part = {"name": "w", "dtype": "F32", "shape": [4], "offset": 0, "first_row": 0, "full_shape": [4]}
    dump = {"version": "2.10", "entries": [{"seq_id": 7, "input_sizes": [[2, 3]], "pg_name": ("0", "x")}], "ok": True}
    machine = json.loads(machine_json(made_up()))

    def received(content: bytes) -> object:
        class Channel:
            def send(self, header: bytes, payload: torch.Tensor) -> None: ...

            def receive(self) -> tuple[bytes, torch.Tensor]:
                return content, torch.zeros(64, dtype=torch.uint8)

        return next(receive_weights(Channel()), None)

    return {
        "metrics": Parser(
            [lines], partial(into, folder / "metrics.jsonl", lambda: summary(read_history(folder))), "metrics.jsonl"
        ),
        "machine files": Parser(
            [machine],
            partial(into, place / "machine.json", lambda: read_machine(place / "machine.json")),
            "machine.json",
        ),
        "weight headers": Parser([{"parts": [part, part], "bytes": 64}], received),
        "flight recorder dumps": Parser(
            [pickle.dumps(dump, 2), pickle.dumps(dump, 4)],
            partial(into, place / "rank_0", lambda: read_dump(place / "rank_0")),
            "rank_0",
        ),
    }


def fuzz(name: str, parser: Parser, seed: int, first: int, cases: int) -> Figures:
    figures = Figures()
    for number in range(first, first + cases):
        chance = random.Random(f"{name} {seed} {number}")
        content = mutant(chance.choice(parser.good), chance)
        began = time.thread_time()
        wrong = ""
        try:
            parser.parse(content)
            figures.values += 1
        except MoefoldError as error:
            figures.refused += 1
            if name not in NO_FILE and parser.name not in str(error):
                wrong = f"does not name {parser.name}: {str(error)[:200]}"
        except (Exception, RecursionError) as error:
            wrong = f"{type(error).__name__}: {str(error)[:200]}"
        took = time.thread_time() - began
        figures.slowest_s = max(figures.slowest_s, took)
        figures.cases += 1
        if wrong or took > SLOWEST:
            figures.failures.append(f"{name} case {number}: {wrong or f'{took:.1f} s'}: {content[:300]!r}")
    return figures


def main() -> int:
    arguments = argparse.ArgumentParser(description="Give every parser damaged inputs.")
    arguments.add_argument("--cases", type=int, default=200, help="per parser")
    arguments.add_argument("--seed", type=int, default=commit_seed())
    arguments.add_argument("--first", type=int, default=0)
    arguments.add_argument("--parser", action="append", help="only these")
    arguments.add_argument("--json", type=Path, help="write the figures to this file")
    args = arguments.parse_args()
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="moefold-fuzz-") as folder:
        for name, parser in parsers(Path(folder)).items():
            if args.parser is None or name in args.parser:
                figures = found[name] = fuzz(name, parser, args.seed, args.first, args.cases)
                print(
                    f"{name}: {figures.values} values, {figures.refused} refused, {len(figures.failures)} failed",
                    flush=True,
                )
                for each in figures.failures[:3]:
                    print(f"  {each}", flush=True)
    if args.json is not None:
        rows = {
            name: {"cases": f.cases, "values": f.values, "refused": f.refused, "failed": len(f.failures)}
            | {"slowest_ms": round(1000 * f.slowest_s)}
            for name, f in found.items()
        }
        before = json.loads(args.json.read_text())["parsers"] if args.parser and args.json.exists() else {}
        args.json.write_text(json.dumps({"seed": args.seed, "parsers": before | rows}, indent=1) + "\n")
    return 1 if any(figures.failures for figures in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
