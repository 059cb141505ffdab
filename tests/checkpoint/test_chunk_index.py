"""The index of chunks, and the sorted cover check, beside what is obvious: every pair compared, every table opened."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.checkpoint.damages import sign_pages, version_1
from tests.checkpoint.saved_runs import everything, same, save_step, trained_alone

from moefold.checkpoint import chunk_index
from moefold.checkpoint.chunk_index import ChunkIndex, Located, received_rows, rows_of, sent_rows
from moefold.checkpoint.load import Checkpoint, load_into
from moefold.checkpoint.manifest import Manifest, TensorEntry, data_name
from moefold.checkpoint.shard_file import shard_offsets, shard_order
from moefold.checkpoint.step_dirs import check_cover, committed_steps, verify
from moefold.checkpoint.tensor_spec import Box, ChunkSpec, cover_fault, intersection, volume, whole
from moefold.errors import CheckpointError

# ---- the cover check ----


def cover_fault_reference(outer: Box, boxes: Sequence[Box]) -> bool:
    """Quadratic: some pair overlaps, or the volumes do not add up, or a box is outside."""
    pairs = ((a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    inside = all(not volume(box) or intersection(box, outer) == box for box in boxes)
    overlap = any(intersection(a, b) is not None for a, b in pairs)
    return overlap or not inside or sum(map(volume, boxes)) != volume(outer)


def count_reference(outer: Box, boxes: Sequence[Box]) -> np.ndarray:
    """In how many boxes each element is, minus one; one by one."""
    counts = np.full([part.stop for part in outer], 0)
    counts[outer] -= 1
    for box in boxes:
        counts[box] += 1
    return counts


def partition(dice: random.Random, outer: Box, parts: int) -> list[Box]:
    """Cut at random places along random dims; empty boxes among them."""
    boxes = [outer]
    for _ in range(parts):
        box = boxes.pop(dice.randrange(len(boxes)))
        dim = dice.randrange(len(box)) if box else 0
        if not box or not volume(box):
            boxes.append(box)
            continue
        at = dice.randint(box[dim].start, box[dim].stop)
        for part in (slice(box[dim].start, at), slice(at, box[dim].stop)):
            boxes.append((*box[:dim], part, *box[dim + 1 :]))
    dice.shuffle(boxes)
    return boxes


def defects(dice: random.Random, outer: Box, boxes: list[Box]) -> Iterator[list[Box]]:
    """One box lost, twice, moved, grown, shrunk, or exchanged for another of its size elsewhere."""
    at = dice.randrange(len(boxes))
    box, others = boxes[at], boxes[:at] + boxes[at + 1 :]
    yield others
    yield [*boxes, box]
    for dim, part in enumerate(box):
        for start, stop in ((-1, -1), (1, 1), (0, 1), (0, -1), (-1, 0), (1, 0)):
            moved = slice(max(part.start + start, 0), min(max(part.stop + stop, 0), outer[dim].stop))
            yield [*others, (*box[:dim], moved, *box[dim + 1 :])]
    yield [*others, dice.choice(boxes)]


@pytest.mark.parametrize("seed", range(40))
def test_the_cover_check_finds_what_comparing_all_pairs_finds(seed: int) -> None:
    dice = random.Random(seed)
    shape = [dice.randint(1, 7) for _ in range(dice.randint(1, 4))]
    outer = whole(shape)
    exact = partition(dice, outer, dice.randint(0, 20))
    assert cover_fault(outer, exact) is None and not cover_fault_reference(outer, exact)
    for boxes in defects(dice, outer, exact):
        boxes = [tuple(slice(part.start, max(part.start, part.stop)) for part in box) for box in boxes]
        fault = cover_fault(outer, boxes)
        assert (fault is not None) == cover_fault_reference(outer, boxes)
        counts = count_reference(outer, boxes)
        if fault is not None:
            # The first element that is not covered once, and by how much.
            assert fault == (tuple(np.argwhere(counts)[0].tolist()), counts[tuple(np.argwhere(counts)[0])])


def test_a_part_of_a_tensor_scalars_and_nothing_can_be_covered_too() -> None:
    part = (slice(3, 7), slice(10, 20))
    assert cover_fault(part, [(slice(3, 5), slice(10, 20)), (slice(5, 7), slice(10, 20))]) is None
    assert cover_fault(part, [(slice(3, 5), slice(10, 20))]) == ((5, 10), -1)
    assert cover_fault((), [()]) is None
    assert cover_fault((), []) == ((), -1)
    assert cover_fault((), [(), ()]) == ((), 1)
    nothing = (slice(0, 0), slice(0, 4))
    assert cover_fault(nothing, []) is None and cover_fault(nothing, [nothing]) is None
    assert cover_fault(nothing, [(slice(0, 1), slice(0, 4))]) == ((0, 0), 1)


def test_who_wrote_an_element_twice_or_not_at_all_is_said() -> None:
    halves = [Located(3, 0, (slice(0, 4),)), Located(7, 0, (slice(2, 8),))]
    with pytest.raises(CheckpointError, match=r"element \[2\] of x is in files of ranks 3, 7"):
        check_cover(Path("here"), "x", (slice(0, 8),), halves)
    with pytest.raises(CheckpointError, match=r"lacks element \[8\] of x: no rank has written it"):
        check_cover(Path("here"), "x", (slice(4, 9),), halves)


# ---- the index ----


def random_tables(dice: random.Random, ranks: int) -> tuple[dict[str, TensorEntry], list[list[ChunkSpec]]]:
    """Tensors of 0 to 4 dims, their boxes dealt to ranks at random; some ranks have none."""
    tables: list[list[ChunkSpec]] = [[] for _ in range(ranks)]
    tensors = {}
    for number in range(12):
        shape = tuple(dice.randint(1, 9) for _ in range(number % 5))
        tensors[f"parameter/{number}"] = TensorEntry("F32", shape)
        for box in partition(dice, whole(shape), dice.randint(0, 15)):
            if volume(box):
                spec = ChunkSpec(f"parameter/{number}", torch.float32, shape, box)
                tables[dice.randrange(ranks - 1)].append(spec)
    return tensors, [shard_order(table) for table in tables]


def manifest_of(tensors: dict[str, TensorEntry], ranks: int) -> Manifest:
    return Manifest("", 2, "", 0, 0, ranks, {}, "", "", tensors, [None] * ranks, {}, "")  # type: ignore[list-item]


@pytest.mark.parametrize("page_rows", [3, 4096])
def test_a_box_is_found_where_looking_through_all_tables_finds_it(
    page_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_index, "PAGE_ROWS", page_rows)
    dice = random.Random(page_rows)
    for _ in range(10):
        tensors, tables = random_tables(dice, 6)
        index = ChunkIndex.of_tables(Path("here"), manifest_of(tensors, 6), tables)
        for rank, table in enumerate(tables):
            index.check_rank(rank, table)
            assert np.array_equal(received_rows(sent_rows(table)), rows_of(table))
        for name, entry in tensors.items():
            box = dice.choice(partition(dice, whole(entry.shape), 3))
            expected = {
                (rank, offset, chunk.corner)
                for rank, table in enumerate(tables)
                for chunk, offset in zip(table, shard_offsets(table), strict=False)
                if chunk.name == name and (not box or intersection(chunk.box, box) is not None)
            }
            found = list(index.find(name, box))
            assert {(at.rank, at.offset, tuple(part.start for part in at.box)) for at in found} == expected
            assert len(found) == len(expected)


def test_a_table_that_the_index_does_not_have_is_refused() -> None:
    tensors, tables = random_tables(random.Random(1), 6)
    index = ChunkIndex.of_tables(Path("here"), manifest_of(tensors, 6), tables)
    rank = next(rank for rank, table in enumerate(tables) if len(table) > 1)
    with pytest.raises(CheckpointError, match=f"than the table of rank {rank}"):
        index.check_rank(rank, tables[rank][1:])
    stranger = ChunkSpec("parameter/ghost", torch.float32, (2,), (slice(0, 2),))
    with pytest.raises(CheckpointError, match="rank 5 wrote a tensor that is not among"):
        ChunkIndex.of_tables(Path("here"), manifest_of(tensors, 6), [*tables[:5], [stranger]])


def test_a_full_verification_builds_the_index_again(tmp_path: Path) -> None:
    path = save_step(tmp_path, *trained_alone(seed=1), 7)
    verify(path)
    # A page that seems to reach further, under right hashes: harmless, and not what the tables make.
    sign_pages(path, lambda pages: pages[0].__setitem__(4, pages[0, 4] + 1))
    with pytest.raises(CheckpointError, match="is not the index of the ranks' tables"):
        verify(path)


# ---- directories ----


def test_ranks_files_lie_in_directories_of_512_ranks() -> None:
    assert data_name(0) == "ranks_00000/rank_00000.safetensors"
    assert data_name(511) == "ranks_00000/rank_00511.safetensors"
    assert data_name(16383) == "ranks_15872/rank_16383.safetensors"
    assert len({Path(data_name(rank)).parent for rank in range(16384)}) == 32


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        (tmp_path / f"step_{step:08d}").mkdir()
    assert committed_steps(tmp_path) == [5, 99_999_999, 100_000_000]


def test_a_checkpoint_of_version_1_is_still_read(tmp_path: Path) -> None:
    local_model, optimizer = trained_alone(seed=1)
    expected = everything(local_model, optimizer)
    path = save_step(tmp_path, local_model, optimizer, 7)
    version_1(path)
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "rank_00000.json",
        "rank_00000.safetensors",
    ]
    assert verify(path).index is None
    other, its_optimizer = trained_alone(seed=2)
    load_into(path, other, its_optimizer)
    assert same(everything(other, its_optimizer), expected)
    checkpoint = Checkpoint(path)
    name = next(name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2)
    assert prod(checkpoint.read(name).shape) == prod(checkpoint.shape(name))
    content = bytearray((path / "rank_00000.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "rank_00000.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load_into(path, other, its_optimizer)
