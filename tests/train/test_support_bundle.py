"""A support bundle has what a developer needs, and none of the secrets that are planted everywhere here."""

from __future__ import annotations

import json
import os
import pickle
import stat
import zipfile
from pathlib import Path

import pytest
import torch

from moefold.api.runs import load_run
from moefold.cli.main import main
from moefold.config.loading import dump_run
from moefold.errors import MoefoldError
from moefold.redaction import REDACTED, Redactor
from moefold.train.fault_tolerance.flight_recorder import dump_files, plain_pickle, read_dump, recorder_environment
from moefold.train.support_bundle import LAST_METRICS, collect, write_bundle

# By the name of the variable that has it; all must be gone, wherever they were planted.
SECRETS = {
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrSt",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MY_PASSWORD": "correct-horse",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "NCCL_PLUGIN_SECRET": "plugin-secret-1",
    "SSH_PRIVATE_KEY": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
}
# Of no variable: known by their form.
SHAPES = {
    "a login": ("s3://alice:letmein99@bucket/tokens", "letmein99"),
    "a query": ("https://host/x?X-Amz-Signature=deadbeef99", "deadbeef99"),
    "GitHub": ("ghp_0123456789abcdefABCDEF", "ghp_0123456789abcdefABCDEF"),
    "OpenAI": ("sk-proj-0123456789abcdefXY", "sk-proj-0123456789abcdefXY"),
    "AWS": ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    "JWT": ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
    "assigned": ("--api_key=zzz-planted-zzz", "zzz-planted-zzz"),
    "a header": ("Authorization: Bearer planted-bearer-1", "planted-bearer-1"),
}
PLANTED = " ".join([*SECRETS.values(), *(text for text, _ in SHAPES.values())])
ALL_SECRETS = [*SECRETS.values(), *(secret for _, secret in SHAPES.values())]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "dumps").mkdir()
    kept = {
        "NCCL_DEBUG": "INFO",
        "RANK": "3",
        "NCCL_TOPO_FILE": f"/x/{SECRETS['MY_PASSWORD']}.xml",
        "CUSTOM": "private",
    }
    dumps = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "dumps" / "trace_rank_"), "HOME": str(tmp_path / "home")}
    return SECRETS | kept | dumps


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run that has secrets in its configuration, its metrics, its comments and files beside them."""
    folder = tmp_path / "home" / "runs" / "mine"
    (folder / "checkpoints" / "step_00000003").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000003" / "weights").write_bytes(b"12345")
    (folder / "checkpoints" / f"step_{SECRETS['MY_PASSWORD']}").mkdir()
    run = load_run(
        "debug_tiny", {"data.train": "s3://alice:letmein99@bucket/tokens", "train.wandb": SECRETS["HF_TOKEN"]}
    )
    (folder / "config.yaml").write_text(dump_run(run) + f"# {PLANTED.replace(chr(10), chr(32))}\n")
    (folder / "notes.txt").write_text(PLANTED)
    start = {"kind": "start", "step": 0, "world": 2, "config": {"note": PLANTED}, "unknown": PLANTED}
    steps = [{"kind": "step", "step": n, "loss": 2.5, "tokens": 512, "metrics": {}} for n in range(1, 400)]
    stop = {"kind": "stop", "step": 399, "reason": f"failed: {PLANTED}"}
    lines = [json.dumps(line) for line in (start, *steps, stop)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "st')
    return folder


def dump_of(text: str) -> dict[str, object]:
    frames = [{"name": "step", "filename": text, "line": 12}]
    entry = {
        "seq_id": 7,
        "state": "started",
        "input_sizes": [[2, 3], [70000]],
        "frames": frames,
        "pg_name": ("0", text),
    }
    return {"version": "2.10", "entries": [entry], "ok": True, "nothing": None, "ms": 0.5, "large": 1 << 40}


def contents(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_no_planted_secret_leaves(environment: dict[str, str], run_directory: Path, tmp_path: Path) -> None:
    dumped = Path(environment["TORCH_FR_DUMP_TEMP_FILE"] + "3")
    dumped.write_bytes(pickle.dumps(dump_of(f"{environment['HOME']}/x.py {PLANTED}"), protocol=2))
    bundle = collect(run_directory, environment, environment["HOME"])
    write_bundle(bundle, tmp_path / "out.zip")
    files = contents(tmp_path / "out.zip")
    everything = "\n".join(f"{name}\n{text}" for name, text in files.items())
    for secret in [*ALL_SECRETS, "private", environment["HOME"], "b3BlbnNzaC1rZXk"]:
        assert secret not in everything and json.dumps(secret)[1:-1] not in everything, secret
    assert set(json.loads(files["environment.json"])) == {
        *("NCCL_DEBUG", "RANK", "NCCL_TOPO_FILE", "TORCH_FR_DUMP_TEMP_FILE")
    }
    assert stat.S_IMODE((tmp_path / "out.zip").stat().st_mode) == 0o600


def test_what_is_needed_is_there(environment: dict[str, str], run_directory: Path) -> None:
    Path(environment["TORCH_FR_DUMP_TEMP_FILE"] + "3").write_bytes(pickle.dumps(dump_of("step.py"), protocol=2))
    files = collect(run_directory, environment, environment["HOME"]).files
    assert json.loads(files["versions.json"])["torch"]
    assert json.loads(files["gpus.json"])["missing"]
    config = json.loads(files["run/config.json"])
    assert config["model"]["num_layers"] == 2 and config["data"]["train"] == f"s3://{REDACTED}@bucket/tokens"
    lines = [json.loads(line) for line in files["run/metrics.jsonl"].splitlines()]
    assert lines[0] == {"kind": "start", "step": 0, "world": 2} and lines[-2]["loss"] == 2.5
    assert len(lines) == LAST_METRICS + 1 or len(lines) == LAST_METRICS
    assert json.loads(files["run/checkpoints.json"]) == [{"name": "step_00000003", "files": 1, "bytes": 5}]
    entry = json.loads(files["flight_recorder/0-rank-3.json"])["entries"][0]
    assert entry["input_sizes"] == [[2, 3], [70000]] and entry["frames"][0]["filename"] == "step.py"


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_dump_is_read_as_pickle_would(protocol: int) -> None:
    assert plain_pickle(pickle.dumps(dump_of("a" * 300), protocol=protocol)) == dump_of("a" * 300)


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("data", [pickle.dumps(_Evil()), b"", b"not a pickle", b"\x80\x02]q\x00", b"\x80\x02N)b."])
def test_a_dump_that_is_more_than_data_is_refused(
    data: bytes, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(environment["TORCH_FR_DUMP_TEMP_FILE"] + "0")
    path.write_bytes(data)
    with pytest.raises(MoefoldError, match="trace_rank_0: not plain data"):
        read_dump(path)
    assert not (tmp_path / "evil").exists()
    bundle = collect(None, environment, environment["HOME"])
    assert any("trace_rank_0: not plain data" in line for line in bundle.left_out)


def test_the_recorder_is_turned_on_where_the_user_has_not_said_otherwise(tmp_path: Path) -> None:
    """On fakes: no GPU has run this. The names are those that the installed torch has in its libraries."""
    mine = {"TORCH_FR_BUFFER_SIZE": "7"}
    wanted = recorder_environment(mine, tmp_path)
    assert "TORCH_FR_BUFFER_SIZE" not in wanted and wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert wanted["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight_recorder/rank_"
    library = (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    for name in recorder_environment({}, tmp_path):
        assert name.encode() in library or name in header.read_text(), name


def test_dumps_and_hangs_of_a_run_are_in_its_bundle(environment: dict[str, str], run_directory: Path) -> None:
    (run_directory / "flight_recorder").mkdir()
    (run_directory / "flight_recorder" / "rank_5").write_bytes(pickle.dumps(dump_of("step.py"), protocol=2))
    (run_directory / "hangs").mkdir()
    report = {"what": "hang", "culprits": [2], "other": PLANTED, "ranks": [{"rank": 2, "stacks": [PLANTED, "read"]}]}
    for number in range(1, 6):
        (run_directory / "hangs" / f"hang_{number:04d}.json").write_text(json.dumps(report))
    (run_directory / "hangs" / "hang_0006.json").write_text("{")
    bundle = collect(run_directory, environment, environment["HOME"])
    found = [name for name in bundle.files if name.startswith("run/hangs/")]
    assert found == ["run/hangs/hang_0004.json", "run/hangs/hang_0005.json"]
    assert any("hang_0006.json" in line for line in bundle.left_out)
    kept = json.loads(bundle.files[found[0]])
    assert kept["culprits"] == [2] and kept["ranks"][0]["stacks"][1] == "read" and "other" not in kept
    assert not any(
        secret in bundle.files[found[0]] for secret in ALL_SECRETS if secret.isascii() and "\n" not in secret
    )
    assert "flight_recorder/0-rank-5.json" in bundle.files


def test_only_files_of_ranks_are_dumps(environment: dict[str, str]) -> None:
    for name in ("0", "12", "3.txt", "x"):
        Path(environment["TORCH_FR_DUMP_TEMP_FILE"] + name).write_bytes(b"")
    assert [path.name for path in dump_files(environment)] == ["trace_rank_0", "trace_rank_12"]


@pytest.mark.parametrize(("text", "secret"), SHAPES.values(), ids=SHAPES)
def test_a_secret_is_known_by_its_form(text: str, secret: str) -> None:
    assert secret not in (said := Redactor({}).text(f"before {text} after")), said
    assert said.startswith("before ") and said.endswith(" after")


def test_numbers_and_digests_stay() -> None:
    data = {
        "tokens": 512,
        "tokens_per_s": 1.5,
        "ids": "ab" * 32,
        "tokenizer": "bytes",
        "path": "data/web",
        "token": "x",
    }
    assert Redactor({}).data(data) == data | {"token": REDACTED}


def test_the_verb_writes_once_and_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["support-bundle", "--list"]) == 0 and not list(tmp_path.iterdir())
    assert "nothing written" in capsys.readouterr().out
    assert main(["support-bundle", "--out", "a.zip", "--json"]) == 0
    assert "versions.json" in json.loads(capsys.readouterr().out)["files"]
    assert main(["support-bundle", "--out", "a.zip"]) == 2
    assert "a.zip exists already" in capsys.readouterr().err
    assert main(["support-bundle", "missing"]) == 2
    assert "missing is no directory" in capsys.readouterr().err
