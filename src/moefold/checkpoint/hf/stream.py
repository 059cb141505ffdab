"""From a model that is being trained, cut over many ranks, to (their name, full tensor), without a detour over disk.

This is what feeds an inference engine between steps of reinforcement learning. Every rank runs the generator, because
every rank holds a part; every rank gets every tensor, one at a time. Cuts are undone in the reverse order of how they
were made: sharded data parallelism first, then tensor and expert parallelism, each with one gather over its own group,
so nothing travels twice. Where their files have a tensor per expert, experts are gathered one per rank at a time, and
no rank ever holds a layer's whole stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.blueprint.parameters import ParameterSpec, buffers, parameters
from moefold.blueprint.sharding import cuts, grid_of, shard_dim
from moefold.checkpoint.hf.config_maps import family_copies, family_rules
from moefold.checkpoint.hf.hf_config import family_of
from moefold.checkpoint.hf.name_rules import Piece, copies, pieces
from moefold.comm.collectives import all_gather_no_grad
from moefold.comm.process_groups import Group
from moefold.errors import ConversionError, Problem
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import DATA_GROUPS, local_part


class _Gather(NamedTuple):
    """One cut to undo: the pieces along `dim`, in the group's order, have these sizes."""

    group: Group
    dim: int
    sizes: tuple[int, ...]


def hf_weights(local_model: LocalModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """All weights by their names, cast to ``dtype`` if given; a collective, to be run to its end on every rank."""
    model = local_model.run.model
    if local_model.groups.layout.size("pp") > 1:
        raise ConversionError(Problem("parallel.pp", "a pipeline's weights cannot be streamed yet", "save and convert"))
    by_name: dict[str, list[Piece]] = {}
    family = family_of(model)
    for piece in (*pieces(family_rules(family), model), *copies(family_copies(family), model)):
        by_name.setdefault(piece.ours, []).append(piece)
    live = dict(local_model.model.named_parameters())
    with torch.no_grad():
        for spec in parameters(model):
            for piece, ours in _gathered(local_model, spec, local_part(live[spec.name].detach()), by_name[spec.name]):
                theirs = piece.to_theirs(ours)
                yield piece.theirs, theirs if dtype is None else theirs.to(dtype)
        # Every rank has them whole.
        state = dict(local_model.model.named_buffers())
        for spec in buffers(model):
            for piece in by_name[spec.name]:
                yield piece.theirs, piece.to_theirs(state[spec.name].detach()[piece.at])


def _gathered(
    local_model: LocalModel, spec: ParameterSpec, part: Tensor, wanted: list[Piece]
) -> Iterator[tuple[Piece, Tensor]]:
    gathers = _gathers(local_model, spec)
    if not all(piece.at for piece in wanted) or len(spec.shape) < 3 or grid_of(spec.name) != "expert":
        whole = _undo(part, gathers)
        yield from ((piece, whole[piece.at]) for piece in wanted)
        return
    of_row: dict[int, list[Piece]] = {}
    for piece in wanted:
        of_row.setdefault(piece.at[0], []).append(piece)
    for rows, stack in _row_by_row(part, gathers):
        for row, expert in zip(rows, stack, strict=True):
            yield from ((piece, expert[piece.at[1:]]) for piece in of_row[row])


def _row_by_row(part: Tensor, gathers: list[_Gather]) -> Iterator[tuple[list[int], Tensor]]:
    """The j-th row of every rank, whole, and the rows' numbers in the global tensor; for j up to the longest part."""
    longest = next((max(gather.sizes) for gather in gathers if gather.dim == 0), part.shape[0])
    for j in range(longest):
        # Empty on a rank whose part ends before j.
        mine, numbers = part[j : j + 1], [j]
        for gather in gathers:
            if gather.dim:
                mine = _undo(mine, [gather])
                continue
            counts = tuple(sum(n < size for n in numbers) for size in gather.sizes)
            mine = _undo(mine, [gather._replace(sizes=counts)])
            starts = accumulate(gather.sizes, initial=0)
            numbers = [start + n for start, size in zip(starts, gather.sizes) for n in numbers if n < size]
        yield numbers, mine


def _gathers(local_model: LocalModel, spec: ParameterSpec) -> list[_Gather]:
    """How this parameter's cuts are undone, innermost first."""
    groups, held = local_model.groups, local_model.param_shards[spec.name]
    sizes = [cut.stop - cut.start for cut in held.unsharded_box]
    shard = groups[DATA_GROUPS[grid_of(spec.name)][1]]
    dim = shard_dim(tuple(sizes), shard.size)
    chunk = -(-sizes[dim] // shard.size)
    parts = tuple(max(0, min(chunk, sizes[dim] - i * chunk)) for i in range(shard.size))
    found = [_Gather(shard, dim, parts)]
    found += [_Gather(groups[cut.axis], cut.dim, (sizes[cut.dim],) * groups[cut.axis].size) for cut in cuts(spec)]
    return [gather for gather in found if not gather.group.alone]


def _undo(part: Tensor, gathers: list[_Gather]) -> Tensor:
    for group, dim, sizes in gathers:
        part = all_gather_no_grad(part.movedim(dim, 0).contiguous(), sizes, group).movedim(0, dim)
    return part
