"""Samples by number (F15): every window once per epoch, the same after any interruption, for any world size."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from tests.data.token_files import documents, megatron, raw

from moefold.config.data import DataConfig, SourceConfig
from moefold.data.megatron_index import HEADER, MAGIC
from moefold.data.samples import Samples
from moefold.errors import ConfigError

S = 16


def mixture(tmp_path: Path, seed: int = 1, **fields: object) -> Samples:
    sources = (
        SourceConfig(path=megatron(tmp_path / "a", documents(30, 1)), weight=0.5),
        SourceConfig(path=megatron(tmp_path / "b", documents(11, 2), "uint8"), weight=0.3),
        SourceConfig(path=raw(tmp_path / "c", documents(15, 3)), weight=0.2),
    )
    given: dict[str, object] = {"seq_len": S, "mixture": sources, **fields}
    return Samples(DataConfig(**given), 256, seed)  # type: ignore[arg-type]


def single(tmp_path: Path, count: int = 30) -> Samples:
    return Samples(DataConfig(seq_len=S, train=megatron(tmp_path / "one", documents(count))), 256, 1)


def test_a_sample_is_a_window_of_the_stream(tmp_path: Path) -> None:
    docs = documents(30)
    samples = single(tmp_path)
    stream, starts = np.concatenate(docs), np.cumsum([0, *map(len, docs)])[:-1]
    for index in range(200):
        sample = samples.sample(index)
        first = int(sample.id.split(":")[2]) * S
        assert sample.tokens.dtype == np.int64 and np.array_equal(sample.tokens, stream[first : first + S + 1])
        inside = {int(start) - first for start in starts if first <= start <= first + S}
        assert sample.document_starts == tuple(sorted({0} | inside))


def test_every_window_once_per_epoch_and_each_epoch_anew(tmp_path: Path) -> None:
    samples = single(tmp_path)
    (n,) = samples.windows
    assert n == (samples.num_tokens - 1) // S
    epochs = [[samples.sample(e * n + i).id.split(":") for i in range(n)] for e in range(3)]
    for number, ids in enumerate(epochs):
        assert {e for _, e, _ in ids} == {str(number)}
        assert sorted(int(w) for *_, w in ids) == list(range(n))
    orders = [[w for *_, w in ids] for ids in epochs]
    assert orders[0] != orders[1] != orders[2]


def test_a_mixture_keeps_shares_and_leaves_nothing_out(tmp_path: Path) -> None:
    samples = mixture(tmp_path)
    block = samples.mixture.block
    ids = [samples.sample(i).id for i in range(block)]
    assert len(set(ids)) == block
    assert (
        [sum(i.startswith(f"{s}:") for i in ids) for s in range(3)]
        == list(samples.mixture.block_counts)
        == [512, 307, 205]
    )
    for source, windows in enumerate(samples.windows):
        seen = [tuple(map(int, i.split(":"))) for i in ids if i.startswith(f"{source}:")]
        # In order of epochs, each complete before the next begins.
        assert [e for _, e, _ in seen] == [k // windows for k in range(len(seen))]
        for epoch in range(len(seen) // windows):
            assert sorted(w for _, e, w in seen if e == epoch) == list(range(windows))


@pytest.mark.parametrize("case", range(20))
def test_interrupted_runs_see_what_an_uninterrupted_one_sees(tmp_path: Path, case: int) -> None:
    """Killed two to five times, each time resumed by another world from the saved cursor, over an epoch's border."""
    rng, batch = random.Random(case), 8
    build = mixture if case % 2 else single
    steps = 3 * sum(build(tmp_path).windows) // batch + 2
    samples = build(tmp_path)
    expected = [samples.sample(i).id for i in range(steps * batch)]
    logged: dict[int, list[str]] = {}
    cursor = 0
    stops = sorted(rng.sample(range(1, steps), rng.randrange(2, 6))) + [steps]
    for stop in stops:
        # A new process knows nothing but the cursor; a new world cuts the batch differently.
        samples, world = build(tmp_path), rng.choice((1, 2, 4))
        for step in range(cursor // batch, stop):
            shares = [[samples.sample(step * batch + i).id for i in range(r, batch, world)] for r in range(world)]
            logged[step] = [shares[i % world][i // world] for i in range(batch)]
        # The last steps were not saved and are done again.
        cursor = max(0, stop - rng.randrange(3)) * batch if stop != steps else steps * batch
    got = [name for step in range(steps) for name in logged[step]]
    assert got == expected and len(set(got)) == len(got)


def test_the_fingerprint_is_what_the_order_depends_on(tmp_path: Path) -> None:
    same = mixture(tmp_path).fingerprint
    assert mixture(tmp_path).fingerprint == same
    assert mixture(tmp_path, seed=2).fingerprint != same
    assert mixture(tmp_path, seq_len=S + 1).fingerprint != same
    assert mixture(tmp_path, global_batch=64, micro_batch=2).fingerprint == same
    (tmp_path / "moved").mkdir()
    assert mixture(tmp_path / "moved").fingerprint == same


def test_seeds_and_splits_have_orders_of_their_own(tmp_path: Path) -> None:
    data = DataConfig(seq_len=S, train=(path := megatron(tmp_path / "x", documents(100))), validation=path)
    orders = {
        tuple(samples.sample(i).id for i in range(20))
        for samples in (Samples(data, 256, 1), Samples(data, 256, 2), Samples(data, 256, 1, "validation"))
    }
    assert len(orders) == 3


def test_builtin_splits_do_not_overlap() -> None:
    data = DataConfig(seq_len=64, train="builtin", validation="builtin")
    train, validation = Samples(data, 256, 1), Samples(data, 256, 1, "validation")
    assert train.sample(0).tokens.max() < 256
    assert train.sources[0].files[0].digest != validation.sources[0].files[0].digest
    with pytest.raises(ConfigError, match=r"data\.validation"):
        Samples(DataConfig(train="builtin"), 256, 1, "validation")
    with pytest.raises(ConfigError, match=r"data\.train: names no tokens to train on"):
        Samples(DataConfig(), 256, 1)


@pytest.mark.timing
def test_a_sample_takes_well_under_a_millisecond(tmp_path: Path) -> None:
    samples = mixture(tmp_path, seq_len=S)
    samples.sample(0)
    seconds = []
    for index in range(1000):
        began = time.perf_counter()
        samples.sample(index)
        seconds.append(time.perf_counter() - began)
    assert sorted(seconds)[500] < 1e-3


def huge(prefix: Path, num_documents: int, tokens: int) -> str:
    """A pair that is large in name only: the tokens are a hole in the file system."""
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, num_documents, num_documents + 1))
        np.full(num_documents, tokens, "<i4").tofile(file)
        np.arange(0, 2 * tokens * num_documents, 2 * tokens, dtype="<i8").tofile(file)
        np.arange(num_documents + 1, dtype="<i8").tofile(file)
    with open(f"{prefix}.bin", "wb") as file:
        os.truncate(file.fileno(), 2 * tokens * num_documents)
        # Something to find at both ends.
        os.pwrite(file.fileno(), struct.pack("<H", 7), 0)
        os.pwrite(file.fileno(), struct.pack("<H", 9), 2 * tokens * num_documents - 2)
    return str(prefix)


@pytest.mark.timing
def test_step_one_million_of_a_trillion_tokens_starts_at_once(tmp_path: Path) -> None:
    try:
        sources = tuple(
            SourceConfig(path=huge(tmp_path / name, num_documents, tokens), weight=weight)
            for name, num_documents, tokens, weight in (
                ("web", 1_000_000, 800_000, 0.7),
                ("code", 100, 1_500_000_000, 0.2),
                ("books", 50_000, 1_200_000, 0.1),
            )
        )
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    global_batch = 1024
    data = DataConfig(seq_len=4096, global_batch=global_batch, mixture=sources)
    began = time.perf_counter()
    samples = Samples(data, 50_000, 1)
    first = [samples.sample(1_000_000 * global_batch + i) for i in range(global_batch)]
    seconds = time.perf_counter() - began
    print(f"{samples.num_tokens:,} tokens, sample 1,024,000,000: {seconds:.2f} s for a whole batch")
    assert samples.num_tokens > 10**12 and seconds < 5
    assert len({sample.id for sample in first}) == global_batch
    # This far in, small sources are in later epochs.
    assert {int(sample.id.split(":")[1]) for sample in first} != {0}
