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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from moefold.blueprint.param_groups import update_rule
from moefold.blueprint.parameters import ParameterSpec, buffers, parameters
from moefold.checkpoint.tensor_spec import Box, Chunk, TensorSpec, whole
from moefold.config.loading import dump_run
from moefold.errors import MismatchError
from moefold.optim.optimizer import ModelOptimizer, OptimizerInputs, build_optimizer
from moefold.optim.trained_pieces import SavedKind
from moefold.parallel.parallelize import LocalModel, local_buffers
from moefold.parallel.param_shards import ParamShard, TrainedPiece, local_part

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


def chunks_of(local_model: LocalModel, optimizer: ModelOptimizer | None) -> list[Chunk]:
    """What this rank writes: shards for which it is the primary replica, and its random state."""
    chunks = [chunk for chunk in _primary_chunks(local_model, optimizer) if chunk.tensor.numel()]
    rng = torch.get_rng_state()
    return [*chunks, Chunk(f"rng/{local_model.groups.rank}", tuple(rng.shape), whole(rng.shape), rng)]


def _primary_chunks(local_model: LocalModel, optimizer: ModelOptimizer | None) -> Iterator[Chunk]:
    for piece in local_model.pieces():
        if not piece.is_primary:
            continue
        yield from _chunks("parameter", piece, piece.parameter.detach())
        kinds = {} if optimizer is None else optimizer.saved_kinds(piece.parameter)
        states = {} if optimizer is None else optimizer.saved_state(piece.parameter)
        for kind, saved in kinds.items():
            if not saved.single:
                yield from _chunks(kind, piece, states[kind])
            elif piece.starts_tensor:
                yield Chunk(f"{kind}/{piece.name}", (), (), states[kind])
    if local_model.groups["stage"].index == 0:
        live = dict(local_model.model.named_buffers())
        for spec in local_buffers(local_model.run, local_model.model):
            yield Chunk(f"buffer/{spec.name}", spec.shape, whole(spec.shape), live[spec.name])


def _chunks(kind: str, piece: TrainedPiece, values: Tensor) -> Iterator[Chunk]:
    for box, part in piece.by_box(values):
        yield Chunk(f"{kind}/{piece.name}", piece.shard.shape, box, part)


def tensors_elsewhere(local_model: LocalModel, optimizer: ModelOptimizer | None) -> dict[str, TensorSpec]:
    """Tensors of a checkpoint of which this rank has no part: those of other pipeline stages, for one."""
    dtype = local_model.sharding.main_dtype
    found: dict[str, TensorSpec] = {}
    held = {piece.name for piece in local_model.pieces()}
    first = {piece.name for piece in local_model.pieces() if piece.starts_tensor}
    kinds_of = _kinds_by_algorithm(local_model, optimizer)
    for spec in parameters(local_model.run.model):
        if spec.name not in held:
            found[f"parameter/{spec.name}"] = TensorSpec(dtype, spec.shape)
        for kind, saved in kinds_of(spec).items():
            # A single number is written with the first element.
            if saved.single and spec.name not in first:
                found[f"{kind}/{spec.name}"] = TensorSpec(saved.dtype, ())
            elif not saved.single and spec.name not in held:
                found[f"{kind}/{spec.name}"] = TensorSpec(saved.dtype, spec.shape)
    here = {spec.name for spec in local_buffers(local_model.run, local_model.model)}
    wide = torch.promote_types(dtype, torch.float32)
    others = (spec for spec in buffers(local_model.run.model) if spec.name not in here)
    return found | {f"buffer/{spec.name}": TensorSpec(wide, spec.shape) for spec in others}


Kinds = dict[str, SavedKind]


def _kinds_by_algorithm(local_model: LocalModel, optimizer: ModelOptimizer | None) -> Callable[[ParameterSpec], Kinds]:
    """What the optimizer keeps of a parameter of which this rank may have nothing: as of another of its algorithm."""
    known: dict[str, Kinds] = {}
    run = local_model.run

    def kinds_of(spec: ParameterSpec) -> Kinds:
        if optimizer is None:
            return {}
        algorithm = update_rule(spec.name, spec.kind, run.optim).algorithm
        if algorithm not in known:
            empty = nn.Parameter(torch.empty((0,) * len(spec.shape), dtype=local_model.sharding.main_dtype))
            piece = TrainedPiece(empty, _stand_in(spec), (whole(empty.shape),))
            inputs = OptimizerInputs(run, torch.device("cpu"), local_model.groups)
            known[algorithm] = build_optimizer([piece], inputs).saved_kinds(empty)
        return known[algorithm]

    for piece in local_model.pieces() if optimizer is not None else ():
        assert optimizer is not None
        algorithm = update_rule(piece.name, piece.kind, run.optim).algorithm
        known.setdefault(algorithm, optimizer.saved_kinds(piece.parameter))
    return kinds_of


def _stand_in(spec: ParameterSpec) -> ParamShard:
    box = whole((0,) * len(spec.shape))
    return ParamShard(spec.name, spec.kind, spec.shape, box, box, (), (), (0,), is_first_pp_rank=True)


@dataclass(frozen=True)
class NeededTensor:
    """The boxes that a rank reads of a global tensor; in order they fill a tensor of ``sizes``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    sizes: tuple[int, ...]


def needed_tensors(
    local_model: LocalModel, optimizer: ModelOptimizer | None, offered: Mapping[str, TensorSpec]
) -> list[NeededTensor]:
    """The boxes that this rank needs of a checkpoint; refuses one that is of another model, naming every difference."""
    wants = {want.name: want for want in _weights_needed(local_model)}
    states = {name for name in offered if not name.startswith(_WEIGHTS)}
    # Converted weights come without states.
    if optimizer is not None and states:
        wants |= {want.name: want for want in _states_needed(local_model, optimizer)}
    differences = {name: "is missing" for name in wants if name not in offered}
    elsewhere = _names_of_model(local_model, (name.partition("/")[0] for name in offered))
    ignored = states if optimizer is None else set()
    differences |= {
        name: "is not part of this model" for name in offered if name not in elsewhere and name not in ignored
    }
    if optimizer is not None:
        here = {piece.name for piece in local_model.pieces()}
        unread = (name for name in states - wants.keys() if name.partition("/")[2] in here)
        differences |= {name: "is no state of this run's optimizer" for name in unread}
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
        yield _needed("parameter", piece, piece.parameter.dtype)
    live = dict(local_model.model.named_buffers())
    for spec in local_buffers(local_model.run, local_model.model):
        boxes = (whole(spec.shape),)
        yield NeededTensor(f"buffer/{spec.name}", live[spec.name].dtype, spec.shape, boxes, spec.shape)


def _needed(kind: str, piece: TrainedPiece, dtype: torch.dtype) -> NeededTensor:
    sizes = tuple(local_part(piece.parameter.detach()).shape)
    return NeededTensor(f"{kind}/{piece.name}", dtype, piece.shard.shape, piece.boxes, sizes)


def _states_needed(local_model: LocalModel, optimizer: ModelOptimizer) -> Iterator[NeededTensor]:
    for piece in local_model.pieces():
        for kind, saved in optimizer.saved_kinds(piece.parameter).items():
            if saved.single:
                yield NeededTensor(f"{kind}/{piece.name}", saved.dtype, (), ((),), ())
            else:
                yield _needed(kind, piece, saved.dtype)


@torch.no_grad()
def copy_into_live(local_model: LocalModel, optimizer: ModelOptimizer | None, values: Mapping[str, Tensor]) -> None:
    """Copy loaded values into the live tensors; everything was checked before."""
    live = dict(local_model.model.named_buffers())
    for spec in local_buffers(local_model.run, local_model.model):
        live[spec.name].copy_(values[f"buffer/{spec.name}"])
    has_states = any(not name.startswith(_WEIGHTS) for name in values)
    for piece in local_model.pieces():
        local_part(piece.parameter).copy_(values[f"parameter/{piece.name}"])
        if optimizer is not None and not has_states:
            optimizer.state.pop(piece.parameter, None)
        elif optimizer is not None:
            kinds = optimizer.saved_kinds(piece.parameter)
            optimizer.load_saved(piece.parameter, {kind: values[f"{kind}/{piece.name}"] for kind in kinds})
    local_model.sharding.weights_changed()


def fresh_seed(seed: int, step: int, rank: int) -> int:
    """For a rank without a saved random state."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "little")
