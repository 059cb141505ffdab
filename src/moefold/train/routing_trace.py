"""Routing traces: the experts of every token of some steps, on disk, and taken again from there.

    TRACE/trace.json                             model, data and batch that it belongs to
    TRACE/step_00000003/part_00000.safetensors   sample_00000017: [tokens, MoE layers, K] int16, -1 for padding

A trace is kept by sample and not by rank or microbatch: which rank sees a sample, and beside which others, depends on
the layout, and the samples of a step do not. So a trace that one layout recorded can be replayed on another. Steps are
numbered by their first sample. Each part is written by the rank that holds the samples (of those that share a
microbatch, the first); a step takes 2 * tokens * layers * K bytes.

Recording (`train.routing_trace.steps`) stops after that many steps in all, restarts included. Replay
(`train.routing_trace.replay`) fills ``Batch.experts_TMK`` where batches are read, on the prefetching thread; steps that
the trace does not have are routed as always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save
from torch import Tensor

from moefold.blueprint.parameters import moe_block_names
from moefold.checkpoint.files import make_directory, naming
from moefold.checkpoint.hf.untrusted_files import SafetensorsFile, read_object
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, MoefoldError, Problem, TrainingError
from moefold.nn.batch import Batch
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.router_replay import RoutingRecorder
from moefold.private_files import OWN_MODE, replace_file
from moefold.train.batches import LocalStep, StepData

FOLDER, ABOUT = "routing", "trace.json"
FORMAT = "moefold-routing-1"
_STEP, _SAMPLE = re.compile(r"step_(\d{8})"), re.compile(r"sample_(\d{8})")


@dataclass(frozen=True)
class TraceInfo:
    """What a trace belongs to; ``data`` is the fingerprint of the samples' order, "" where it is not known."""

    run: str
    data: str
    layers: tuple[str, ...]
    num_experts: int
    top_k: int
    global_batch: int
    micro_batch: int
    format: str = FORMAT

    def step_bytes(self, tokens: int) -> int:
        return 2 * tokens * len(self.layers) * self.top_k


def trace_info(run: RunConfig, fingerprint: str) -> TraceInfo:
    moe = run.model.moe
    assert moe is not None
    blocks, data = moe_block_names(run.model), run.data
    return TraceInfo(run.name, fingerprint, blocks, moe.num_experts, moe.top_k, data.global_batch, data.micro_batch)


def step_at(first_sample: int, global_batch: int) -> int:
    """The number of the step that begins with this sample, from 1."""
    step, inside = divmod(first_sample, global_batch)
    if inside:
        raise TrainingError(
            f"a step begins with sample {first_sample:,}, in the middle of a batch of {global_batch}: "
            "data.global_batch was changed, and routing of such a run is neither recorded nor replayed"
        )
    return step + 1


class TraceWriter:
    """One rank's side of a recorded run; all ranks must call it with the same steps."""

    def __init__(self, local_model: LocalModel, directory: Path, info: TraceInfo, left: int) -> None:
        """``left``: how many steps are still to be recorded."""
        self.recorder, self.groups = RoutingRecorder(local_model), local_model.groups
        self.directory, self.info, self.left = directory, info, left
        if (directory / ABOUT).is_file():
            RoutingTrace(directory).require(info, "train.routing_trace.steps")
        if self.groups.rank == 0:
            make_directory(directory)
            with naming(directory / ABOUT):
                replace_file(directory / ABOUT, json.dumps(asdict(info), indent=2) + "\n", OWN_MODE)

    def begin(self, data: StepData) -> None:
        if self.left > 0:
            self.recorder.start_recording(data.batches)

    def end(self, first_sample: int, data: StepData) -> None:
        if self.left <= 0:
            return
        self.left -= 1
        recorded = self.recorder.take_recorded(data.batches)
        if self.groups["tp"].index or self.groups["pp"].index:
            return
        folder = self.directory / f"step_{step_at(first_sample, self.info.global_batch):08d}"
        found = samples_of(data, recorded)
        # Rank 0 always writes, so that a step without its first part is known to be incomplete.
        if not found and self.groups.rank:
            return
        make_directory(folder)
        path = folder / f"part_{self.groups.rank:05d}.safetensors"
        with naming(path):
            replace_file(path, save(found), OWN_MODE)


def samples_of(data: StepData, recorded: Sequence[Tensor]) -> dict[str, Tensor]:
    """Experts by sample, of the microbatches whose first rank this is."""
    found = {}
    for batch, members, sizes, experts_TMK in zip(data.batches, data.members, data.sizes, recorded, strict=True):
        if batch.context_index:
            continue
        for member, experts in zip(members, experts_TMK.split(list(sizes)), strict=True):
            found[f"sample_{member:08d}"] = experts.to("cpu", torch.int16).contiguous()
    return found


class RoutingTrace:
    """A trace to read. ``directory`` may be of unknown origin: headers are checked, and so is every number."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not (directory / ABOUT).is_file():
            fix = "give the `routing` directory of a run that was trained with --trace-routing"
            raise ConfigError(Problem(str(directory), f"has no {ABOUT}", fix))
        self.info = _read_info(directory / ABOUT)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        found = (_STEP.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return tuple(sorted(int(match[1]) for match in found if match is not None))

    def require(self, wanted: TraceInfo, path: str = "train.routing_trace.replay") -> None:
        """Raise unless this is of the same model, data and batch."""
        names = ("layers", "num_experts", "top_k", "global_batch", "data")
        differ = [name for name in names if getattr(self.info, name) != getattr(wanted, name)]
        if differ:
            said = ", ".join(f"{name} {_short(self.info, name)} there, {_short(wanted, name)} here" for name in differ)
            fix = "take the model, the data and data.global_batch that it was recorded with, or another directory"
            raise ConfigError(Problem(path, f"{self.directory}: {said}", fix))

    def samples(self, step: int) -> dict[int, npt.NDArray[np.int16]]:
        """[tokens, layers, K] of every sample of a step, by its number in the step."""
        return {number: self._read(path, name) for number, (path, name) in self._places(step).items()}

    def fill(self, read: LocalStep, first_sample: int) -> LocalStep:
        """The same step with the recorded experts, if the trace has it."""
        if (step := step_at(first_sample, self.info.global_batch)) not in self.steps:
            return read
        data, places = read.data, self._places(step)
        batches = [
            self._filled(step, batch, members, sizes, places)
            for batch, members, sizes in zip(data.batches, data.members, data.sizes, strict=True)
        ]
        return read._replace(data=data._replace(batches=batches))

    def _filled(
        self,
        step: int,
        batch: Batch,
        members: Sequence[int],
        sizes: Sequence[int],
        places: Mapping[int, tuple[Path, str]],
    ) -> Batch:
        parts = [np.zeros((0, len(self.info.layers), self.info.top_k), np.int16)]
        for member, size in zip(members, sizes, strict=True):
            if member not in places:
                raise TrainingError(f"{self.directory}: step {step} has no sample {member}; the trace is incomplete")
            parts.append(self._read(*places[member]))
            if len(parts[-1]) != size:
                what = f"sample {member} of step {step} has {len(parts[-1])} tokens in the trace and {size} in the data"
                raise TrainingError(f"{self.directory}: {what}")
        return replace(batch, experts_TMK=torch.from_numpy(np.concatenate(parts).astype(np.int64)))

    def _places(self, step: int) -> dict[int, tuple[Path, str]]:
        """The file and the name of every sample of a step."""
        found = {}
        for path in sorted((self.directory / f"step_{step:08d}").glob("part_*.safetensors")):
            with closing(SafetensorsFile(path)) as file:
                for name in file.entries:
                    if (match := _SAMPLE.fullmatch(name)) is not None:
                        found[int(match[1])] = path, name
        return found

    def _read(self, path: Path, name: str) -> npt.NDArray[np.int16]:
        info = self.info
        with closing(SafetensorsFile(path)) as file:
            entry = file.entries[name]
            if entry.dtype != "I16" or len(entry.shape) != 3 or entry.shape[1:] != (len(info.layers), info.top_k):
                what = (
                    f"{name} is {entry.dtype} {list(entry.shape)}, not I16 [tokens, {len(info.layers)}, {info.top_k}]"
                )
                raise MoefoldError(f"{path}: {what}")
            found = np.frombuffer(b"".join(file.raw(name)), np.dtype("<i2")).reshape(entry.shape)
        if found.size and not -1 <= found.min() <= found.max() < info.num_experts:
            raise MoefoldError(f"{path}: {name} names experts beyond 0 to {info.num_experts - 1}")
        return found


def recorded_steps(directory: Path) -> int:
    """How many steps a trace has; 0 where there is none."""
    return len(RoutingTrace(directory).steps) if (directory / ABOUT).is_file() else 0


def _short(info: TraceInfo, name: str) -> str:
    value = getattr(info, name)
    if name == "layers":
        return f"{len(value)} ({value[0]}, ...)" if value else "none"
    return value[:12] if isinstance(value, str) else str(value)


def _read_info(path: Path) -> TraceInfo:
    found, wrong = read_object(path), list[Problem]()
    kinds = {"run": str, "data": str, "layers": list, "num_experts": int, "top_k": int, "format": str}
    kinds |= {"global_batch": int, "micro_batch": int}
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            wrong.append(Problem(f"{path}: {name}", f"is not of type {kind.__name__}"))
    if wrong:
        raise ConfigError(*wrong)
    if found["format"] != FORMAT:
        raise ConfigError(Problem(f"{path}: format", f"is {str(found['format'])[:40]!r}, and {FORMAT} can be read"))
    layers = found["layers"]
    assert isinstance(layers, list)
    words = {name: found[name] for name in kinds if name != "layers"}
    return TraceInfo(layers=tuple(map(str, layers)), **words)  # type: ignore[arg-type]
