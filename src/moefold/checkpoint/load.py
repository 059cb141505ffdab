"""Find the newest valid checkpoint and read this rank's shards of it, whatever layout wrote it.

No live tensor changes before all checks have passed on every rank:

1. Rank 0 reads and checks the manifest and the pages of the index, lists the directories, and broadcasts what it read.
2. Each rank compares names, shapes and dtypes with the live model, and looks at the sizes of its share of the files, as
   many as a rank wrote. The ranks agree.
3. Each rank hashes its share and reads its boxes into new memory; the index says from which files. The ranks agree.

Only then are values copied into the live tensors. So the files of N ranks are looked at once, not N times.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from moefold.checkpoint.chunk_index import Located, open_index, read_pages
from moefold.checkpoint.manifest import MANIFEST, Manifest, packed, read_manifest, read_table, unpacked
from moefold.checkpoint.shard_file import ShardReader, shard_offsets
from moefold.checkpoint.state_dict import NeededTensor, copy_into_live, fresh_seed, history_notes, needed_tensors
from moefold.checkpoint.step_dirs import (
    check_cover,
    check_files,
    check_names,
    check_sizes,
    committed_steps,
    final_path,
    quick_check,
)
from moefold.checkpoint.tensor_spec import Box, ChunkSpec, TensorSpec, inside, intersection, sizes_of, whole
from moefold.comm.collectives import all_gather_no_grad, all_reduce_ints, broadcast_bytes
from moefold.comm.process_groups import Group
from moefold.errors import CheckpointError, MismatchError
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel

Log = Callable[[str], None]
Result = TypeVar("Result")


def _log_to_stderr(message: str) -> None:
    print(f"moefold: {message}", file=sys.stderr, flush=True)


# A file that is mapped keeps a descriptor.
_OPEN_FILES = 64
_REFUSED, _READ = b"\0", b"\1"


class Checkpoint:
    """A committed checkpoint, to read boxes of global tensors from. Data files are opened on demand."""

    def __init__(self, path: Path, manifest: Manifest | None = None, pages: bytes | None = None) -> None:
        """Of one process, which checks names and sizes of all files; or with what another has read and checked."""
        self.path = path
        self.manifest: Manifest = quick_check(path) if manifest is None else manifest
        self.index = open_index(path, self.manifest, read_pages(path, self.manifest) if pages is None else pages)
        self._shards: OrderedDict[int, ShardReader] = OrderedDict()
        self._tables: dict[int, list[ChunkSpec]] = {}

    @classmethod
    def shared(cls, path: Path, world: Group, complete: bool = True) -> Checkpoint:
        """The same on all ranks: rank 0 reads and checks the manifest and the index's pages, the others get them."""
        return head_from(path, broadcast_bytes(head_for_all(path, complete) if world.index == 0 else b"", world))

    def names(self) -> Sequence[str]:
        return list(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.manifest.spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.manifest.spec(name).dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor (the whole by default), in fresh memory."""
        spec = self.manifest.spec(name)
        box = whole(spec.shape) if box is None else box
        values = torch.empty(sizes_of(box), dtype=spec.dtype)
        for chunk in self.locate(name, box):
            part = intersection(box, chunk.box)
            assert part is not None
            values[inside(part, box)] = self.shard(chunk.rank).view(spec.dtype, chunk.offset, chunk.box, part)
        return values

    def locate(self, name: str, box: Box) -> list[Located]:
        """The chunks that have elements of the box; each is in one of them."""
        chunks = list(self.index.find(name, box))
        check_cover(self.path, name, box, chunks)
        return chunks

    def rank_record(self, name: str, rank: int) -> Tensor | None:
        """A record of one rank, such as its random state."""
        chunks = self._table(rank)
        for chunk, offset in zip(chunks, shard_offsets(chunks), strict=False):
            if chunk.name == name:
                return self.shard(rank).view(chunk.dtype, offset, chunk.box, chunk.box).clone()
        return None

    def check_share(self, index: int, size: int) -> None:
        """The part of the ``size`` ranks that load together for rank ``index``: the hashes of every ``size``-th rank's
        two files, that table, header and index agree there, and every ``size``-th page of the index."""
        for rank in range(index, self.manifest.world, size):
            check_files(self.path, self.manifest, [rank])
            self.check_table(rank)
        self.index.check_pages(range(index, len(self.index.pages), size))

    def check_table(self, rank: int) -> None:
        """That a rank's table, its data file's header and the index agree."""
        chunks = self._table(rank)
        self.shard(rank).check_header(chunks)
        self.index.check_rank(rank, chunks)

    def _table(self, rank: int) -> list[ChunkSpec]:
        if rank not in self._tables:
            self._tables[rank] = read_table(self.path, self.manifest, rank)
        return self._tables[rank]

    def shard(self, rank: int) -> ShardReader:
        """A rank's data file; the last few stay open."""
        if rank not in self._shards:
            size = self.manifest.files[rank].data.bytes
            self._shards[rank] = ShardReader(self.manifest.data_path(self.path, rank), size)
            if len(self._shards) > _OPEN_FILES:
                self._shards.popitem(last=False)
        self._shards.move_to_end(rank)
        return self._shards[rank]


def head_for_all(path: Path, complete: bool = True) -> bytes:
    """What one rank reads for all: the manifest and the index's pages, checked; or why they cannot be had."""
    try:
        manifest = check_names(path) if complete else read_manifest(path)
        head = packed(manifest)
        return _READ + len(head).to_bytes(8, "little") + head + read_pages(path, manifest)
    except CheckpointError as error:
        return _REFUSED + str(error).encode()


def head_from(path: Path, content: bytes) -> Checkpoint:
    if content[:1] == _REFUSED:
        raise CheckpointError(content[1:].decode())
    split = 9 + int.from_bytes(content[1:9], "little")
    return Checkpoint(path, unpacked(path / MANIFEST, content[9:split]), content[split:])


def latest(root: Path, world: Group | None = None, log: Log | None = None) -> Path | None:
    """The newest step that passes the quick checks; None if nothing was ever committed.

    With ``world``, rank 0 searches and all ranks get its result. Committed steps of which none is valid are an error: a
    new start would write over them.
    """
    found = _newest_valid(root, committed_steps(root), log) if world is None or world.index == 0 else -1
    if world is not None:
        found = from_rank_0(found, world)
    if found == _NONE_VALID:
        raise CheckpointError(f"{root}: there are checkpoints, but none that verifies; move them away to start over")
    return None if found == _NO_STEP else final_path(root, found)


_NO_STEP, _NONE_VALID = -1, -2


def _newest_valid(root: Path, steps: Sequence[int], log: Log | None) -> int:
    for step in reversed(steps):
        try:
            quick_check(final_path(root, step))
        except CheckpointError as error:
            (log or _log_to_stderr)(f"passing over the checkpoint of step {step}: {error}")
        else:
            return step
    return _NONE_VALID if steps else _NO_STEP


def load_into(
    path: Path, local_model: LocalModel, optimizer: ModelOptimizer | None, complete: bool = True
) -> dict[str, Any]:
    """Load this rank's shards, on all ranks or on none; returns the trainer's state.

    Not ``complete``: the directory, another one on every host, has the files of `files_needed` by its ranks only.

    The random state is restored when as many ranks load as saved; otherwise each rank's is derived from the seed, the
    step and its rank.
    """
    world = local_model.groups["world"]
    checkpoint = Checkpoint.shared(path, world, complete)
    needed = _on_all(path, local_model, lambda: _compared(checkpoint, local_model, optimizer))
    values = _on_all(path, local_model, lambda: _staged(checkpoint, world, needed))
    copy_into_live(local_model, optimizer, values)
    if world.index == 0:
        for note in history_notes(local_model.run, offered_by(checkpoint)):
            _log_to_stderr(f"{path.name}: {note}")
    _restore_random_state(checkpoint, local_model)
    return checkpoint.manifest.state


def load_latest(
    root: Path, local_model: LocalModel, optimizer: ModelOptimizer | None, log: Log | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest checkpoint that verifies to the last bit, going back as far as needed; None if there is none.

    A checkpoint of another model ends the search at once, instead of going back to older steps.
    """
    world = local_model.groups["world"]
    steps = committed_steps(root) if world.index == 0 else []
    tried = False
    while (step := from_rank_0(steps.pop() if steps else _NO_STEP, world)) != _NO_STEP:
        try:
            return final_path(root, step), load_into(final_path(root, step), local_model, optimizer)
        except MismatchError:
            raise
        except CheckpointError as error:
            if world.index == 0:
                (log or _log_to_stderr)(f"passing over the checkpoint of step {step}: {error}")
        tried = True
    if tried:
        raise CheckpointError(f"{root}: there are checkpoints, but none that verifies; move them away to start over")
    return None


def offered_by(checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    return {name: checkpoint.manifest.spec(name) for name in checkpoint.names()}


def _compared(checkpoint: Checkpoint, local_model: LocalModel, optimizer: ModelOptimizer | None) -> list[NeededTensor]:
    """What this rank needs, of a checkpoint of this model, in which its share of the files have the right sizes."""
    needed = needed_tensors(local_model, optimizer, offered_by(checkpoint))
    world = local_model.groups["world"]
    check_sizes(checkpoint.path, checkpoint.manifest, range(world.index, checkpoint.manifest.world, world.size))
    return needed


def _staged(checkpoint: Checkpoint, world: Group, needed: Sequence[NeededTensor]) -> dict[str, Tensor]:
    """All values this rank needs, read and checked; live tensors are unchanged."""
    checkpoint.check_share(world.index, world.size)
    return {want.name: _read_needed(checkpoint, want) for want in needed}


def _on_all(path: Path, local_model: LocalModel, work: Callable[[], Result]) -> Result:
    """The work's result; if it fails on one rank, it is refused on every one."""
    result: list[Result] = []
    error: CheckpointError | None = None
    try:
        result.append(work())
    except CheckpointError as found:
        error = found
    _agree(path, error, local_model.groups["world"], local_model.device)
    return result[0]


def files_needed(checkpoint: Checkpoint, local_model: LocalModel, optimizer: ModelOptimizer | None) -> set[int]:
    """The ranks whose files this rank opens when it loads: its share of those to check, and those that it reads."""
    world = local_model.groups["world"]
    found = set(range(world.index, checkpoint.manifest.world, world.size))
    for want in needed_tensors(local_model, optimizer, offered_by(checkpoint)):
        found.update(chunk.rank for box in want.boxes for chunk in checkpoint.locate(want.name, box))
    return found


def _read_needed(checkpoint: Checkpoint, want: NeededTensor) -> Tensor:
    if len(want.boxes) == 1:
        return checkpoint.read(want.name, want.boxes[0]).view(want.sizes)
    return torch.cat([checkpoint.read(want.name, box).flatten() for box in want.boxes]).view(want.sizes)


def _restore_random_state(checkpoint: Checkpoint, local_model: LocalModel) -> None:
    rank = local_model.groups.rank
    saved = None
    if checkpoint.manifest.world == local_model.groups["world"].size:
        saved = checkpoint.rank_record(f"rng/{rank}", rank)
    if saved is None:
        torch.manual_seed(fresh_seed(local_model.run.seed, checkpoint.manifest.step, rank))
    else:
        torch.set_rng_state(saved)


_OK, _DAMAGED, _OTHER_MODEL = 0, 1, 2


def _agree(path: Path, error: CheckpointError | None, world: Group, device: torch.device) -> None:
    """Raise on every rank if one has an error: its own, or one that names the rank."""
    own = _OK if error is None else _OTHER_MODEL if isinstance(error, MismatchError) else _DAMAGED
    by_rank = all_gather_no_grad(torch.tensor([own], device=device), (1,) * world.size, world).tolist()
    if not any(by_rank):
        return
    kind = MismatchError if _OTHER_MODEL in by_rank else CheckpointError
    rank = next(rank for rank, found in enumerate(by_rank) if found == max(by_rank))
    reason = str(error) if error is not None else f"{path}: refused by rank {rank}, whose own message says why"
    raise kind(reason) from error


def from_rank_0(value: int, world: Group) -> int:
    """Rank 0's number on every rank."""
    return all_reduce_ints((value if world.index == 0 else 0,), world)[0]
