"""Loss masks: which labels count, in every packing, and on every layout the same step as one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.token_files import megatron
from tests.marks import slow_except
from tests.train.test_packed import BATCH, VOCAB, S, alone, opened, run_of, step_of
from tests.train.test_packed_ranks import steps_of

from moefold.config.data import SourceConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.errors import DataError
from moefold.nn.batch import IGNORED
from moefold.parallel.parallelize import build_local_model
from moefold.pipeline.runtime import run_schedule
from moefold.prove.proof_inputs import proof_init
from moefold.train.batches import read_step

PACKINGS = ("concat", "concat_masked", "padded", "bin_packed")


def chat(path: Path, seed: int = 5, counting: float = 0.4) -> str:
    """Documents of alternating spans of which some count; of many documents no token does."""
    rng, docs, masks = np.random.default_rng(seed), [], []
    for length in np.clip(rng.lognormal(2.2, 1.0, 400), 1, 90).astype(int):
        docs.append(rng.integers(1, VOCAB, length))
        turns = np.repeat(rng.random(1 + length // 4) < 0.5, 4)[:length] if length >= 4 else np.zeros(length, bool)
        masks.append(turns & (rng.random() < counting))
    return megatron(path / f"chat{seed}", docs, masks=masks)


def masked_run(path: Path, packing: str, parallel: ParallelConfig | None = None, counting: float = 0.4) -> RunConfig:
    run = run_of(path, packing, parallel)
    return replace(run, data=replace(run.data, train=chat(path, counting=counting)))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_label_counts_if_its_token_does(tmp_path: Path, packing: str) -> None:
    masked = masked_run(tmp_path, packing)
    prefix = str(masked.data.train)
    plain = replace(masked, data=replace(masked.data, train=without_mask(prefix)))
    samples, counted = opened(masked), 0
    assert samples.has_loss_mask and not opened(plain).has_loss_mask
    ours, theirs = step_of(masked), step_of(plain)
    for found, unmasked in zip(ours.batches, theirs.batches, strict=True):
        assert torch.equal(found.tokens_S, unmasked.tokens_S)
        kept = found.labels_S != IGNORED
        assert torch.equal(found.labels_S[kept], unmasked.labels_S[kept])
        counted += int(kept.sum())
    # Written out from the file: the label of token i is token i + 1, and its byte of the mask decides.
    mask = np.fromfile(f"{prefix}.loss_mask.bin", np.uint8)
    tokens = np.fromfile(f"{prefix}.bin", np.uint16)
    expected = 0
    for number in range(BATCH):
        sample = samples.sample(number)
        at = place_of(tokens, sample.tokens)
        for i in range(1, len(sample.tokens)):
            crosses = packing == "concat_masked" and i in sample.document_starts
            expected += int(mask[at + i]) and not crosses
    assert 0 < expected == counted == ours.batches[0].step_labels < theirs.batches[0].step_labels
    ahead = sum(int((batch.ahead[0].labels_S != IGNORED).sum()) for batch in ours.batches)
    assert {batch.step_labels_ahead for batch in ours.batches} == {(ahead,)}
    assert {batch.step_tokens for batch in ours.batches} == {batch.step_tokens for batch in theirs.batches}
    assert {batch.step_sequences for batch in ours.batches} == {batch.step_sequences for batch in theirs.batches}


def without_mask(prefix: str) -> str:
    for ending in (".bin", ".idx"):
        Path(f"{prefix}_plain{ending}").write_bytes(Path(prefix + ending).read_bytes())
    return f"{prefix}_plain"


def place_of(stream: np.ndarray, tokens: np.ndarray) -> int:
    """Where a sample lies in the stream; it occurs once."""
    starts = np.flatnonzero(stream[: len(stream) - len(tokens) + 1] == tokens[0])
    (found,) = [start for start in starts if np.array_equal(stream[start : start + len(tokens)], tokens)][:1]
    return int(found)


def test_sources_without_a_mask_count_wholly(tmp_path: Path) -> None:
    run = masked_run(tmp_path, "padded")
    plain = str(run_of(tmp_path, "padded").data.train)
    data = replace(run.data, train=None, mixture=(SourceConfig(str(run.data.train)), SourceConfig(plain)))
    samples = opened(replace(run, data=data))
    read = [samples.sample(number) for number in range(64)]
    for sample in read:
        assert (sample.loss_mask is None) == sample.id.startswith("1:")
    assert samples.has_loss_mask and 0 < sum(sample.loss_mask is None for sample in read) < 64


LAYOUTS = {
    "dp4 ep2": ParallelConfig(ep=2),
    "dp2 tp2 ep2": ParallelConfig(tp=2, ep=2),
    "cp2 dp2 ep4": ParallelConfig(cp=2, ep=4),
    "pp2 dp2 ep2": ParallelConfig(pp=2, ep=2),
    "dynamic": ParallelConfig(cp=2, ep=2, dynamic_cp=True),
}
CASES = [(packing, layout) for packing in PACKINGS for layout in LAYOUTS if layout != "dynamic"]
CASES += [("bin_packed", "dynamic")]
FAST = [("padded", "pp2 dp2 ep2"), ("bin_packed", "dynamic")]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[float]]]:
    @cache
    def of(packing: str) -> list[list[float]]:
        (steps,) = steps_of(masked_run(tmp_path_factory.mktemp(packing), packing), 1)
        return steps

    return of


@pytest.mark.parametrize("packing,layout", slow_except(CASES, *FAST))
def test_four_ranks_train_on_masked_data_as_one_process(
    tmp_path: Path, packing: str, layout: str, one_process: Callable[[str], list[list[float]]]
) -> None:
    for found in steps_of(masked_run(tmp_path, packing, LAYOUTS[layout]), 4):
        for step, expected in zip(found, one_process(packing), strict=True):
            assert step == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_ranks_and_microbatches_may_have_no_label(tmp_path: Path) -> None:
    """The corpus of the tests above holds such microbatches; a step without any label has no loss, and no NaN."""
    batches = step_of(masked_run(tmp_path, "padded")).batches
    assert any(not (batch.labels_S != IGNORED).any() for batch in batches)
    run = masked_run(tmp_path, "padded", counting=0.0)
    data = step_of(run)
    assert {batch.step_labels for batch in data.batches} == {0}
    local_model = build_local_model(run, alone(run), torch.device("cpu"), proof_init)
    sums = run_schedule(local_model, data.batches)
    assert float(sums.loss) == float(sums.mtp_loss) == 0
    gradients = [p.grad for p in local_model.model.parameters() if p.grad is not None]
    assert gradients and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def test_a_thread_that_reads_ahead_needs_no_collective_for_masks(tmp_path: Path) -> None:
    run = masked_run(tmp_path, "bin_packed")
    read = read_step(opened(run), 0, run, alone(run))
    assert read.counts is not None and read.counts[0] == step_of(run).batches[0].step_labels


def test_a_mask_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    run = masked_run(tmp_path, "concat")
    mask = Path(f"{run.data.train}.loss_mask.bin")
    prints = [opened(run).fingerprint]
    mask.write_bytes(bytes([1 - mask.read_bytes()[0]]) + mask.read_bytes()[1:])
    prints.append(opened(run).fingerprint)
    mask.unlink()
    prints.append(opened(run).fingerprint)
    assert len(set(prints)) == 3


def test_a_mask_of_another_length_is_refused(tmp_path: Path) -> None:
    run = masked_run(tmp_path, "concat")
    mask = Path(f"{run.data.train}.loss_mask.bin")
    mask.write_bytes(mask.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"loss_mask\.bin: a loss mask of [\d,]+ bytes, but .*\.bin has [\d,]+ tokens"):
        opened(run)


def test_a_mask_holds_zeros_and_ones(tmp_path: Path) -> None:
    run = masked_run(tmp_path, "concat")
    mask = Path(f"{run.data.train}.loss_mask.bin")
    mask.write_bytes(mask.read_bytes()[:-S] + bytes([7]) * S)
    with pytest.raises(DataError, match="has 7; a loss mask holds 0 or 1"):
        samples = opened(run)
        for number in range(samples.num_tokens // S):
            samples.sample(number)


def test_a_folder_of_masked_pairs_is_one_stream(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    chat(folder, 1)
    megatron(folder / "plain", [np.arange(1, 50)])
    run = run_of(tmp_path, "concat")
    run = replace(run, data=replace(run.data, train=str(folder)))
    (source,) = opened(run).sources
    mask = np.fromfile(folder / "chat1.loss_mask.bin", np.uint8).astype(bool)
    assert source.has_loss_mask and source.num_tokens == len(mask) + 49
    assert np.array_equal(source.loss_mask(0, source.num_tokens), np.append(mask, np.ones(49, bool)))


def test_an_overwritten_pair_loses_its_old_mask(tmp_path: Path) -> None:
    prefix = chat(tmp_path, 1)
    megatron(tmp_path / "chat1", [np.arange(1, 9)])
    assert not Path(f"{prefix}.loss_mask.bin").exists() and not list(tmp_path.glob("*.tmp"))
