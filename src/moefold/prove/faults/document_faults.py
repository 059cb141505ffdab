"""Faults of documents: their boundaries, padding, MTP labels, and context parallelism.

As in `parallel_faults.py`, a fault replaces a name where it is used, on the ranks only, and the ranks finish the step.
Positions that continue from one document into the next are no fault: RoPE depends on differences of positions inside a
document only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moefold.attention.varlen_sdpa
import moefold.moe.load_balancing
import moefold.moe.router
import moefold.nn.batch
import moefold.parallel.ring_attention
import moefold.pipeline.step
from moefold.attention.gated_delta_net import GatedDeltaNet, WholeDocuments
from moefold.attention.varlen_sdpa import SdpaAttention
from moefold.comm.collectives import all_gather_no_grad, all_reduce_no_grad
from moefold.comm.process_groups import Groups
from moefold.config.moe import MoEConfig
from moefold.nn.batch import Batch
from moefold.parallel.tensor_parallel import TokenShards
from moefold.parallel.ulysses import HeadAllToAll
from moefold.pipeline.pipeline_state import StepSums
from moefold.prove import compare_rank, proof_inputs
from moefold.prove.cases import Case
from moefold.prove.faults.parallel_faults import put, wrap
from moefold.prove.proof_inputs import StepLabels, rank_batch

# ---- linear attention ----


def _change_rule(change: Callable[[Tensor, tuple[int, ...], int], tuple[Tensor, tuple[int, ...]]]) -> None:
    """``change`` gets the log decays, the lengths of documents and the chunk size."""

    def make(rule: Callable[..., Tensor]) -> staticmethod[..., Tensor]:
        def changed(
            q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, lengths: tuple[int, ...], chunk: int
        ) -> Tensor:
            decay, lengths = change(decay, lengths, chunk)
            return rule(q, k, v, decay, beta, lengths, chunk)

        return staticmethod(changed)

    wrap(WholeDocuments, "rule", make)


def delta_state_not_passed_to_the_next_chunk() -> None:
    def pieces(length: int, chunk: int) -> list[int]:
        return [min(chunk, length - start) for start in range(0, length, chunk)]

    _change_rule(
        lambda decay, lengths, chunk: (decay, tuple(part for length in lengths for part in pieces(length, chunk)))
    )


def delta_state_passed_to_the_next_document() -> None:
    _change_rule(lambda decay, lengths, chunk: (decay, (sum(lengths),)))


def decay_forgotten_on_one_rank() -> None:
    _change_rule(lambda decay, lengths, chunk: (decay * (torch.distributed.get_rank() != 1), lengths))


def convolution_reaches_into_the_document_before() -> None:
    def make(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, x, taps, positions, lengths: convolve(
            self, x, taps, torch.arange(len(x), device=x.device), lengths
        )

    wrap(WholeDocuments, "convolve", make)


def convolution_of_the_first_rank_s_heads() -> None:
    def make(own_taps: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def first(self: GatedDeltaNet, conv_XY: Tensor) -> Tensor:
            keys = self.config.num_key_heads * self.config.key_dim
            parts = conv_XY.split((keys, keys, len(conv_XY) - 2 * keys))
            return torch.cat([part[: self.tokens.head_rows(len(part)).stop // (1 + _tp_index(self))] for part in parts])

        return first

    def _tp_index(net: GatedDeltaNet) -> int:
        rows = net.tokens.head_rows(len(net.conv))
        return rows.start // (rows.stop - rows.start)

    wrap(GatedDeltaNet, "_own_taps", make)


# ---- ring and Ulysses ----


def keys_of_the_neighbour_before() -> None:
    """From the second step on, the ring attends to the keys of the step before."""

    def make(passing: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def late(*given: Any) -> Iterator[Any]:
            before: tuple[Tensor, Tensor] | None = None
            for heads, step, k_now, v_now in passing(*given):
                stale = before if step.distance > 1 else None
                before = (k_now, v_now) if step.distance > 0 else None
                if stale is not None:
                    k_now, v_now = (_overlay(*pair) for pair in zip((k_now, v_now), stale, strict=True))
                yield heads, step, k_now, v_now

        return late

    wrap(moefold.parallel.ring_attention, "_kv_around_ring", make)


def _overlay(now: Tensor, before: Tensor) -> Tensor:
    """``now`` with as many of its first rows as possible replaced by those of ``before``."""
    return torch.cat((before, now[len(before) :]))[: len(now)]


def parts_merged_without_rescaling() -> None:
    def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        out.add_(more)
        lse.copy_(torch.logaddexp(lse, more_lse))

    put(moefold.attention.varlen_sdpa, "merge_", merge)


def key_gradients_not_returned() -> None:
    def add(self: Any) -> None:
        self.shift.wait()
        for own in self.kv_grads if self.complete else ():
            own.write()

    put(moefold.parallel.ring_attention._GradReturn, "add", add)


def heads_come_back_in_another_order() -> None:
    def make(heads_to_tokens: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, seen: heads_to_tokens(self, seen).roll(self.num_heads // self.group.size, 1)

    wrap(HeadAllToAll, "heads_to_tokens", make)


# ---- positions ----


def documents_see_each_other() -> None:
    def make(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, q, k, v, lengths, *rest: attend(self, q, k, v, (sum(lengths),), *rest)

    wrap(SdpaAttention, "attend", make)


def positions_count_what_a_rank_holds() -> None:
    def make(context_shard: Callable[..., Batch]) -> Callable[..., Batch]:
        def counted(batch: Batch, index: int) -> Batch:
            shard = context_shard(batch, index)
            return replace(shard, positions_S=torch.arange(shard.num_tokens))

        return counted

    wrap(proof_inputs, "context_shard", make)


def gathered_tokens_in_the_order_of_ranks() -> None:
    def all_gather(self: TokenShards, x_t: Tensor, batch: Batch) -> Tensor:
        held_T = all_gather_no_grad(x_t, self._sizes(batch.num_tokens), self.tp)
        return all_gather_no_grad(held_T, batch.held_sizes, self.contexts[batch.context_size])

    put(TokenShards, "all_gather", all_gather)


# ---- MTP labels ----


def _mtp_targets(change: Callable[[tuple[int, ...], int], tuple[tuple[int, ...], int]]) -> None:
    def make(targets: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tokens_N, labels_N, lengths, by: targets(tokens_N, labels_N, *change(lengths, by))

    wrap(moefold.nn.batch, "mtp_targets", make)


def mtp_labels_shifted_once_too_often() -> None:
    _mtp_targets(lambda lengths, by: (lengths, by + 1))


def mtp_labels_of_the_next_document() -> None:
    _mtp_targets(lambda lengths, by: ((sum(lengths),), by))


# ---- counts ----


def loss_divided_by_padded_tokens() -> None:
    def tokens_of_rank(case: Case, rank: int) -> StepLabels:
        no_counts = (1,) * (1 + case.run.model.num_mtp)
        tokens = sum(rank_batch(case, wave, rank, no_counts).num_tokens for wave in range(case.num_waves))
        return (tokens,) * len(no_counts)

    put(compare_rank, "labels_of_rank", tokens_of_rank)


def padding_in_the_balance_losses() -> None:
    put(moefold.moe.load_balancing, "_without_padding", lambda x_tE, real_t: x_tE)


def padding_sent_to_experts() -> None:
    put(moefold.moe.router, "keep_real", lambda expert_tK, kept_tK, real_t: kept_tK)


def sequence_balance_over_the_microbatch() -> None:
    put(Batch, "documents", property(lambda self: self.microbatches))


def loss_of_one_context_rank_only() -> None:
    def make(over_ranks: Callable[..., StepSums]) -> Callable[..., StepSums]:
        def of_first(sums: StepSums, groups: Groups) -> StepSums:
            weight = float(groups["cp"].index == 0)
            return over_ranks(sums._replace(loss=sums.loss * weight, mtp_loss=sums.mtp_loss * weight), groups)

        return of_first

    wrap(moefold.pipeline.step, "over_ranks", make)


def labels_not_counted_over_context_ranks() -> None:
    def count(mine: int, groups: Groups) -> int:
        return int(all_reduce_no_grad(torch.tensor(mine), groups["dp"]))

    put(compare_rank, "count_step_labels", count)


def shared_tokens_counted_once_per_rank() -> None:
    """Each context rank of a microbatch adds all its tokens to those of the step."""

    def make(whole_batch: Callable[..., Batch]) -> Callable[..., Batch]:
        def counted(*given: Any, **named: Any) -> Batch:
            batch = whole_batch(*given, **named)
            return replace(batch, step_tokens=batch.step_tokens * batch.context_size)

        return counted

    wrap(proof_inputs, "whole_batch", make)


def _number_of_sequences(change: Callable[[Batch], int]) -> None:
    def make(whole_batch: Callable[..., Batch]) -> Callable[..., Batch]:
        def counted(*given: Any, **named: Any) -> Batch:
            batch = whole_batch(*given, **named)
            return replace(batch, step_sequences=change(batch))

        return counted

    wrap(proof_inputs, "whole_batch", make)


def sequences_of_this_microbatch_only() -> None:
    _number_of_sequences(lambda batch: max(1, len(batch.lengths)))


def shared_sequences_counted_once_per_rank() -> None:
    _number_of_sequences(lambda batch: (batch.step_sequences or 0) * batch.context_size)


def sequences_weighted_by_their_tokens() -> None:
    """Every token counts the same, as in the loss over a microbatch."""

    def make(losses: Callable[..., Any]) -> Callable[..., Any]:
        def by_tokens(config: MoEConfig, *rest: Any) -> Any:
            return losses(replace(config, balance=replace(config.balance, sequence_mean="tokens")), *rest)

        return by_tokens

    wrap(moefold.moe.router, "balance_losses", make)


def balance_over_one_context_shard() -> None:
    def make(add: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, counts, reach, batch: (
            all_reduce_no_grad(counts, self.tp) if reach == "microbatch" else add(self, counts, reach, batch)
        )

    wrap(TokenShards, "sum_counts", make)


def balance_over_the_largest_context_group() -> None:
    def make(add: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda self, counts, reach, batch: add(
            self, counts, reach, replace(batch, context_size=max(self.contexts))
        )

    wrap(TokenShards, "sum_counts", make)
