"""Whole token files have hashes, runs compare them block by block, and no changed block goes unnoticed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from tests.data.token_files import documents, megatron, raw
from tests.train.test_trainer import tiny

import moefold
from moefold.cli.main import main
from moefold.comm.launchers import is_first_of_host
from moefold.config.data import DataConfig, VerificationConfig
from moefold.data import block_hashes
from moefold.data.block_hashes import BLOCK_BYTES, BlockHasher, FilePart, block_digest, hashes_path, read_hashes
from moefold.data.samples import Samples
from moefold.data.token_files import open_token_file
from moefold.data.token_writers import ArrayWriter, MegatronWriter
from moefold.data.verification import DAMAGE, RECORD, Verifier
from moefold.errors import ConfigError, DamagedDataError, DataError

VOCAB = 256
# A little more than two blocks of uint16.
TOKENS = 2 * BLOCK_BYTES // 2 + 1000


def reference_digests(path: Path) -> list[str]:
    import hashlib

    data = path.read_bytes()
    pieces = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    return [hashlib.blake2b(piece, digest_size=16).hexdigest() for piece in pieces]


def edit(path: Path, at: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)


def pair(prefix: Path, tokens: int = TOKENS, hashed: bool = True) -> str:
    rng = np.random.default_rng(1)
    with MegatronWriter(str(prefix), "uint16", overwrite=True) as writer:
        writer.add_many(rng.integers(1, VOCAB, tokens, np.uint16), [tokens // 2, tokens - tokens // 2])
    if not hashed:
        Path(hashes_path(str(prefix))).unlink()
    return str(prefix)


# ---- what writers leave ----


def test_every_file_of_a_writer_has_its_hashes(tmp_path: Path) -> None:
    docs = documents(30)
    megatron(tmp_path / "a", docs, masks=[np.ones(len(each), bool) for each in docs])
    raw(tmp_path / "b", docs)
    pair(tmp_path / "c")
    for name, endings in {"a": (".bin", ".idx", ".loss_mask.bin"), "b": (".npy",), "c": (".bin", ".idx")}.items():
        found = read_hashes(str(tmp_path / name))
        assert found is not None and set(found) == set(endings)
        for ending, hashes in found.items():
            path = tmp_path / f"{name}{ending}"
            assert list(hashes.blocks) == reference_digests(path) and hashes.bytes == path.stat().st_size
    assert len(read_hashes(str(tmp_path / "c"))[".bin"].blocks) == 3  # type: ignore[index]


@pytest.mark.parametrize("writer", [MegatronWriter, ArrayWriter])
def test_a_writer_that_goes_on_hashes_the_same(tmp_path: Path, writer: type[MegatronWriter]) -> None:
    tokens = np.arange(TOKENS) % VOCAB
    with pytest.raises(KeyboardInterrupt), writer(str(tmp_path / "x"), "uint16", resume_key="k") as first:
        first.add(tokens[: TOKENS // 2 + 7])
        first.mark(1)
        first.add(tokens[:100])
        raise KeyboardInterrupt
    with writer(str(tmp_path / "x"), "uint16", resume_key="k") as second:
        second.add(tokens[TOKENS // 2 + 7 :])
    found = read_hashes(str(tmp_path / "x"))
    assert found is not None
    for ending, hashes in found.items():
        assert list(hashes.blocks) == reference_digests(tmp_path / f"x{ending}")


def test_pieces_of_any_size_hash_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hashes, "BLOCK_BYTES", 16)
    data = os.urandom(100)
    for step in (1, 3, 16, 17, 100):
        hasher = BlockHasher()
        for at in range(0, 100, step):
            hasher.update(data[at : at + step])
        assert hasher.hashes().blocks == tuple(block_digest([data[at : at + 16]]) for at in range(0, 100, 16))


def test_a_block_says_which_tokens_it_holds() -> None:
    part = FilePart(".npy", "x.npy", 128 + 2 * TOKENS, 128, 2)
    assert part.describe(0).startswith("block 1 of 3 (bytes 0 to 4,194,303, tokens 0 to 2,097,087)")
    assert list(part.blocks_of(2_097_087, 1)) == [0] and list(part.blocks_of(2_097_087, 2)) == [0, 1]
    assert f"tokens {TOKENS - 1 - 1000 - 64 + 1:,} to {TOKENS - 1:,}" in part.describe(2)


BAD_HASHES = {
    "no JSON": "{",
    "a list": "[]",
    "other algorithm": '{"algorithm": "md5", "block_bytes": 4194304, "files": {}}',
    "other block": '{"algorithm": "blake2b-128", "block_bytes": 5, "files": {}}',
    "no files": '{"algorithm": "blake2b-128", "block_bytes": 4194304}',
    "no blocks": '{"algorithm": "blake2b-128", "block_bytes": 4194304, "files": {".bin": {"bytes": 3}}}',
    "too few": '{"algorithm": "blake2b-128", "block_bytes": 4194304, "files": {".bin": {"bytes": 3, "blocks": []}}}',
    "no hex": '{"algorithm": "blake2b-128", "block_bytes": 4194304, "files": {".bin": {"bytes": 3, "blocks": ["z"]}}}',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", BAD_HASHES)
def test_hashes_that_are_none_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.hashes.json").write_text(BAD_HASHES[name])
    with pytest.raises(DataError, match=r"x\.hashes\.json"):
        read_hashes(str(tmp_path / "x.bin"))


# ---- beside a run ----


def opened(path: str, directory: Path, seq_len: int = 1024, **fields: object) -> Verifier:
    config = VerificationConfig(**{"mb_per_s": 1e6, **fields})  # type: ignore[arg-type]
    samples = Samples(DataConfig(seq_len=seq_len, train=path, verification=config), VOCAB, 1)
    directory.mkdir(exist_ok=True)
    verifier = Verifier({"train": samples}, directory, config)
    verifier.compare_with_record()
    return verifier


def run_through(verifier: Verifier) -> None:
    verifier.start(0, 4)
    deadline = time.monotonic() + 60
    while verifier.verified < verifier.total and time.monotonic() < deadline and not verifier.damage:
        time.sleep(0.005)
    verifier.finish(4)


@pytest.mark.parametrize("block", range(3))
def test_damage_is_found_with_its_place(tmp_path: Path, block: int) -> None:
    path = pair(tmp_path / "x")
    edit(tmp_path / "x.bin", block * BLOCK_BYTES + 501, b"\x07")
    with pytest.raises(DamagedDataError, match=rf"x\.bin: block {block + 1} of 3 \(bytes .* tokens .*hash differs"):
        run_through(opened(path, tmp_path / "run"))


def test_what_is_used_first_is_checked_first(tmp_path: Path) -> None:
    """At a rate that would need minutes for the file, the blocks of the first samples are compared all the same."""
    path = pair(tmp_path / "x")
    verifier = opened(path, tmp_path / "run", seq_len=1 << 18, mb_per_s=1e6)
    order = []
    verifier._used, verifier._until = 0, 2
    for each, block, sample in verifier._order():
        order.append((each.part.ending, block, sample))
        each.check(block)
    of_sample = [(".bin", block) for i in range(2) for block in verifier.parts[1].part.blocks_of(*_window(verifier, i))]
    wanted = list(dict.fromkeys(of_sample))
    assert order[0] == (".idx", 0, None) and [each[:2] for each in order[1 : 1 + len(wanted)]] == wanted
    assert sorted(each[1] for each in order[1:]) == [0, 1, 2]


def _window(verifier: Verifier, sample: int) -> tuple[int, int]:
    _, start, length = verifier._splits["train"].location(sample)
    return start, length


def test_what_was_used_and_not_checked_is_checked_by_the_next_start(tmp_path: Path) -> None:
    path = pair(tmp_path / "x")
    first = opened(path, tmp_path / "run", mb_per_s=0.5)
    first.start(0, 4)
    first.advance(400)
    first.finish(400, wait=False)
    kept = json.loads((tmp_path / "run" / RECORD).read_text())
    assert kept["unchecked_from"] < 400 and kept["verified_bytes"] < kept["of_bytes"]
    second = opened(path, tmp_path / "run")
    second.start(400, 4)
    second.finish(400)
    assert json.loads((tmp_path / "run" / RECORD).read_text())["unchecked_from"] == 400


def test_the_rate_is_kept(tmp_path: Path) -> None:
    verifier = opened(pair(tmp_path / "x"), tmp_path / "run", mb_per_s=10.0)
    verifier.start(0, 4)
    began = time.monotonic()
    while verifier.verified < verifier.total and time.monotonic() - began < 30:
        time.sleep(0.005)
    assert time.monotonic() - began > 0.7 * verifier.total / 10e6
    verifier.finish(0)


@pytest.mark.parametrize("hashed", [True, False], ids=["own files", "files of another program"])
def test_a_resume_names_the_first_changed_block(tmp_path: Path, hashed: bool) -> None:
    path = pair(tmp_path / "x", hashed=hashed)
    run_through(opened(path, tmp_path / "run"))
    opened(path, tmp_path / "run")
    for at in (2 * BLOCK_BYTES, BLOCK_BYTES):
        edit(tmp_path / "x.bin", at + 9, b"\x01\x02\x03")
    with pytest.raises(DamagedDataError, match=r"x\.bin: block 2 of 3 .* is not what this run was trained on"):
        opened(path, tmp_path / "run")
    # Tokenized anew, with its own hashes: refused by these alone.
    with MegatronWriter(path, "uint16", overwrite=True) as writer:
        writer.add_many(np.ones(TOKENS, np.uint16), [TOKENS // 2, TOKENS - TOKENS // 2])
    with pytest.raises(DamagedDataError, match=r"x\.bin: block 1 of 3"):
        opened(path, tmp_path / "run", start_seconds=0.0)


def test_a_changed_file_that_is_too_large_to_compare_at_the_start_is_found_while_training(tmp_path: Path) -> None:
    path = pair(tmp_path / "x", hashed=False)
    run_through(opened(path, tmp_path / "run"))
    edit(tmp_path / "x.bin", 2 * BLOCK_BYTES + 9, b"\x01\x02\x03")
    with pytest.raises(DamagedDataError, match=r"x\.bin: block 3 of 3"):
        run_through(opened(path, tmp_path / "run", start_seconds=0.0))


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    path = pair(tmp_path / "x", 5000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).write_text("{}")
    with pytest.raises(DataError, match=RECORD):
        opened(path, tmp_path / "run")


def test_one_rank_of_each_host() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert not is_first_of_host(torchrun, 5, 8) and is_first_of_host(torchrun | {"LOCAL_RANK": "0"}, 5, 8)
    # Four ranks that one process of a job has forked.
    forked = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    assert [is_first_of_host(forked, rank, 4) for rank in range(4)] == [True, False, False, False]


# ---- whole runs ----


def fit(directory: Path, path: str, steps: int = 4, **changes: object) -> str:
    run = tiny(directory, steps, **{"data.train": path, "data.validation": None, **changes})
    return moefold.Trainer(run, reporters=[]).fit()


@pytest.mark.parametrize("hashed", [True, False], ids=["own files", "files of another program"])
def test_a_run_on_a_file_with_the_same_fingerprint_is_not_resumed(tmp_path: Path, hashed: bool) -> None:
    """391,808 of 400,000 tokens changed, none of them in the sampled pieces of the fingerprint."""
    path = pair(tmp_path / "x", 400_000, hashed)
    data = DataConfig(seq_len=16, train=path)
    before = Samples(data, VOCAB, 1).fingerprint
    assert fit(tmp_path, path) == "finished"
    assert fit(tmp_path, path, 5) == "finished"
    tokens = np.fromfile(tmp_path / "x.bin", np.uint16)
    changed, size = tokens.copy(), len(tokens) * 2
    kept = np.zeros(len(tokens), bool)
    for number in range(4):
        at = (size - 4096) * number // 3 // 2
        kept[at : at + 2049] = True
    changed[~kept] = tokens[~kept] % 255 + 1
    changed.tofile(tmp_path / "x.bin")
    assert (changed != tokens).sum() > 391_000 and Samples(data, VOCAB, 1).fingerprint == before
    with pytest.raises(DamagedDataError, match=r"x\.bin: block 1 of 1 \(bytes 0 to 799,999, tokens 0 to 399,999\)"):
        fit(tmp_path, path, 6)


def test_damage_ends_a_run(tmp_path: Path) -> None:
    path = pair(tmp_path / "x", 5000)
    edit(tmp_path / "x.bin", 5002, b"\x09")
    with pytest.raises(DamagedDataError, match=r"x\.bin: block 1 of 1"):
        fit(tmp_path, path)
    assert "x.bin: block 1" in (tmp_path / "debug_tiny" / DAMAGE).read_text()
    assert not list((tmp_path / "debug_tiny").glob("checkpoints/step_*"))


def test_damage_is_told_and_trained_on_if_the_run_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = pair(tmp_path / "x", 5000)
    edit(tmp_path / "x.bin", 5002, b"\x09")
    assert fit(tmp_path, path, **{"data.verification.on_damage": "warn"}) == "finished"
    assert "x.bin: block 1 of 1" in capfd.readouterr().err
    assert json.loads((tmp_path / "debug_tiny" / DAMAGE).read_text())["damage"].startswith(str(tmp_path / "x.bin"))


SKIP = {"data.verification.on_damage": "skip"}
# A sample that counts in no loss is still routed.
NO_BALANCE = {"model.moe.balance.microbatch": 0.0}


class Losses(moefold.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, record: moefold.StepRecord, control: moefold.Control) -> None:
        self.losses.append(record.loss)


def test_damaged_samples_count_in_no_loss(tmp_path: Path) -> None:
    """As if a loss mask left exactly the labels of these samples out; each is on record."""
    tokens = np.random.default_rng(1).integers(1, VOCAB, 16 * 40 + 1)
    bad, mask = tokens.copy(), np.ones(len(tokens), bool)
    bad[100] = VOCAB + 3
    mask[97:113] = False
    paths = {"damaged": megatron(tmp_path / "d", [bad]), "masked": megatron(tmp_path / "m", [tokens], masks=[mask])}
    losses = {}
    for name, path in paths.items():
        run = tiny(tmp_path / name, 10, **{"data.train": path, "data.validation": None}, **NO_BALANCE, **SKIP)
        said = Losses()
        assert moefold.Trainer(run, callbacks=[said], reporters=[]).fit() == "finished"
        losses[name] = said.losses
    np.testing.assert_allclose(losses["damaged"], losses["masked"], rtol=1e-5)
    (line,) = map(json.loads, (tmp_path / "damaged" / "debug_tiny" / DAMAGE).read_text().splitlines())
    assert line["sample"] == "0:0:6" and "document 0, offset 100" in line["damage"] and "token 259" in line["damage"]
    assert not (tmp_path / "masked" / "debug_tiny" / DAMAGE).exists()


def test_a_damaged_block_is_left_out_before_it_is_read(tmp_path: Path) -> None:
    """All samples lie in the one block: each is on record, and nothing is learned from any of them."""
    path = pair(tmp_path / "x", 5000)
    edit(tmp_path / "x.bin", 5002, b"\x09")
    said = Losses()
    run = tiny(tmp_path, 4, **{"data.train": path, "data.validation": None}, **NO_BALANCE, **SKIP)
    assert moefold.Trainer(run, callbacks=[said], reporters=[]).fit() == "finished"
    lines = [json.loads(line) for line in (tmp_path / "debug_tiny" / DAMAGE).read_text().splitlines()]
    assert len({line["sample"] for line in lines if line["sample"]}) == 16 and said.losses == [0.0] * 4


def test_policies_are_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on_damage"):
        tiny(tmp_path, **{"data.verification.on_damage": "ignore"})


# ---- by hand ----


def test_the_command_compares_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pair(tmp_path / "x", hashed=False)

    def verify(*words: str) -> tuple[int, dict[str, list[dict[str, object]]]]:
        code = main(["data", "verify", path, "--json", *words])
        return code, json.loads(capsys.readouterr().out)

    assert [each["state"] for each in verify()[1]["files"]] == ["no hashes"] * 2
    assert [each["state"] for each in verify("--write")[1]["files"]] == ["hashes written"] * 2
    code, said = verify()
    assert code == 0 and [each["state"] for each in said["files"]] == ["same"] * 2
    assert [part.name for part in open_token_file(path, VOCAB).parts] == [each["file"] for each in said["files"]]
    edit(tmp_path / "x.bin", BLOCK_BYTES, b"\x00\x01\x02\x03")
    code, said = verify()
    assert code == 1 and said["files"][1]["damaged"][0].startswith("block 2 of 3")  # type: ignore[index]
    assert main(["data", "verify", path]) == 1 and "block 2 of 3" in capsys.readouterr().out
