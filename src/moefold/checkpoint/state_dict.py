"""From a live model and optimizer to the chunks a rank writes, and back.

Names in a checkpoint are "KIND/NAME": "parameter/layers.0...", "buffer/...", and one kind per tensor that the optimizer
keeps for a parameter ("exp_avg/...", "exp_avg_sq/...", "step/..."), as it says itself (`SavingOptimizer`). Optimizer
state is either of the parameter's shape, and sharded like it, or a scalar. A replicated shard is written by its primary
replica and read by all.

A rank holds pieces of parameters (``LocalModel.pieces``): one box of the global tensor each under FSDP, several in flat
sharding. Each box is one chunk; a rank reads the boxes of its own pieces, so any layout reads any other's.

Amaxes of earlier steps ("amax_history/...") belong to a precision recipe and not to the model: a run of another recipe
leaves them where they are, and one that finds none starts without (``history_notes`` says so).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from moefold.blueprint.narrow_matmuls import amax_histories
from moefold.blueprint.parameters import buffers, parameters
from moefold.checkpoint.tensor_spec import Box, Chunk, TensorSpec, whole
from moefold.comm.collectives import all_reduce_ints
from moefold.config.loading import dump_run
from moefold.config.run import RunConfig
from moefold.errors import MismatchError
from moefold.optim.optimizer import ModelOptimizer
from moefold.optim.trained_pieces import SavingOptimizer
from moefold.parallel.parallelize import LocalModel, frozen_dtypes, local_buffers
from moefold.parallel.param_shards import TrainedPiece, local_part
from moefold.precision.amax_history import OPERANDS
from moefold.precision.dtypes import TORCH_FORMATS

_WEIGHTS = ("parameter/", "buffer/")
_HISTORY = "amax_history/"
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


def _primary_chunks(local_model: LocalModel, optimizer: SavingOptimizer | None) -> Iterator[Chunk]:
    for piece in local_model.pieces():
        if not piece.is_primary:
            continue
        yield from _chunks("parameter", piece, _main_weight(piece, optimizer))
        # Before its first update an optimizer keeps nothing.
        for kind, state in optimizer.saved_state(piece.parameter).items() if optimizer and optimizer.state else ():
            if state.dim() or not piece.parameter.dim():
                yield from _chunks(kind, piece, state)
            elif piece.starts_tensor:
                yield Chunk(f"{kind}/{piece.name}", (), (), state)
    if local_model.groups["stage"].index == 0:
        live = dict(local_model.model.named_buffers())
        for spec in local_buffers(local_model.run, local_model.model):
            yield Chunk(f"buffer/{spec.name}", spec.shape, whole(spec.shape), live[spec.name])
        for name, amaxes in _live_histories(local_model).items():
            yield Chunk(name, tuple(amaxes.shape), whole(amaxes.shape), amaxes)


def _live_histories(local_model: LocalModel) -> dict[str, Tensor]:
    """By their names in a checkpoint."""
    return {
        f"{_HISTORY}{name}.{operand}": amaxes
        for name, history in local_model.amax_histories.items()
        for operand, amaxes in history.named_buffers()
    }


def _main_weight(piece: TrainedPiece, optimizer: SavingOptimizer | None) -> Tensor:
    return local_part(piece.parameter.detach()) if optimizer is None else optimizer.main_weight(piece.parameter)


def _chunks(kind: str, piece: TrainedPiece, values: Tensor) -> Iterator[Chunk]:
    for box, part in piece.by_box(values):
        yield Chunk(f"{kind}/{piece.name}", piece.shard.shape, box, part)


def tensors_elsewhere(local_model: LocalModel, optimizer: ModelOptimizer | None) -> dict[str, TensorSpec]:
    """Tensors of a checkpoint of which this rank has no part: those of other pipeline stages, for one.

    Called by all ranks. One that trains nothing itself (a stage with a frozen embedding) cannot tell from its own
    optimizer whether others have states.
    """
    has_states = optimizer is not None and sum(all_reduce_ints([len(optimizer.state)], local_model.groups["world"])) > 0
    dtype, frozen = local_model.sharding.main_dtype, frozen_dtypes(local_model.run)
    found: dict[str, TensorSpec] = {}
    held = {piece.name for piece in local_model.pieces()}
    first = {piece.name for piece in local_model.pieces() if piece.starts_tensor}
    for spec in parameters(local_model.run.model):
        if spec.name not in held:
            found[f"parameter/{spec.name}"] = TensorSpec(frozen.get(spec.name, dtype), spec.shape)
        for kind, saved in optimizer.kinds_of(spec.name, spec.kind).items() if optimizer and has_states else ():
            # A single number is written with the first element.
            if spec.name not in (first if saved.single else held):
                found[f"{kind}/{spec.name}"] = TensorSpec(saved.dtype, () if saved.single else spec.shape)
    here = {spec.name for spec in local_buffers(local_model.run, local_model.model)}
    wide = torch.promote_types(dtype, torch.float32)
    others = (spec for spec in buffers(local_model.run.model) if spec.name not in here)
    found |= {f"buffer/{spec.name}": TensorSpec(wide, spec.shape) for spec in others}
    histories = {f"{_HISTORY}{spec.name}": TensorSpec(wide, spec.shape) for spec in amax_histories(local_model.run)}
    return found | {name: spec for name, spec in histories.items() if name not in _live_histories(local_model)}


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
    wants = {want.name: want for want in _weights_needed(local_model, optimizer)}
    kinds = dict.fromkeys(name.partition("/")[0] for name in offered)
    states = [kind for kind in kinds if f"{kind}/" not in (*_WEIGHTS, _HISTORY) and kind != "rng"]
    if optimizer is not None and states:
        wants |= {want.name: want for want in _states_needed(local_model, optimizer)}
    ignored = set() if optimizer is not None else {name for name in offered if name.partition("/")[0] in states}
    differences = {name: f"is missing{_other_format(name, offered)}" for name in wants if name not in offered}
    elsewhere = _names_of_model(local_model, optimizer)
    differences |= {
        name: f"is not part of this {'model' if name.startswith(_WEIGHTS) else 'run'}{_key_for(name)}"
        for name in offered
        if name not in elsewhere and name not in ignored and not name.startswith(_HISTORY)
    }
    for name, want in wants.items():
        spec = offered.get(name, want)
        if spec.shape != want.shape:
            differences[name] = f"has shape {list(spec.shape)}, the model has {list(want.shape)}"
        elif spec.dtype != want.dtype:
            words = f"is {spec.dtype}, the model has {want.dtype}; nothing is cast silently"
            differences[name] = words + _other_format(name, offered)
    if differences:
        raise MismatchError(
            "this checkpoint is of another model; choose another --name, or the model of the checkpoint:\n  "
            + "\n  ".join(_listed(differences))
        )
    return [*wants.values(), *_histories_needed(local_model, offered)]


def _histories_needed(local_model: LocalModel, offered: Mapping[str, TensorSpec]) -> Iterator[NeededTensor]:
    """Those of the live model that the checkpoint has, of as many steps."""
    for name, amaxes in _live_histories(local_model).items():
        spec = TensorSpec(amaxes.dtype, tuple(amaxes.shape))
        if offered.get(name) == spec:
            yield NeededTensor(name, spec.dtype, spec.shape, (whole(spec.shape),), spec.shape)


def history_notes(run: RunConfig, offered: Mapping[str, TensorSpec]) -> list[str]:
    """What a checkpoint of another recipe or `precision.amax_history_len` means for amaxes of earlier steps."""
    wanted = {f"{_HISTORY}{spec.name}": spec.shape for spec in amax_histories(run)}
    found = {name: spec.shape for name, spec in offered.items() if name.startswith(_HISTORY)}
    missing = sum(found.get(name) != shape for name, shape in wanted.items())
    unused = len(found.keys() - wanted.keys())
    notes = []
    if missing:
        notes.append(
            f"amax histories of {missing} of {len(wanted)} operands start anew: the checkpoint has none of "
            f"{run.precision.amax_history_len} steps; scales of the next step are those of its own tensors"
        )
    if unused:
        notes.append(
            f"{unused} amax histories of the checkpoint are not used by precision.recipe {run.precision.recipe}"
        )
    return notes


def _names_of_model(local_model: LocalModel, optimizer: ModelOptimizer | None) -> set[str]:
    """Everything that a checkpoint of the whole model may hold: other pipeline ranks' tensors too."""
    specs = list(parameters(local_model.run.model))
    names = {f"parameter/{spec.name}" for spec in specs} | {f"buffer/{x.name}" for x in buffers(local_model.run.model)}
    if optimizer is not None:
        names |= {f"{kind}/{spec.name}" for spec in specs for kind in optimizer.kinds_of(spec.name, spec.kind)}
    return names


def _other_format(name: str, offered: Mapping[str, TensorSpec]) -> str:
    """Where a moment is there in another format: the key with which the checkpoint can be loaded."""
    kind, _, of = name.partition("/")
    if not kind.startswith("exp_avg"):
        return ""
    moment = kind.removesuffix("_float8")
    if f"{moment}_float8/{of}" in offered:
        return "; the checkpoint has moments in float8: set precision.moments: float8 to load it"
    spec = offered.get(f"{moment}/{of}")
    if spec is None:
        return ""
    format = next((name for name, dtype in TORCH_FORMATS.items() if dtype == spec.dtype), str(spec.dtype))
    return f"; the checkpoint has moments in {format}: set precision.moments: {format} to load it"


def _key_for(name: str) -> str:
    kind = name.partition("/")[0]
    if kind.endswith("_float8"):
        return ": precision.moments: float8 would read it"
    return ": optim.algorithm: muon would read it" if kind == "momentum" else ""


def _listed(differences: Mapping[str, str]) -> list[str]:
    """What is wrong with a parameter is wrong with its moments too; saying it once is enough."""
    said = {name for name in differences if name.startswith(_WEIGHTS)}
    moments = [name for name in differences if name not in said and f"parameter/{name.partition('/')[2]}" not in said]
    names = sorted(said) + sorted(moments)
    more = [f"and {len(names) - _MAX_LISTED} more"] if len(names) > _MAX_LISTED else []
    return [f"{name} {differences[name]}" for name in names[:_MAX_LISTED]] + more


def _weights_needed(local_model: LocalModel, optimizer: SavingOptimizer | None) -> Iterator[NeededTensor]:
    for piece in local_model.pieces():
        parameter = piece.parameter
        dtype = parameter.dtype if optimizer is None else optimizer.main_dtype(parameter)
        yield _needed("parameter", piece, dtype)
    live = dict(local_model.model.named_buffers())
    for spec in local_buffers(local_model.run, local_model.model):
        boxes = (whole(spec.shape),)
        yield NeededTensor(f"buffer/{spec.name}", live[spec.name].dtype, spec.shape, boxes, spec.shape)


def _needed(kind: str, piece: TrainedPiece, dtype: torch.dtype) -> NeededTensor:
    sizes = tuple(local_part(piece.parameter.detach()).shape)
    return NeededTensor(f"{kind}/{piece.name}", dtype, piece.shard.shape, piece.boxes, sizes)


def _states_needed(local_model: LocalModel, optimizer: SavingOptimizer) -> Iterator[NeededTensor]:
    """States are there for all parameters or for none."""
    for piece in local_model.pieces():
        for kind, saved in optimizer.saved_kinds(piece.parameter).items():
            if saved.single:
                yield NeededTensor(f"{kind}/{piece.name}", saved.dtype, (), ((),), ())
            else:
                yield _needed(kind, piece, saved.dtype)


@torch.no_grad()
def copy_into_live(local_model: LocalModel, optimizer: SavingOptimizer | None, values: Mapping[str, Tensor]) -> None:
    """Copy loaded values into the live tensors; everything was checked before."""
    live = dict(local_model.model.named_buffers())
    for spec in local_buffers(local_model.run, local_model.model):
        live[spec.name].copy_(values[f"buffer/{spec.name}"])
    for name, history in local_model.amax_histories.items():
        saved = {operand: values.get(f"{_HISTORY}{name}.{operand}") for operand in OPERANDS}
        history.load({operand: amaxes for operand, amaxes in saved.items() if amaxes is not None})
    states = any(not name.startswith((*_WEIGHTS, _HISTORY)) for name in values)
    for piece in local_model.pieces():
        parameter, main = piece.parameter, values[f"parameter/{piece.name}"]
        if optimizer is None:
            local_part(parameter).copy_(main)
            continue
        optimizer.set_main_weight(parameter, main)
        if states:
            kinds = optimizer.saved_kinds(parameter)
            optimizer.load_saved(parameter, {kind: values[f"{kind}/{piece.name}"] for kind in kinds})
        else:
            optimizer.forget(parameter)
    local_model.weights_changed()


def fresh_seed(seed: int, step: int, rank: int) -> int:
    """For a rank without a saved random state."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "little")
