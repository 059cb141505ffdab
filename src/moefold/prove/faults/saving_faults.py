"""Faults of what saves memory or updates whole matrices: retained steps, narrow states, Muon and QK-clip.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

import torch
from torch import Tensor

import moefold.blueprint.muon_matrices
import moefold.nn.step_retention
import moefold.optim.chunked_adamw
import moefold.parallel.logit_maxima
import moefold.pipeline.step
from moefold.blueprint.model_shape import Attention
from moefold.nn.host_pool import HostBuffer
from moefold.nn.offload import Offload, OffloadGroup, Slot
from moefold.nn.step_retention import StepRetention, get
from moefold.optim.muon_exchange import BucketPlan
from moefold.optim.newton_schulz import orthogonalise
from moefold.prove.faults.parallel_faults import put, wrap

# ---- retained steps ----


def stale_reload() -> None:
    """A host buffer that was used before still has what it had then."""
    written: list[HostBuffer] = []

    def make(copy_out: Callable[..., None]) -> Callable[..., None]:
        def first_time_only(self: Offload, slot: Slot, here: Tensor, host: HostBuffer) -> None:
            if not any(host is other for other in written):
                written.append(host)
                copy_out(self, slot, here, host)

        return first_time_only

    wrap(Offload, "_copy_out", make)


def reload_from_the_wrong_slot() -> None:
    """The first two slots of a group that have as many entries exchange their host buffers."""

    def make(ask_for: Callable[..., None]) -> Callable[..., None]:
        def ask_for_swapped(self: Offload, group: OffloadGroup) -> None:
            seen: dict[int, Slot] = {}
            for slot in group.slots() if not group.is_asked_for else ():
                other = seen.setdefault(slot.size, slot) if slot.host is not None else slot
                slot.host, other.host = other.host, slot.host
            ask_for(self, group)

        return ask_for_swapped

    wrap(Offload, "_ask_for", make)


def recomputed_from_another_microbatch() -> None:
    """The inputs of the first time that a step of this name and these sizes was recomputed."""
    first: dict[tuple[object, ...], list[Tensor]] = {}
    recipe = moefold.nn.step_retention._Recipe

    def make(run: Callable[..., None]) -> Callable[..., None]:
        def run_on_old_inputs(self: moefold.nn.step_retention._Recipe) -> None:
            inputs = [get(stored).detach() for stored in self.inputs]
            key = (self.name, *(tensor.shape for tensor in inputs))
            self.inputs = [*first.setdefault(key, [tensor.clone() for tensor in inputs])]
            run(self)

        return run_on_old_inputs

    wrap(recipe, "run", make)


def clone_of_a_discarded_step() -> None:
    """Its output has the right values, and a second graph beside the first."""

    def make(step: Callable[..., Tensor | tuple[Tensor, ...]]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        def step_twice(
            self: StepRetention, name: str, make: Callable[..., Tensor], *inputs: Tensor
        ) -> Tensor | tuple[Tensor, ...]:
            output = step(self, name, make, *inputs)
            if self.choices.get(name) != "discard" or not isinstance(output, Tensor):  # type: ignore[call-overload]
                return output
            again = make(*inputs)
            return output + (again - again.detach())

        return step_twice

    wrap(StepRetention, "step", make)


# ---- formats ----


def remainder_dropped() -> None:
    def make(split_into: Callable[..., None]) -> Callable[..., None]:
        def split_and_drop(main: Tensor, weight: Tensor, remainder: Tensor) -> None:
            split_into(main, weight, remainder)
            remainder.zero_()

        return split_and_drop

    wrap(moefold.optim.chunked_adamw, "split_into", make)


def weight_without_its_remainder() -> None:
    """The update starts from the bfloat16 weight."""
    put(moefold.optim.chunked_adamw, "join", lambda weight, remainder: weight.float())


# ---- Muon and QK-clip ----


def muon_on_a_shard() -> None:
    def orthogonalise_shards(
        self: BucketPlan, boxes: Mapping[str, Sequence[Tensor]], matrices: Sequence[Tensor], nothing: Tensor
    ) -> None:
        for matrix in matrices:
            matrix.zero_()
        for box in (box for parts in boxes.values() for box in parts if box.numel()):
            rows, columns = box.shape[-2:]
            answer_BMN = orthogonalise(box.reshape(-1, rows, columns), 5) * (0.2 * sqrt(max(rows, columns)))
            box.copy_(answer_BMN.view(box.shape))

    put(BucketPlan, "gather", orthogonalise_shards)
    put(BucketPlan, "scatter", lambda self, boxes, matrices, nothing: None)


def heads_orthogonalised_together() -> None:
    put(moefold.blueprint.muon_matrices, "MATRIX_VIEWS", ())


def answers_of_muon_not_sent_back() -> None:
    """Holders other than the owner apply their momentum as it is."""

    def make(exchange: Callable[..., None]) -> Callable[..., None]:
        def scatter(
            self: BucketPlan, boxes: Mapping[str, Sequence[Tensor]], matrices: Sequence[Tensor], nothing: Tensor
        ) -> None:
            travels, self.travels = self.travels, False
            exchange(self, boxes, matrices, nothing)
            self.travels = travels

        return scatter

    wrap(BucketPlan, "scatter", make)


def logits_of_this_rank_only() -> None:
    put(moefold.parallel.logit_maxima, "all_reduce_max", lambda maxima, group: maxima)


def keys_clipped_by_one_of_their_heads() -> None:
    """By the first of the query heads that share a key, and not by the one with the largest logit."""

    def gammas_of_the_first(max_LH: Tensor, bound: float, attention: Attention) -> Tensor:
        first_LJ = max_LH.unflatten(1, (attention.kv_heads, -1))[..., 0]
        return torch.where(first_LJ > bound, bound / first_LJ, 1.0)

    put(moefold.pipeline.step, "gammas", gammas_of_the_first)
