"""How much a host does to resume a run of 1,024 simulated ranks: counted, so that a loop over all ranks is noticed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.checkpoint_scale import RANKS_PER_HOST, Simulation, measure
from moefold.checkpoint.files import FileRecord
from moefold.checkpoint.manifest import FORMAT, IndexFiles, Manifest, RankFiles, TensorEntry, packed, unpacked
from moefold.checkpoint.tensor_spec import cover_fault, whole
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.recipes.catalog import RECIPES


def small_run() -> RunConfig:
    """Four layers of DeepSeek-V3's shapes in four stages."""
    run = RECIPES["deepseek_v3"]()
    return replace(run, model=replace(run.model, num_layers=4), parallel=ParallelConfig(pp=4, ep=64))


def test_the_simulated_ranks_write_every_element_once() -> None:
    simulation = Simulation(small_run(), 256)
    written: dict[str, list[tuple[slice, ...]]] = {}
    for rank in range(256):
        for chunk in simulation.written(rank):
            written.setdefault(chunk.name, []).append(chunk.box)
    for name, entry in simulation.tensors().items():
        assert cover_fault(whole(entry.shape), written[name]) is None, name


def test_calls_of_a_host_do_not_grow_with_the_ranks(tmp_path: Path) -> None:
    small, large = (measure(tmp_path / "checkpoints", small_run(), world, tries=1) for world in (256, 1024))
    for host in ("other host", "resharded"):
        for found in (small, large):
            # Of its share of sizes, its tables, its own files and those of the first ranks of its groups.
            assert found[host]["listings"] == 0
            assert found[host]["stats"] <= 4 * RANKS_PER_HOST
            assert found[host]["opens"] <= 8 * RANKS_PER_HOST
        assert large[host]["opens"] <= small[host]["opens"] + RANKS_PER_HOST
    # One listing per 512 ranks and one of the checkpoint; the eight ranks' own calls beside it.
    assert large["first host"]["listings"] == 3
    assert large["first host"]["stats"] <= 6 * RANKS_PER_HOST
    # What all ranks get is 80 bytes per rank, and what does not depend on their number.
    assert large["first host"]["broadcast_bytes"] - small["first host"]["broadcast_bytes"] <= 100 * (1024 - 256)


@pytest.mark.parametrize("world", [1, 50])
def test_a_manifest_arrives_as_it_was_read(world: int) -> None:
    files = [RankFiles(FileRecord(rank, f"{rank:064x}"), FileRecord(1 << 61, "f" * 64)) for rank in range(world)]
    index = IndexFiles(FileRecord(1, "0" * 64), FileRecord(2, "1" * 64))
    tensors = {"parameter/x": TensorEntry("F32", (2, 3)), "step/x": TensorEntry("F32", ())}
    sent = Manifest(FORMAT, 2, "r", 1, 2, world, {"tp": 1}, "c", "d", tensors, files, {"s": [1.5]}, "e", index)
    received = unpacked(Path("here"), packed(sent))
    assert list(received.files) == files and list(received.files[:1]) == files[:1]
    assert replace(received, files=files) == sent
    assert [RankFiles.from_numbers(each.as_numbers()) for each in files] == files
