"""No loader runs anything that is inside a file: sixty poisoned files in every slot of every loader, under audit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoint.hf_sources import Imagined
from tests.checkpoint.poisons import evil_module, poisons
from tests.checkpoint.test_hf_refusals import CONFIG, MODEL, good_tensors, write_directory

from moefold.checkpoint.single_process import write_whole
from moefold.config.loading import dump_run
from moefold.config.run import RunConfig

ROOT = Path(__file__).parents[2]
# Slots whose content is numbers to be taken as they are, or is carried along unread.
MAY_OPEN = {"data .bin", "data .npy", "hf pickle beside", "hf tokenizer"}


def good_places(places: Path) -> None:
    """One good input for every loader."""
    run = RunConfig(name="x", model=MODEL)
    write_directory(places / "hf", good_tensors())
    (places / "run.yaml").write_text(dump_run(run))
    write_whole(places / "saved", Imagined(MODEL), run, {})
    data = places / "data"
    data.mkdir()
    np.save(data / "array.npy", np.arange(4096, dtype=np.uint16) % 256)
    write_megatron(data / "good")


def write_megatron(prefix: Path) -> None:
    """The smallest .bin/.idx pair: one document of 4096 tokens of two bytes."""
    (prefix.with_suffix(".bin")).write_bytes((np.arange(4096, dtype=np.uint16) % 256).tobytes())
    parts = [
        b"MMIDIDX\x00\x00",
        (1).to_bytes(8, "little"),
        bytes([8]),
        (1).to_bytes(8, "little"),
        (2).to_bytes(8, "little"),
    ]
    parts += [
        np.array([4096], np.int32).tobytes(),
        np.array([0], np.int64).tobytes(),
        np.array([0, 1], np.int64).tobytes(),
    ]
    prefix.with_suffix(".idx").write_bytes(b"".join(parts))


@pytest.mark.slow
def test_no_loader_runs_what_is_in_a_file(tmp_path: Path) -> None:
    canary, corpus, places = tmp_path / "canary", tmp_path / "corpus", tmp_path / "places"
    corpus.mkdir()
    places.mkdir()
    files = poisons(str(canary), CONFIG)
    assert len(files) >= 60, len(files)
    for name, content in files.items():
        (corpus / name).write_bytes(content)
    good_places(places)
    (places / "hf" / "evil.py").write_text(evil_module(str(canary)))
    command = [sys.executable, str(Path(__file__).with_name("open_poisons.py")), str(corpus), str(places)]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *answers, last = map(json.loads, done.stdout.splitlines())
    assert last["events"] == []
    assert not canary.exists()
    assert len(answers) == 12 * len(files)
    for answer in answers:
        opened = answer["answer"] == "opened"
        # A configuration that is good but for a key that names code is read without that key.
        switched = answer["slot"] == "hf config.json" and answer["poison"].startswith("switch_")
        assert opened == switched or answer["slot"] in MAY_OPEN, answer


@pytest.mark.parametrize("name", ["exec.p4.pkl", "system.p0.pkl", "globals.bin"])
def test_the_poison_works(name: str, tmp_path: Path) -> None:
    """The same bytes, opened as a careless loader would: the canary appears, so the test above can fail."""
    canary = tmp_path / "canary"
    (tmp_path / "file").write_bytes(poisons(str(canary), CONFIG)[name])
    careless = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))"
    subprocess.run([sys.executable, "-c", careless, str(tmp_path / "file")], capture_output=True)
    assert canary.exists()
