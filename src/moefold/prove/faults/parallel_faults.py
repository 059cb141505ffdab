"""Faults that parallel training can have, each as a few lines that break one thing on the ranks.

A fault replaces a name where it is used. It runs in a forked rank that ends with the proof, so nothing is undone. The
ranks must finish the step with it: a fault that stops them shows nothing about the proof. Faults of routing and
dispatchers and of pipelines are in `exchange_faults.py`, of states in `state_faults.py`, of documents and context
parallelism in `document_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction, signature
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import moefold.blueprint.param_groups
import moefold.model.build
import moefold.moe.dispatch.all_gather
import moefold.moe.dispatch.all_to_all
import moefold.parallel.parallelize
import moefold.parallel.param_shards
import moefold.pipeline.step
from moefold.attention.core import Rotary
from moefold.blueprint.lora_adapters import is_adapter
from moefold.blueprint.parameters import ParameterSpec
from moefold.comm.collectives import all_gather_replicated, all_gather_rows, all_reduce_partial
from moefold.comm.message_codecs import RowCodec, SumFormat
from moefold.comm.process_groups import Group
from moefold.model.decoder import Decoder
from moefold.moe.dispatch.all_gather import AllGatherDispatcher
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.dispatch.base import ExpertInput
from moefold.moe.experts import Experts
from moefold.moe.routing_policies import CapacityDrop
from moefold.nn.init import Box
from moefold.parallel.param_shards import ParamShard
from moefold.parallel.tensor_parallel import TokenShards, VocabShards
from moefold.prove import compare_rank, proof_inputs
from moefold.topology.folded_layout import FoldedLayout


def wrap(owner: object, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by ``make(attribute)``, which can be called as it was."""
    found = getattr(owner, name)
    instead = make(found)
    if isfunction(found) and callable(instead):
        parameters = list(signature(found).parameters.values())
        if not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            # Raises TypeError where it takes fewer, or wants more.
            signature(instead).bind(*(each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD))
    setattr(owner, name, instead)


def put(owner: object, name: str, instead: object) -> None:
    wrap(owner, name, lambda _: instead)


def _after_sharding(change: Callable[[FSDPModule, str], None]) -> None:
    def make(shard: Callable[..., None]) -> Callable[..., None]:
        def shard_and_change(model: torch.nn.Module, *rest: Any) -> None:
            shard(model, *rest)
            for name, module in model.named_modules():
                if isinstance(module, FSDPModule):
                    change(module, name)

        return shard_and_change

    wrap(moefold.parallel.parallelize, "shard_over_data", make)


def no_expert_sum_over_edp() -> None:
    def make(mesh: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, device, copies, shard: (
            None if shard == "expert_shard" else mesh(self, device, copies, shard)
        )

    wrap(moefold.parallel.parallelize.Groups, "device_mesh", make)


def mean_over_dp() -> None:
    _after_sharding(lambda module, name: None if "experts" in name else module.set_gradient_divide_factor(2.0))


def experts_scaled_by_edp_over_dp() -> None:
    _after_sharding(lambda module, name: module.set_gradient_divide_factor(2.0) if "experts" in name else None)


def _no_partial_sum(part_of_name: str) -> None:
    def make(axes: Callable[[ParameterSpec], tuple[str, ...]]) -> Callable[[ParameterSpec], tuple[str, ...]]:
        return lambda spec: () if part_of_name in spec.name else axes(spec)

    wrap(moefold.parallel.param_shards, "partial_axes", make)


def router_not_summed_over_tp() -> None:
    _no_partial_sum("router.weight")


def norm_not_summed_over_tp() -> None:
    _no_partial_sum("attention_norm")


def head_norm_not_summed_over_tp() -> None:
    _no_partial_sum("k_norm")


def split_bias_not_summed_over_etp() -> None:
    _no_partial_sum("down_bias")


def local_label_count() -> None:
    put(compare_rank, "count_step_labels", lambda mine, groups: mine)


def experts_in_the_wrong_order() -> None:
    """Rank i holds the experts of the ep rank opposite to it."""
    _opposite_experts(lambda spec: ".experts." in spec.name)


def _opposite_experts(chosen: Callable[[ParameterSpec], bool]) -> None:

    def make(slices: Callable[..., tuple[slice, ...]]) -> Callable[..., tuple[slice, ...]]:
        def opposite(spec: ParameterSpec, layout: FoldedLayout, rank: int) -> tuple[slice, ...]:
            held = slices(spec, layout, rank)
            if not chosen(spec):
                return held
            size, first = held[0].stop - held[0].start, spec.shape[0] - held[0].stop
            return (slice(first, first + size), *held[1:])

        return opposite

    wrap(moefold.parallel.param_shards, "local_slices", make)


# ---- adapters ----


def adapter_scale_forgotten() -> None:
    def make(attach: Callable[..., None]) -> Callable[..., None]:
        return lambda model, specs, scale: attach(model, specs, 1.0)

    wrap(moefold.model.build, "attach_adapters", make)


def adapter_a_not_summed_over_tp() -> None:
    _no_partial_sum("lora_a")


def adapter_b_not_summed_over_tp() -> None:
    _no_partial_sum("lora_b")


def adapters_of_other_experts() -> None:
    """The experts are this rank's, and their adapters those of the ep rank opposite to it."""
    _opposite_experts(lambda spec: ".experts." in spec.name and is_adapter(spec.name))


def combine_drops_a_row() -> None:
    def make(put: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda rows, *rest: put(rows * (torch.arange(len(rows)) != 1)[:, None], *rest)

    wrap(moefold.moe.dispatch.all_to_all, "reduce_tokens", make)


def _change_probs(change: Callable[[Tensor], Tensor]) -> None:
    def make(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def with_changed_probs(self: Experts, arrived: ExpertInput) -> Tensor:
            assignments = arrived.assignments._replace(probs=change(arrived.assignments.probs))
            return forward(self, arrived._replace(assignments=assignments))

        return with_changed_probs

    wrap(Experts, "forward", make)


def prob_applied_twice() -> None:
    _change_probs(Tensor.square)


def prob_not_applied() -> None:
    _change_probs(torch.ones_like)


def prob_gradient_lost() -> None:
    def make(send: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, rows, *given: send(self, rows.detach() if rows.ndim == 1 else rows, *given)

    wrap(AllToAllDispatcher, "_send", make)


def gathered_probs_gradient_not_summed() -> None:
    def gather(
        rows: Tensor,
        sizes: tuple[int, ...],
        group: Group,
        dtype: SumFormat | None = None,
        codec: RowCodec | None = None,
    ) -> Tensor:
        return (
            all_gather_replicated(rows, sizes, group)
            if rows.dtype == torch.float64 and rows.shape[1] < 4
            else all_gather_rows(rows, sizes, group, dtype, codec)
        )

    put(moefold.moe.dispatch.all_gather, "all_gather_rows", gather)


def split_experts_not_summed() -> None:
    def reduce(
        partial: Tensor, sizes: tuple[int, ...], group: Group, dtype: object = None, grad_codec: RowCodec | None = None
    ) -> Tensor:
        return partial.split(sizes)[group.index]

    put(moefold.moe.dispatch.all_to_all, "reduce_scatter_rows", reduce)


def split_bias_added_by_all() -> None:
    wrap(
        moefold.parallel.parallelize,
        "parallel_interfaces_of",
        lambda interfaces: lambda *given: replace(interfaces(*given), bias_scale=1.0),
    )


def norm_counts_copies() -> None:
    put(moefold.pipeline.step, "primary_shards", lambda gradients, param_shards: list(gradients.values()))


def norm_misses_a_shard() -> None:
    def make(primary_shards: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def first_experts_only(gradients: dict[str, Tensor], param_shards: dict[str, ParamShard]) -> list[Tensor]:
            kept = {n: g for n, g in gradients.items() if ".experts." not in n or param_shards[n].box[0].start == 0}
            return primary_shards(kept, param_shards)

        return first_experts_only

    wrap(moefold.pipeline.step, "primary_shards", make)


def norm_of_this_rank_only() -> None:
    def norm(primary_shards: list[Tensor], world: Group, device: torch.device) -> Tensor:
        return torch.stack([part.double().square().sum() for part in primary_shards]).sum().sqrt()

    put(moefold.pipeline.step, "grad_norm_of", norm)


def bias_from_local_load() -> None:
    def make(over_ranks: Callable[..., Any]) -> Callable[..., Any]:
        return lambda sums, groups: over_ranks(sums, groups)._replace(kept_ME=sums.kept_ME)

    wrap(moefold.pipeline.step, "over_ranks", make)


def balance_over_own_tokens_only() -> None:
    def make(add: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, counts, reach, batch: counts if reach == "microbatch" else add(self, counts, reach, batch)

    wrap(TokenShards, "sum_counts", make)


def balance_of_global_batch_over_one_microbatch() -> None:
    def make(add: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, counts, reach, batch: add(self, counts, "microbatch", batch)

    wrap(TokenShards, "sum_counts", make)


def earlier_microbatches_forgotten() -> None:
    wrap(Decoder, "forward", lambda forward: lambda self, batch, earlier_ME, *rest: forward(self, batch, None, *rest))


def positions_restart_in_every_shard() -> None:
    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, positions, *rest, **named: forward(self, positions % 4, *rest, **named)

    wrap(Rotary, "forward", make)


def vocabulary_offset_forgotten() -> None:
    put(VocabShards, "first_row", lambda self, num_rows: 0)


def loss_gradient_once_per_rank() -> None:
    def merge(self: VocabShards, lse_T: Tensor) -> Tensor:
        return all_gather_rows(lse_T.unsqueeze(0), (1,) * self.tp.size, self.tp).logsumexp(0)

    put(VocabShards, "merge_logsumexp", merge)


def target_gradient_once_per_rank() -> None:
    put(VocabShards, "merge_sum", lambda self, x_T: all_reduce_partial(x_T, self.tp))


def gather_forgets_other_ranks_gradients() -> None:
    put(
        TokenShards,
        "gather",
        lambda self, x_tD, batch: all_gather_replicated(x_tD, self._sizes(batch.num_tokens), self.tp),
    )


def partial_sums_averaged() -> None:
    wrap(TokenShards, "reduce", lambda reduce: lambda self, x_TD: reduce(self, x_TD) / self.tp.size)


def full_norm_over_own_heads() -> None:
    put(TokenShards, "sum_heads", lambda self, x: x * self.tp.size)


def shards_in_the_wrong_order() -> None:
    put(TokenShards, "tp_shard", lambda self, x_T: x_T.split(self._sizes(len(x_T)))[self.tp.size - 1 - self.tp.index])


def capacity_of_the_shard() -> None:
    """A capacity meant for the whole microbatch is counted over each rank's tokens."""

    def make(init: Callable[..., None]) -> Callable[..., None]:
        return lambda self, config, capacity: init(self, config, replace(capacity, scope="local"))

    wrap(CapacityDrop, "__init__", make)


def init_depends_on_the_layout() -> None:
    def make(normal: Callable[..., None]) -> Callable[..., None]:
        def local(seed: int, name: str, shape: tuple[int, ...], box: Box, std: float, into: Tensor) -> None:
            own = tuple(slice(0, size) for size in into.shape)
            normal(seed, name, tuple(into.shape), own, std, into)

        return local

    wrap(proof_inputs, "normal_part", make)


def decay_on_everything() -> None:
    put(moefold.blueprint.param_groups, "NO_DECAY_KINDS", frozenset())


def dropped_assignments_kept_by_others() -> None:
    """The all-gather dispatcher takes all assignments as kept."""

    def make(prepare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, x_tL, routing, counts: prepare(self, x_tL, routing._replace(kept=None), counts)

    wrap(moefold.moe.dispatch.all_gather.AllGatherDispatcher, "dispatch_prepare", make)


def gradients_not_clipped() -> None:
    put(moefold.pipeline.step, "clip_gradients", lambda gradients, norm, bound: None)


def samples_by_rank_number() -> None:
    def place(self: FoldedLayout, rank: int) -> int:
        return rank % self.attention.stride("pp") // self.size("tp")

    put(FoldedLayout, "context_place", place)
    # Groups stay as they are: of a size that never changes.
    put(FoldedLayout, "context_ranks", lambda self, rank, size: self.ranks("cp", rank))


def experts_by_rank_number() -> None:
    def make(coordinate: Callable[..., int]) -> Callable[..., int]:
        def usual(self: FoldedLayout, rank: int, axis: str) -> int:
            if axis == "ep":
                return rank // self.size("etp") % self.size("ep")
            return coordinate(self, rank, axis)

        return usual

    wrap(FoldedLayout, "coordinate", make)


def experts_by_place_in_the_block() -> None:
    def make(init: Callable[..., None]) -> Callable[..., None]:
        def usual(self: AllGatherDispatcher, num_experts: int, block: Group, ep: Group, *rest: object) -> None:
            init(self, num_experts, block, ep, *rest)
            self.first_expert = block.index // (block.size // ep.size) * self.num_local

        return usual

    wrap(AllGatherDispatcher, "__init__", make)
