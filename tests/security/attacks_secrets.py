"""Where a secret could be read by somebody who gets a run's files, its output, or a support bundle."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from moefold.api.runs import load_run
from moefold.cli.main import main
from moefold.config.loading import plain_data
from moefold.errors import MoefoldError
from moefold.redaction import without_login

CANARY = "canary7f3a"
# Logins with characters that make an address hard to read.
LOGINS = ("alice:{}@", ":{}@", "{}@", "al%40ice:{}@", "alice:x@{}@", "alice:a/b{}@")
ENVIRONMENT = {
    "HF_TOKEN": f"hf_{CANARY}AbCdEfGhIjKlMn",
    "WANDB_API_KEY": f"{CANARY}0123456789",
    "AWS_SECRET_ACCESS_KEY": f"secret/{CANARY}",
    "MLFLOW_TRACKING_PASSWORD": CANARY,
}


@contextmanager
def output() -> Iterator[io.StringIO]:
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        yield said


def holding(folder: Path, secret: str = CANARY) -> list[str]:
    """Files under a folder that have the secret in their name or content, packed ones among them."""
    found = []
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                content = b"".join(archive.read(name) for name in archive.namelist())
        if secret.encode() in content or secret in path.name:
            found.append(path.name)
    return found


def tokens_at(address: str) -> None:
    """Token files in fsspec's memory, which takes any address."""
    import fsspec  # type: ignore[import-untyped]

    buffer = io.BytesIO()
    np.save(buffer, np.arange(8192, dtype=np.uint16) % 256)
    with fsspec.open(f"{address}/tokens.npy", "wb") as file:
        file.write(buffer.getvalue())


def train(place: Path, address: str, steps: int = 2, *more: str) -> tuple[int, str]:
    words = ["train", "debug_tiny", "--name", "x", "--train.directory", str(place / "runs"), "--device", "cpu"]
    words += ["--train.steps", str(steps), "--train.saving.every", "1", "--data.train", address]
    with output() as said:
        code = main([*words, "--data.validation", "null", *more])
    return code, said.getvalue()


def login_in_a_data_address(place: Path) -> str | None:
    """A run on data behind a login, stopped, resumed by the same command, and from its own config.yaml."""
    address = f"memory://alice:{CANARY}@store/x"
    tokens_at(address)
    for steps in (2, 3):
        code, said = train(place, address, steps)
        if code or CANARY in said:
            return f"exit code {code}, said {said[-300:]!r}"
        if found := holding(place):
            return f"it is in {found}"
    with output() as printed:
        code = main(["train", str(place / "runs" / "x" / "config.yaml"), "--train.steps", "4", "--device", "cpu"])
    if code != 2 or "data.train" not in printed.getvalue() or "login" not in printed.getvalue():
        return f"started without a login: {printed.getvalue()[-300:]!r}"
    return None


def login_in_an_error(place: Path) -> str | None:
    """Addresses that cannot be opened, each with a login that is written in another way."""
    for login in LOGINS:
        for scheme in ("memory", "nosuchscheme", "s3", "http"):
            address = f"{scheme}://{login.format(CANARY)}localhost:1/none?X-Amz-Signature={CANARY}"
            if CANARY in without_login(address):
                return f"{address} becomes {without_login(address)}"
            if scheme in ("memory", "nosuchscheme"):
                code, said = train(place, address)
                if code == 0 or CANARY in said:
                    return f"said {said[-300:]!r}"
    return f"it is in {found}" if (found := holding(place)) else None


def login_in_other_settings(place: Path) -> str | None:
    """What TensorBoard, Weights & Biases, MLflow, metrics.jsonl and manifests are given of a run."""
    address = f"https://alice:{CANARY}@host/x?token={CANARY}"
    run = load_run("debug_tiny", {"train.wandb": address, "train.mlflow": address, "data.validation": address})
    run = load_run(run, {"data.mixture": [{"path": address, "weight": 1.0}]})
    if CANARY in (text := json.dumps(plain_data(run))):
        return f"written down as {text}"
    try:
        raise MoefoldError(f"{address}: cannot be opened")
    except MoefoldError as error:
        return f"an error says {error}" if CANARY in str(error) else None


def secrets_of_the_environment(place: Path) -> str | None:
    """Canaries in the environment of a run that trains, fails, is reported and is bundled."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        code, said = train(place, "builtin")
        _, failed = train(place, str(place / "missing"), 3)
        with output() as more:
            main(["report", str(place / "runs" / "x")])
            main(["doctor"])
            main(["support-bundle", str(place / "runs" / "x"), "--out", str(place / "bundle.zip")])
    if code or not (place / "bundle.zip").exists():
        return f"the run did not train: {said[-300:]}"
    if CANARY in said + failed + more.getvalue():
        return "it is printed"
    return f"it is in {found}" if (found := holding(place)) else None


def secrets_in_a_bundle(place: Path) -> str | None:
    """A run's own files have secrets that its user wrote there; the bundle is what is sent away."""
    train(place, "builtin")
    folder = place / "runs" / "x"
    (folder / "hangs").mkdir()
    frame = f"connect to s3://alice:{CANARY}@bucket, Authorization: Bearer {CANARY}"
    (folder / "hangs" / "hang_0001.json").write_text(json.dumps({"what": frame, "ranks": [{"stacks": frame}]}))
    (folder / "notes.txt").write_text(CANARY)
    with output() as said:
        main(["support-bundle", str(folder), "--out", str(place / "sent" / ".." / "bundle.zip")])
    found = [name for name in holding(place) if name.endswith(".zip")]
    return f"it is in {found}" if found or CANARY in said.getvalue() else None


def changed_login(place: Path) -> str | None:
    """A password that was renewed must not stop a run: then people would put it into files."""
    from moefold.train.train_context import changed_settings

    runs = [load_run("debug_tiny", {"data.train": f"s3://alice:{word}@bucket/x"}) for word in ("old-one", "new-one")]
    changed = changed_settings(*runs)
    other = changed_settings(runs[0], replace(runs[1], seed=5))
    return f"told as {changed}" if changed or list(other) != ["seed"] else None


ATTACKS = {
    "secrets": [
        ("a password in the address of data", "it is in config.yaml, metrics or a manifest", login_in_a_data_address),
        ("a password in an address that cannot be opened", "it is printed", login_in_an_error),
        ("a password or a signature in another setting", "it is written down", login_in_other_settings),
        ("tokens in the environment", "they are in logs, checkpoints or bundles", secrets_of_the_environment),
        ("secrets in files of a run that is bundled", "they are sent away", secrets_in_a_bundle),
        ("a renewed password", "old and new are told as a change of settings", changed_login),
    ]
}
