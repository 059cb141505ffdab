"""Traces one step of a rank's local model: memory over time, what every forward saves, and all collectives.

The step is that of training. It can be traced with real tensors and with fake ones, which is how the fake ones are
tested. A tensor that outlives the action that made it counts as an activation of that action's microbatch and stage; an
argument of a collective that does not outlive it counts as a communication buffer.

moefold's own collectives are recorded in the ledger. FSDP all-gathers parameters and reduce-scatters gradients itself:
a collective that is dispatched and is not in the ledger is one of these.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moefold.comm.process_groups import Groups, Ledger, Traffic
from moefold.dryrun.storage_tracker import HOST, Peak, StorageTracker, peak_of
from moefold.nn.batch import Ahead, Batch, TokenSets
from moefold.optim.trained_pieces import SavingOptimizer, local_of
from moefold.parallel.flat_sharding import FlatSharding
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import DATA_GROUPS
from moefold.pipeline.pipeline_state import Key, PipelineState, hidden_tensors
from moefold.pipeline.runtime import OnAction
from moefold.pipeline.step import run_step
from moefold.schedule.actions import TRANSFERS, Action, Kind

_NAMES = {
    Kind.FORWARD: "forward of microbatch {microbatch} on stage {stage}",
    Kind.BACKWARD: "backward of microbatch {microbatch} on stage {stage}",
    Kind.BACKWARD_INPUT: "input gradient of microbatch {microbatch} on stage {stage}",
    Kind.BACKWARD_WEIGHT: "weight gradients of microbatch {microbatch} on stage {stage}",
    Kind.SEND_F: "sending microbatch {microbatch} on from stage {stage}",
    Kind.SEND_B: "sending the gradient of microbatch {microbatch} back from stage {stage}",
    Kind.RECV_F: "receiving microbatch {microbatch} for stage {stage}",
    Kind.RECV_B: "receiving the gradient of microbatch {microbatch} for stage {stage}",
}


@dataclass(frozen=True)
class StepTrace:
    """What the trace of a step found."""

    peak: Peak
    # Bytes that a forward saved for its backward, and those alive at the peak, by (stage, microbatch).
    saved: dict[Key, int]
    held_at_peak: dict[Key, int]
    # Collectives of each action in turn, and of the whole step.
    by_action: list[tuple[Action, TrafficTable]]
    traffic: TrafficTable
    # Of a microbatch's tokens and labels and what is cached with them; during the whole step, in "other".
    bytes_of_batch: int
    # Of optimizer states in the host's memory, which is no memory of the device.
    host_states: int


def trace_step(
    local_model: LocalModel, optimizer: Optimizer, batches: Sequence[Batch], on_action: OnAction | None = None
) -> StepTrace:
    """Run and trace one step. Optimizer states exist from the second step on, so run one before."""
    # Reference counting frees at the same moment in every run; the garbage collector does not.
    gc.collect()
    gc.disable()
    try:
        tracer = _StepTracer(local_model, optimizer, batches, on_action)
        with tracer.storages:
            run_step(local_model, optimizer, batches, tracer.on_gradients, on_action=tracer.on_action)
            tracer.storages.mark("after the update")
        return tracer.result()
    finally:
        gc.enable()


class _StepTracer:
    def __init__(
        self, local_model: LocalModel, optimizer: Optimizer, batches: Sequence[Batch], on_action: OnAction | None
    ) -> None:
        self._on_action, self.batches = on_action, batches
        self.local_model, self.collectives = local_model, CollectiveTrace(local_model.groups)
        self.storages = StorageTracker(self.collectives.on_collective)
        self.owner: dict[int, Key] = {}
        self.saved: dict[Key, list[tuple[int, int]]] = {}
        self.by_action: list[tuple[Action, TrafficTable]] = []
        self._before: TrafficTable = {}
        self.host_states = 0
        self._since = self._add_existing(optimizer, batches)
        for module in local_model.model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._add_unsharded)
        optimizer.register_step_pre_hook(lambda *_: self.storages.mark("norm and clipping"))
        optimizer.register_step_post_hook(lambda *_: self.storages.mark("optimizer"))

    def on_action(self, state: PipelineState, action: Action) -> None:
        """Called after every action."""
        if not self.by_action:
            self._add_unsharded(self.local_model.model)
        if action.kind not in TRANSFERS:
            self._tag_host()
            self._tag_weight_copies()
            self._tag_gradients()
            for part in action.parts:
                if part.kind is Kind.FORWARD:
                    self._tag_batch(state.batches[part.microbatch])
                    self._claim_input(state, part)
            self._claim((action.stage, action.microbatch), action.parts[0].kind is Kind.FORWARD)
        traffic = self.collectives.traffic()
        self.by_action.append((action, self._of_action(gained(traffic, self._before))))
        self._before, self._since = traffic, self.storages.num_seen
        self.storages.mark(" overlapped with ".join(_described(part) for part in action.parts))
        if self._on_action is not None:
            self._on_action(state, action)

    def _of_action(self, traffic: TrafficTable) -> TrafficTable:
        """Flat sharding sums a stage's gradients after its last backward, once per step: not what the action sends."""
        if not isinstance(self.local_model.sharding, FlatSharding):
            return traffic
        per_step = [name for pair in DATA_GROUPS.values() for name in pair]
        return {
            key: sent
            for key, sent in traffic.items()
            if key[1].removesuffix("_across").removesuffix("_inside") not in per_step
        }

    def on_gradients(self, gradients: dict[str, Tensor]) -> None:
        for gradient in gradients.values():
            self.storages.add(gradient, "gradients")
        self.storages.mark("reduction of gradients")

    def result(self) -> StepTrace:
        category = dict(self.storages.category)
        for number, source in self.storages.cast_of.items():
            if category.get(source) in ("parameters", "gathered parameters"):
                category[number] = "weight copies"
        for number in self.storages.communicated:
            category.setdefault(number, "communication")
        peak = peak_of(self.storages.events, category, self.storages.marks)
        saved = {
            key: sum(size for number, size in kept if category[number] == "activations")
            for key, kept in self.saved.items()
        }
        held: dict[Key, int] = {}
        for number, size in peak.alive.items():
            if category.get(number) == "activations" and number in self.owner:
                held[self.owner[number]] = held.get(self.owner[number], 0) + size
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors_of_batch(self.batches[-1])}
        size = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
        return StepTrace(peak, saved, held, self.by_action, self.collectives.traffic(), size, self.host_states)

    def _add_existing(self, optimizer: Optimizer, batches: Sequence[Batch]) -> int:
        """Storages that exist before the step. Gradients of the step before do not: a step starts by dropping them.
        Flat sharding's do, in buffers that stay."""
        optimizer.zero_grad()
        for parameter in self.local_model.model.parameters():
            self.storages.add(parameter, "parameters")
        for piece in self.local_model.pieces():
            # Main weights beside the model's parameters, where sharding has them.
            self.storages.category.setdefault(self.storages.add(piece.parameter), "optimizer state")
        self._tag_gradients()
        for updated, state in optimizer.state.items():
            tensors = [value for value in state.values() if isinstance(value, Tensor)]
            if isinstance(optimizer, SavingOptimizer) and optimizer.on_host(updated):
                self.host_states += sum(local_of(value).nbytes for value in tensors)
                continue
            for value in tensors:
                self.storages.add(value, "optimizer state")
        for buffer in self.local_model.model.buffers():
            self.storages.add(buffer, "other")
        for batch in batches:
            self._tag_batch(batch)
        self._tag_host()
        self._tag_pages()
        return self.storages.num_seen

    def _tag_host(self) -> None:
        retention = self.local_model.retention
        for buffer in () if retention is None else retention.offload.pool.buffers():
            self.storages.add(buffer, HOST)

    def _tag_pages(self) -> None:
        """Pools hold activations of any microbatch, and stay."""
        retention = self.local_model.retention
        stash = None if retention is None else retention.stash
        for pool in () if stash is None else stash.pools.values():
            self.storages.add(pool.rows_NX, "activations")
            self.storages.add(pool.spilled_NX, HOST)

    def _tag_weight_copies(self) -> None:
        """Codes and scales are made by a forward or a backward, and stay until weights change."""
        weights = self.local_model.narrow_weights
        for copy in () if weights is None else weights.copies():
            self.storages.add(copy, "weight copies")

    def _tag_batch(self, batch: Batch) -> None:
        for tensor in tensors_of_batch(batch):
            self.storages.add(tensor, "other")

    def _add_unsharded(self, module: Any, *_: Any) -> None:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                number = self.storages.add(parameter)
                self.storages.category.setdefault(number, "gathered parameters")

    def _tag_gradients(self) -> None:
        for parameter in self.local_model.model.parameters():
            if parameter.grad is not None:
                self.storages.add(parameter.grad, "gradients")

    def _claim_input(self, state: PipelineState, forward: Action) -> None:
        """A stage's input is kept until its backward."""
        key = (forward.stage, forward.microbatch)
        inputs = state.inputs.get(key)
        for tensor in () if inputs is None else hidden_tensors(inputs):
            number = self.storages.add(tensor)
            if number not in self.storages.category:
                self.storages.category[number] = "activations"
                self.owner[number] = key
                self.saved.setdefault(key, []).append((number, self.storages.size_of(tensor)))

    def _claim(self, key: Key, is_forward: bool) -> None:
        for number, size in self.storages.alive_since(self._since):
            if number not in self.storages.category:
                self.storages.category[number] = "activations"
                self.owner[number] = key
                if is_forward:
                    self.saved.setdefault(key, []).append((number, size))


def tensors_of_batch(batch: Batch) -> list[Tensor]:
    """Its fields, and tensors that it has cached."""
    return list(_inside(vars(batch)))


def _inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _inside(part)
    elif isinstance(value, (Ahead, TokenSets)):
        yield from _inside(vars(value))


def _described(action: Action) -> str:
    return _NAMES[action.kind].format(microbatch=action.microbatch, stage=action.stage)


# ---- collectives ----

# torch's operations that FSDP uses -> their names in the ledger.
_OPERATIONS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "allreduce_": "all_reduce",
}

# By (name, group).
TrafficTable = dict[tuple[str, str], Traffic]


class Collective(NamedTuple):
    """One operation over one group: number of calls, and bytes that this rank passed to it in all."""

    name: str
    group: str
    count: int  # type: ignore[assignment]
    bytes: int


class CollectiveTrace:
    def __init__(self, groups: Groups) -> None:
        self.groups, self.ledger, self.fsdp = groups, groups["world"].ledger, Ledger()
        self._matched = Counter(self._ledger_calls())
        self._first = dict(self.ledger.traffic)

    def on_collective(self, operation: str, args: tuple[Any, ...]) -> None:
        """Called for every collective that is dispatched."""
        name = _OPERATIONS.get(operation)
        if name is None:
            return
        if self._ledger_calls()[name] > self._matched[name]:
            self._matched[name] += 1
            return
        sent, group = (args[0][0], args[1]) if name == "all_reduce" else (args[1], args[2])
        assert isinstance(sent, Tensor)
        self.fsdp.record(name, self._name(group), sent)

    def traffic(self) -> TrafficTable:
        """All collectives since this trace was made."""
        recorded = {key: subtract(now, self._first.get(key, Traffic())) for key, now in self.ledger.traffic.items()}
        fsdp = self.fsdp.traffic
        found = {key: add(recorded.get(key, Traffic()), fsdp.get(key, Traffic())) for key in {**recorded, **fsdp}}
        return {key: traffic for key, traffic in found.items() if traffic.calls}

    def _ledger_calls(self) -> Counter[str]:
        calls: Counter[str] = Counter()
        for (name, _), traffic in self.ledger.traffic.items():
            calls[name] += traffic.calls
        return calls

    def _name(self, boxed: Any) -> str:
        """The group's name in `DATA_GROUPS`; that of dense parameters, where experts have the same ranks."""
        handle = dist.ProcessGroup.unbox(boxed)
        for name in (name for pair in DATA_GROUPS.values() for name in pair[::-1]):
            known = self.groups[name].handle
            if known is not None and known.group_name == handle.group_name:
                return name
        return "other"


def add(a: Traffic, b: Traffic, times: int = 1) -> Traffic:
    return Traffic(a.calls + times * b.calls, a.bytes_sent + times * b.bytes_sent)


def subtract(a: Traffic, b: Traffic) -> Traffic:
    return add(a, b, -1)


def gained(now: TrafficTable, before: TrafficTable) -> TrafficTable:
    found = {key: subtract(traffic, before.get(key, Traffic())) for key, traffic in now.items()}
    return {key: traffic for key, traffic in found.items() if traffic.calls}


def collectives(table: TrafficTable) -> tuple[Collective, ...]:
    return tuple(Collective(name, group, *table[name, group]) for name, group in sorted(table))
