"""From a live model and optimizer to the chunks a rank writes, and back.

Names in a checkpoint are "KIND/NAME": "parameter/layers.0...", "buffer/...", and one kind per tensor that the optimizer
keeps for a parameter ("exp_avg/...", "exp_avg_sq/...", "step/..."). Optimizer state is either of the
parameter's shape, and sharded like it, or a scalar. A replicated shard is written by its primary replica and read by
all.

A rank holds pieces of parameters (``LocalModel.pieces``): one box of the global tensor each under FSDP, several in flat
sharding. Each box is one chunk; a rank reads the boxes of its own pieces, so any layout reads any other's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from moefold.blueprint.parameters import buffers, parameters
from moefold.checkpoint.tensor_spec import Box, Chunk, TensorSpec, whole
from moefold.config.loading import dump_run
from moefold.errors import CheckpointError, MismatchError
from moefold.parallel.parallelize import LocalModel, local_buffers
from moefold.parallel.param_shards import TrainedPiece, local_part

_WEIGHTS = ("parameter/", "buffer/")
_MAX_LISTED = 200


def run_record(local_model: LocalModel) -> dict[str, object]:
    """The manifest's fields that describe the run."""
    degrees = {name: size for name, size in asdict(local_model.run.parallel).items() if type(size) is int}
    layout = local_model.groups.layout
    return {
        "config": dump_run(local_model.run),
        "layout": degrees | {"dp": layout.size("dp"), "edp": layout.size("edp")},
    }


def chunks_of(local_model: LocalModel, optimizer: Optimizer | None) -> list[Chunk]:
    """What this rank writes: shards for which it is the primary replica, and its random state."""
    chunks = [chunk for chunk in _primary_chunks(local_model, optimizer) if chunk.tensor.numel()]
    rng = torch.get_rng_state()
    return [*chunks, Chunk(f"rng/{local_model.groups.rank}", tuple(rng.shape), whole(rng.shape), rng)]


def _primary_chunks(local_model: LocalModel, optimizer: Optimizer | None) -> Iterator[Chunk]:
    kinds = _state_kinds(optimizer)
    for piece in local_model.pieces():
        if not piece.is_primary:
            continue
        yield from _chunks("parameter", piece, piece.parameter.detach())
        for kind, single in kinds.items():
            state = _state_or_zeros(optimizer, piece, kind, single)
            if not single:
                yield from _chunks(kind, piece, state)
            elif piece.starts_tensor:
                yield Chunk(f"{kind}/{piece.name}", (), (), local_part(state))
    if local_model.groups["stage"].index == 0:
        live = dict(local_model.model.named_buffers())
        for spec in local_buffers(local_model.run, local_model.model):
            yield Chunk(f"buffer/{spec.name}", spec.shape, whole(spec.shape), live[spec.name])


def _chunks(kind: str, piece: TrainedPiece, values: Tensor) -> Iterator[Chunk]:
    for box, part in piece.by_box(values):
        yield Chunk(f"{kind}/{piece.name}", piece.shard.shape, box, part)


def tensors_elsewhere(local_model: LocalModel, optimizer: Optimizer | None) -> dict[str, TensorSpec]:
    """Tensors of a checkpoint of which this rank has no part: those of other pipeline stages, for one."""
    kinds, dtype = _state_kinds(optimizer), local_model.sharding.main_dtype
    found: dict[str, TensorSpec] = {}
    held = {piece.name for piece in local_model.pieces()}
    first = {piece.name for piece in local_model.pieces() if piece.starts_tensor}
    for spec in parameters(local_model.run.model):
        tensor = TensorSpec(dtype, spec.shape)
        if spec.name not in held:
            found |= {f"{kind}/{spec.name}": tensor for kind in ("parameter", *kinds) if not kinds.get(kind, False)}
        # A single number is written with the first element.
        if spec.name not in first:
            found |= {f"{kind}/{spec.name}": TensorSpec(torch.float32, ()) for kind in kinds if kinds[kind]}
    here = {spec.name for spec in local_buffers(local_model.run, local_model.model)}
    wide = torch.promote_types(dtype, torch.float32)
    others = (spec for spec in buffers(local_model.run.model) if spec.name not in here)
    return found | {f"buffer/{spec.name}": TensorSpec(wide, spec.shape) for spec in others}


def _state_kinds(optimizer: Optimizer | None) -> dict[str, bool]:
    """The kinds of state that the optimizer keeps, and whether each is a single number; none before its first step."""
    kinds: dict[str, bool] = {}
    for parameter, state in (optimizer.state if optimizer else {}).items():
        for kind, value in state.items():
            single = isinstance(value, Tensor) and value.dim() == 0
            if not isinstance(value, Tensor) or not (single or value.shape == parameter.shape):
                raise CheckpointError(f"the optimizer's {kind!r} is neither one number nor shaped like its parameter")
            kinds[kind] = single
    return kinds


def _state_or_zeros(optimizer: Optimizer | None, piece: TrainedPiece, kind: str, single: bool) -> Tensor:
    """A parameter that never had a gradient has no state; its first step would start from zeros."""
    assert optimizer is not None
    state = optimizer.state.get(piece.parameter, {})
    if kind in state:
        return state[kind]
    return torch.zeros((), dtype=torch.float32) if single else torch.zeros_like(piece.parameter.detach())


@dataclass(frozen=True)
class NeededTensor:
    """The boxes that a rank reads of a global tensor; in order they fill a tensor of ``sizes``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    sizes: tuple[int, ...]


def needed_tensors(
    local_model: LocalModel, optimizer: Optimizer | None, offered: Mapping[str, TensorSpec]
) -> list[NeededTensor]:
    """The boxes that this rank needs of a checkpoint; refuses one that is of another model, naming every difference."""
    wants = {want.name: want for want in _weights_needed(local_model)}
    kinds = dict.fromkeys(name.partition("/")[0] for name in offered)
    states = [kind for kind in kinds if f"{kind}/" not in _WEIGHTS]
    if optimizer is not None:
        wants |= {want.name: want for kind in states for want in _states_needed(local_model, kind, offered)}
    ignored = set() if optimizer is not None else {name for name in offered if name.partition("/")[0] in states}
    differences = {name: "is missing" for name in wants if name not in offered}
    elsewhere = _names_of_model(local_model, kinds)
    differences |= {
        name: "is not part of this model" for name in offered if name not in elsewhere and name not in ignored
    }
    for name, want in wants.items():
        spec = offered.get(name, want)
        if spec.shape != want.shape:
            differences[name] = f"has shape {list(spec.shape)}, the model has {list(want.shape)}"
        elif spec.dtype != want.dtype:
            differences[name] = f"is {spec.dtype}, the model has {want.dtype}; nothing is cast silently"
    if differences:
        raise MismatchError("this checkpoint is of another model:\n  " + "\n  ".join(_listed(differences)))
    return list(wants.values())


def _names_of_model(local_model: LocalModel, kinds: Iterable[str]) -> set[str]:
    """Everything that a checkpoint of the whole model may hold: other pipeline ranks' tensors too."""
    trained = [spec.name for spec in parameters(local_model.run.model)]
    names = {f"{kind}/{name}" for kind in kinds if kind != "buffer" for name in trained}
    return names | {f"buffer/{spec.name}" for spec in buffers(local_model.run.model)}


def _listed(differences: Mapping[str, str]) -> list[str]:
    """What is wrong with a parameter is wrong with its moments too; saying it once is enough."""
    said = {name for name in differences if name.startswith(_WEIGHTS)}
    moments = [name for name in differences if name not in said and f"parameter/{name.partition('/')[2]}" not in said]
    names = sorted(said) + sorted(moments)
    more = [f"and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
    return [f"{name} {differences[name]}" for name in names[:_MAX_LISTED]] + more


def _weights_needed(local_model: LocalModel) -> Iterator[NeededTensor]:
    for piece in local_model.pieces():
        yield _needed("parameter", piece)
    live = dict(local_model.model.named_buffers())
    for spec in local_buffers(local_model.run, local_model.model):
        boxes = (whole(spec.shape),)
        yield NeededTensor(f"buffer/{spec.name}", live[spec.name].dtype, spec.shape, boxes, spec.shape)


def _needed(kind: str, piece: TrainedPiece) -> NeededTensor:
    sizes = tuple(local_part(piece.parameter.detach()).shape)
    return NeededTensor(f"{kind}/{piece.name}", piece.parameter.dtype, piece.shard.shape, piece.boxes, sizes)


def _states_needed(local_model: LocalModel, kind: str, offered: Mapping[str, TensorSpec]) -> Iterator[NeededTensor]:
    """A kind of state is there for all parameters or for none."""
    for piece in local_model.pieces():
        spec = offered.get(f"{kind}/{piece.name}")
        if spec is not None and spec.shape == ():
            yield NeededTensor(f"{kind}/{piece.name}", torch.float32, (), ((),), ())
        else:
            yield _needed(kind, piece)


@torch.no_grad()
def copy_into_live(local_model: LocalModel, optimizer: Optimizer | None, values: Mapping[str, Tensor]) -> None:
    """Copy loaded values into the live tensors; everything was checked before."""
    live = dict(local_model.model.named_buffers())
    for spec in local_buffers(local_model.run, local_model.model):
        live[spec.name].copy_(values[f"buffer/{spec.name}"])
    kinds = dict.fromkeys(name.partition("/")[0] for name in values)
    states = [kind for kind in kinds if f"{kind}/" not in _WEIGHTS]
    # A fused update reads step counts on the parameter's device; the others read them on the host.
    groups = [] if optimizer is None else optimizer.param_groups
    fused = {parameter for group in groups if group.get("fused") for parameter in group["params"]}
    for piece in local_model.pieces():
        parameter = piece.parameter
        local_part(parameter).copy_(values[f"parameter/{piece.name}"])
        if optimizer is not None:
            counts = parameter.device if parameter in fused else torch.device("cpu")
            optimizer.state[parameter] = {
                kind: _state_like(piece, values[f"{kind}/{piece.name}"], counts) for kind in states
            }
            if not states:
                del optimizer.state[parameter]
    local_model.sharding.weights_changed()


def _state_like(piece: TrainedPiece, value: Tensor, device_of_counts: torch.device) -> Tensor:
    if value.dim() == 0 and piece.parameter.dim() > 0:
        return value.to(device_of_counts, copy=True)
    state = torch.zeros_like(piece.parameter.detach())
    local_part(state).copy_(value)
    return state


def fresh_seed(seed: int, step: int, rank: int) -> int:
    """For a rank without a saved random state."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "little")
