"""Find the newest valid checkpoint and read this rank's shards of it, whatever layout wrote it.

No live tensor changes before all checks have passed on every rank: first the quick checks, then names, shapes and
dtypes are compared with the live model; then the ranks hash all files, each file once; then each reads its boxes into
new memory; then they agree. Only then are values copied into the live tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.checkpoint.manifest import Manifest, data_name, read_table
from moefold.checkpoint.shard_file import ShardReader
from moefold.checkpoint.state_dict import NeededTensor, copy_into_live, fresh_seed, needed_tensors
from moefold.checkpoint.step_dirs import check_files, committed_steps, final_path, quick_check
from moefold.checkpoint.tensor_spec import Box, ChunkSpec, inside, intersection, sizes_of, volume, whole
from moefold.comm.collectives import all_gather_no_grad, all_reduce_ints
from moefold.comm.process_groups import Group
from moefold.errors import CheckpointError, MismatchError
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel

Log = Callable[[str], None]


def _log_to_stderr(message: str) -> None:
    print(f"moefold: {message}", file=sys.stderr, flush=True)


class Checkpoint:
    """A committed checkpoint, to read boxes of global tensors from. Rank tables are opened on demand."""

    def __init__(self, path: Path, first: int = 0) -> None:
        """``first`` is the rank whose files are opened first: the same rank's, when a run resumes."""
        self.path = path
        self.manifest: Manifest = quick_check(path)
        world = self.manifest.world
        self._unread = [rank for rank in dict.fromkeys([first, *range(world)]) if rank < world]
        self._shards: dict[int, ShardReader] = {}
        self._chunks: dict[str, list[tuple[int, ChunkSpec]]] = {}

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
        for rank, part in self._parts(name, box):
            values[inside(part, box)] = self._shards[rank].view(name, part)
        return values

    def rank_record(self, name: str, rank: int) -> Tensor | None:
        """A record of one rank, such as its random state."""
        while rank in self._unread:
            self._open(rank)
        for _, chunk in (found for found in self._chunks.get(name, ()) if found[0] == rank):
            return self._shards[rank].view(name, chunk.box).clone()
        return None

    def check_files(self, ranks: range) -> None:
        check_files(self.path, self.manifest, ranks)

    def _parts(self, name: str, box: Box) -> list[tuple[int, Box]]:
        """Files and sub-boxes that hold the elements of a box; opens tables until all are found."""
        parts: list[tuple[int, Box]] = []
        looked, missing = 0, volume(box)
        while missing:
            known = self._chunks.get(name, [])
            for rank, chunk in known[looked:]:
                part = intersection(box, chunk.box)
                if part is not None:
                    if any(intersection(part, other) is not None for _, other in parts):
                        raise CheckpointError(f"{self.path}: two chunks of {name} overlap")
                    parts.append((rank, part))
                    missing -= volume(part)
            looked = len(known)
            if missing:
                if not self._unread:
                    raise CheckpointError(f"{self.path}: {name} lacks {missing:,} of {volume(box):,} elements")
                self._open(self._unread[0])
        return parts

    def _open(self, rank: int) -> None:
        chunks = read_table(self.path, self.manifest, rank)
        self._shards[rank] = ShardReader(self.path / data_name(rank), chunks)
        self._unread.remove(rank)
        for chunk in chunks:
            self._chunks.setdefault(chunk.name, []).append((rank, chunk))


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


def load_into(path: Path, local_model: LocalModel, optimizer: ModelOptimizer | None) -> dict[str, Any]:
    """Load this rank's shards, on all ranks or on none; returns the trainer's state.

    The random state is restored when as many ranks load as saved; otherwise each rank's is derived from the seed, the
    step and its rank.
    """
    world = local_model.groups["world"]
    checkpoint: Checkpoint | None = None
    values: dict[str, Tensor] = {}
    error: CheckpointError | None = None
    try:
        checkpoint, values = _staged(path, local_model, optimizer)
    except CheckpointError as found:
        error = found
    _agree(path, error, world, _device(local_model))
    assert checkpoint is not None
    copy_into_live(local_model, optimizer, values)
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
    while True:
        step = from_rank_0(_newest_valid(root, steps, log) if world.index == 0 else 0, world)
        if step == _NO_STEP and not tried:
            return None
        if step < 0:
            raise CheckpointError(
                f"{root}: there are checkpoints, but none that verifies; move them away to start over"
            )
        try:
            return final_path(root, step), load_into(final_path(root, step), local_model, optimizer)
        except MismatchError:
            raise
        except CheckpointError as error:
            if world.index == 0:
                (log or _log_to_stderr)(f"passing over the checkpoint of step {step}: {error}")
        tried = True
        steps = [older for older in steps if older < step]


def _staged(
    path: Path, local_model: LocalModel, optimizer: ModelOptimizer | None
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """All values this rank needs, read and checked; live tensors are unchanged."""
    world = local_model.groups["world"]
    checkpoint = Checkpoint(path, first=world.index)
    offered = {name: checkpoint.manifest.spec(name) for name in checkpoint.names()}
    needed = needed_tensors(local_model, optimizer, offered)
    checkpoint.check_files(range(world.index, checkpoint.manifest.world, world.size))
    return checkpoint, {want.name: _read_needed(checkpoint, want) for want in needed}


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


def _device(local_model: LocalModel) -> torch.device:
    return local_model.device
