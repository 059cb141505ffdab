"""Mutation testing of the proof: seed known faults and check that each is caught.

Every fault is tried on a case in which it matters; the same cases without a fault must hold. A fault is caught when the
ranks finish and some quantity differs: a crash would be noticed without a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moefold.prove.faults import (
    bounded_faults,
    document_faults,
    echo_faults,
    exchange_faults,
    graph_faults,
    memory_faults,
    overlap_faults,
    page_faults,
    parallel_faults,
    precision_faults,
    state_faults,
)
from moefold.prove.mutant_cases import CASES
from moefold.prove.verdict import Verdict, prove


@dataclass(frozen=True)
class Mutant:
    """One seeded fault: the function that breaks a rank, the case it is tried on, and how it happens in real code."""

    seed: Callable[[], None]
    case: str
    cause: str

    @property
    def name(self) -> str:
        return self.seed.__name__.replace("_", " ")


MUTANTS = (
    Mutant(
        parallel_faults.no_expert_sum_over_edp,
        "replicated",
        "the replicas of an expert are left out of the gradient reduction",
    ),
    Mutant(
        parallel_faults.mean_over_dp,
        "replicated",
        "a data-parallel wrapper averages where the loss was already divided",
    ),
    Mutant(
        parallel_faults.experts_scaled_by_edp_over_dp,
        "gathered",
        "expert gradients get a factor that belongs to another loss",
    ),
    Mutant(
        parallel_faults.router_not_summed_over_tp, "folded", "the router is treated as an ordinary replicated parameter"
    ),
    Mutant(parallel_faults.norm_not_summed_over_tp, "folded", "a norm before attention sees its shard's tokens only"),
    Mutant(parallel_faults.head_norm_not_summed_over_tp, "split", "a norm per head sees its rank's heads only"),
    Mutant(
        parallel_faults.split_bias_not_summed_over_etp,
        "split",
        "the bias of a split expert gets the gradient of one rank only",
    ),
    Mutant(parallel_faults.local_label_count, "folded", "the loss is divided by the labels of this rank"),
    Mutant(parallel_faults.experts_in_the_wrong_order, "folded", "ranks load each other's experts"),
    Mutant(parallel_faults.combine_drops_a_row, "folded", "combine loses one row"),
    Mutant(parallel_faults.prob_applied_twice, "folded", "in the expert, and again in combine"),
    Mutant(parallel_faults.prob_not_applied, "folded", "expert and combine leave it to each other"),
    Mutant(parallel_faults.prob_gradient_lost, "folded", "probs are sent without autograd"),
    Mutant(
        parallel_faults.gathered_probs_gradient_not_summed,
        "gathered",
        "an all_gather with the backward of a replicated one",
    ),
    Mutant(
        parallel_faults.split_experts_not_summed, "split", "each rank keeps its own partial output of a split expert"
    ),
    Mutant(parallel_faults.split_bias_added_by_all, "split", "each shard of a split expert adds the whole bias"),
    Mutant(parallel_faults.norm_counts_copies, "folded", "a replicated parameter enters the norm once per replica"),
    Mutant(parallel_faults.norm_misses_a_shard, "folded", "the experts of other ranks are missing from the norm"),
    Mutant(parallel_faults.norm_of_this_rank_only, "folded", "every rank clips by its own norm"),
    Mutant(parallel_faults.gradients_not_clipped, "folded", "clip_norm is never applied"),
    Mutant(parallel_faults.bias_from_local_load, "folded", "the loss-free bias follows this rank's tokens"),
    Mutant(
        parallel_faults.balance_over_own_tokens_only,
        "folded",
        "loads are counted over a shard, not over the microbatch",
    ),
    Mutant(
        parallel_faults.balance_of_global_batch_over_one_microbatch,
        "folded",
        "the global-batch loss sees one microbatch only",
    ),
    Mutant(parallel_faults.earlier_microbatches_forgotten, "folded", "accumulation restarts the global loss's counts"),
    Mutant(parallel_faults.positions_restart_in_every_shard, "folded", "a shard's first token gets position 0"),
    Mutant(
        parallel_faults.vocabulary_offset_forgotten,
        "folded",
        "every rank looks for labels in the first vocabulary shard",
    ),
    Mutant(
        parallel_faults.loss_gradient_once_per_rank, "folded", "the loss is replicated and its gradients are summed"
    ),
    Mutant(parallel_faults.target_gradient_once_per_rank, "folded", "the same for the label's logit"),
    Mutant(parallel_faults.gather_forgets_other_ranks_gradients, "folded", "an all_gather whose backward only slices"),
    Mutant(parallel_faults.partial_sums_averaged, "folded", "a mean where partial sums must be summed"),
    Mutant(parallel_faults.full_norm_over_own_heads, "folded", "a norm over all heads sees its rank's heads only"),
    Mutant(parallel_faults.shards_in_the_wrong_order, "folded", "a rank uses another rank's slice of per-token ids"),
    Mutant(parallel_faults.capacity_of_the_shard, "gathered", "a capacity for the microbatch is applied to each shard"),
    Mutant(
        parallel_faults.dropped_assignments_kept_by_others,
        "gathered",
        "other ranks do not learn which assignments were dropped",
    ),
    Mutant(
        parallel_faults.samples_by_rank_number, "ordered", "tp is taken to have neighbouring ranks when data is read"
    ),
    Mutant(
        parallel_faults.experts_by_rank_number, "ordered", "ep is taken to have neighbouring ranks when experts load"
    ),
    Mutant(
        parallel_faults.experts_by_place_in_the_block,
        "ordered and split",
        "etp is taken to have neighbouring ranks when assignments are renumbered",
    ),
    Mutant(
        exchange_faults.balance_counts_the_biased_topk,
        "limited",
        "balance losses count the top-k with bias and groups",
    ),
    Mutant(exchange_faults.drops_by_the_raw_score, "limited", "drops are decided before scores are normalised"),
    Mutant(
        exchange_faults.bias_counts_what_was_dropped,
        "limited",
        "the loss-free bias follows assignments before dropping",
    ),
    Mutant(
        exchange_faults.capacity_of_a_device_for_each_expert,
        "limited",
        "each expert of a device gets the device's capacity",
    ),
    Mutant(exchange_faults.a_group_scored_by_its_best_expert, "limited", "DeepSeek-V2's group score instead of V3's"),
    Mutant(parallel_faults.init_depends_on_the_layout, "folded", "each rank draws its shard by its own shape"),
    Mutant(parallel_faults.decay_on_everything, "folded", "weight decay on norms and biases"),
    Mutant(
        exchange_faults.one_assignment_per_row,
        "deduplicated",
        "a row that was sent once is computed by one expert only",
    ),
    Mutant(
        exchange_faults.gradient_of_one_copy,
        "deduplicated",
        "of a row sent to several ranks, one rank's gradient is used",
    ),
    Mutant(
        exchange_faults.probs_gradient_of_one_rank, "deduplicated", "of a token's probs, one rank's gradients are used"
    ),
    Mutant(exchange_faults.hosts_not_summed, "deduplicated", "of several hosts' outputs, the first is taken"),
    # ---- adapters ----
    Mutant(parallel_faults.adapter_scale_forgotten, "adapters", "an adapter counts once, not alpha / rank times"),
    Mutant(
        parallel_faults.adapter_a_not_summed_over_tp,
        "adapters",
        "A is whole on every rank, beside a weight whose rows are cut",
    ),
    Mutant(
        parallel_faults.adapter_b_not_summed_over_tp,
        "adapters",
        "B is whole on every rank, beside a weight whose columns are cut",
    ),
    Mutant(parallel_faults.adapters_of_other_experts, "adapters", "adapters are not cut over ep as their experts are"),
    # ---- linear attention ----
    Mutant(
        document_faults.delta_state_not_passed_to_the_next_chunk,
        "delta",
        "every chunk of a document starts with an empty state",
    ),
    Mutant(
        document_faults.delta_state_passed_to_the_next_document,
        "delta",
        "a packed microbatch is one document for the state",
    ),
    Mutant(document_faults.decay_forgotten_on_one_rank, "delta", "a rank's heads forget nothing"),
    Mutant(
        document_faults.convolution_reaches_into_the_document_before,
        "delta",
        "the convolution treats a packed microbatch as one document",
    ),
    Mutant(
        document_faults.convolution_of_the_first_rank_s_heads,
        "delta",
        "the convolution's weight is whole on every rank, and each reads its first channels",
    ),
    # ---- pipelines ----
    Mutant(
        exchange_faults.tied_weight_not_summed_over_stages,
        "interleaved",
        "each stage updates its copy of a tied weight by itself",
    ),
    Mutant(exchange_faults.tied_weight_twice_in_the_norm, "interleaved", "both stages of a tied weight enter the norm"),
    Mutant(exchange_faults.weight_gradients_of_a_microbatch_lost, "deferred", "deferred gradients are dropped"),
    Mutant(
        exchange_faults.weight_gradients_of_a_microbatch_added_twice,
        "deferred",
        "both halves of a backward add the weight's gradient",
    ),
    Mutant(
        exchange_faults.weight_gradients_of_overlapped_pairs_lost,
        "overlapped",
        "weight gradients deferred by an overlapped pair are not computed",
    ),
    Mutant(
        exchange_faults.gradient_of_the_microbatch_before,
        "interleaved",
        "a receive buffer is read before the next message is in",
    ),
    Mutant(
        exchange_faults.hidden_states_of_two_microbatches_swapped, "deferred", "a stage runs the first microbatch again"
    ),
    Mutant(
        exchange_faults.gradient_of_the_second_hidden_state_lost,
        "interleaved",
        "a stage sends back the gradient of the main hidden state only",
    ),
    Mutant(
        exchange_faults.balance_of_middle_stages_forgotten,
        "interleaved",
        "backward starts from the last stage's loss only",
    ),
    Mutant(exchange_faults.balance_of_another_layer, "interleaved", "rows of balance losses are numbered per stage"),
    Mutant(
        exchange_faults.balance_of_the_last_microbatch, "folded", "balance losses of the microbatches before are lost"
    ),
    Mutant(exchange_faults.balance_of_this_rank_only, "folded", "balance losses are not summed over ranks"),
    Mutant(
        exchange_faults.earlier_counts_of_another_layer,
        "interleaved",
        "rows of counts are indexed per stage, not per model",
    ),
    Mutant(exchange_faults.mtp_losses_summed_not_averaged, "interleaved", "the losses of two MTP modules count double"),
    # ---- documents and context parallelism ----
    Mutant(document_faults.keys_of_the_neighbour_before, "ring", "the ring attends to the keys of the step before"),
    Mutant(document_faults.parts_merged_without_rescaling, "ring", "partial attentions are merged without rescaling"),
    Mutant(document_faults.key_gradients_not_returned, "ring", "keys get gradients from their own rank's queries only"),
    Mutant(
        document_faults.heads_come_back_in_another_order, "ulysses", "the all-to-all back orders heads by another rank"
    ),
    Mutant(document_faults.documents_see_each_other, "ulysses", "attention treats a packed microbatch as one sequence"),
    Mutant(
        document_faults.positions_count_what_a_rank_holds,
        "ring",
        "a rank treats its two chunks as contiguous",
    ),
    Mutant(
        document_faults.gathered_tokens_in_the_order_of_ranks,
        "dynamic",
        "drops are decided for one token and applied to another",
    ),
    Mutant(
        document_faults.mtp_labels_shifted_once_too_often, "ring", "labels are shifted already, and shifted once more"
    ),
    Mutant(
        document_faults.mtp_labels_of_the_next_document,
        "interleaved",
        "the label past a document's end is not ignored",
    ),
    Mutant(document_faults.loss_divided_by_padded_tokens, "padded", "the loss is averaged over padding too"),
    Mutant(document_faults.padding_in_the_balance_losses, "padded", "padding tokens have probs like any token"),
    Mutant(document_faults.padding_sent_to_experts, "padded", "padding takes part in routing and in the load"),
    Mutant(
        document_faults.sequence_balance_over_the_microbatch,
        "interleaved",
        "the balance loss treats packed documents as one sequence",
    ),
    Mutant(document_faults.sequences_of_this_microbatch_only, "interleaved", "the mean is over a rank's sequences"),
    Mutant(document_faults.shared_sequences_counted_once_per_rank, "ring", "a document on several ranks is several"),
    Mutant(document_faults.sequences_weighted_by_their_tokens, "interleaved", "a mean over tokens, not sequences"),
    Mutant(document_faults.loss_of_one_context_rank_only, "ring", "the loss is summed over dp and not over cp"),
    Mutant(document_faults.labels_not_counted_over_context_ranks, "ulysses", "labels are counted over dp only"),
    Mutant(document_faults.shared_tokens_counted_once_per_rank, "ring", "every rank counts the microbatch as its own"),
    Mutant(
        document_faults.balance_over_one_context_shard,
        "ulysses",
        "loads are counted over one context shard of a document",
    ),
    Mutant(
        document_faults.balance_over_the_largest_context_group,
        "dynamic",
        "counts are summed over the largest context group in every wave",
    ),
    # ---- flat sharding ----
    Mutant(state_faults.flat_sum_lost, "flat", "each rank updates its range by its own gradient"),
    Mutant(state_faults.flat_sum_averaged, "flat", "a reduce-scatter that averages where the loss was divided already"),
    Mutant(state_faults.flat_replicas_not_summed, "flat", "hybrid sharding stops after the reduce-scatter"),
    Mutant(state_faults.flat_weights_not_gathered, "flat", "a rank computes with its own range of the weights only"),
    Mutant(
        state_faults.sum_before_the_last_gradient,
        "flat, small buckets",
        "a bucket leaves when the last of its layers has gone backward, and not the first",
    ),
    Mutant(
        state_faults.sum_of_an_earlier_backward,
        "flat, small buckets",
        "a bucket leaves with the first microbatch's gradients",
    ),
    Mutant(state_faults.late_bucket_not_summed, "flat, small buckets", "a part that is left starts no sum"),
    Mutant(state_faults.sum_between_hosts_lost, "flat, four steps", "each host updates by its own ranks' gradients"),
    Mutant(state_faults.gather_inside_hosts_lost, "flat, four steps", "weights of the host's other ranks stay old"),
    Mutant(state_faults.ranges_numbered_by_host_first, "flat, four steps", "ranges as a direct sum would leave them"),
    Mutant(state_faults.host_sum_of_the_wrong_place, "flat, four steps", "hosts add the run of another place"),
    Mutant(state_faults.bucket_boundary_off_by_one, "flat", "a rank's range starts one entry too late"),
    Mutant(state_faults.gradients_of_the_neighbour, "flat", "a rank updates its range by its neighbour's range"),
    Mutant(
        state_faults.gradient_added_twice_into_the_flat_buffer,
        "flat",
        "a GEMM has added the gradient, and autograd gets it as well",
    ),
    Mutant(
        state_faults.norm_before_the_reduce_scatter, "flat", "the norm is taken of gradients that are not yet summed"
    ),
    Mutant(state_faults.decay_on_the_wrong_piece, "flat", "rules are given to pieces by another order of parameters"),
    Mutant(state_faults.moments_of_another_piece, "flat", "states are kept by number, and numbers differ by rank"),
    Mutant(
        state_faults.sum_before_the_last_stage,
        "flat pipeline",
        "a bucket of two stages is sent after the first of them",
    ),
    # ---- retained steps, formats of states, Muon and QK-clip ----
    Mutant(state_faults.stale_reload, "retained", "a copy back does not wait for the copy out of its buffer"),
    Mutant(state_faults.reload_from_the_wrong_slot, "retained", "host buffers are found by size alone"),
    Mutant(
        state_faults.recomputed_from_another_microbatch,
        "retained",
        "a recomputed step reads a buffer that the next microbatch has overwritten",
    ),
    Mutant(
        state_faults.clone_of_a_discarded_step, "retained", "the recomputed output is a second path of the gradient"
    ),
    Mutant(state_faults.remainder_dropped, "remainder", "an update stores the bfloat16 weight alone"),
    Mutant(state_faults.weight_without_its_remainder, "remainder", "an update starts from the bfloat16 weight alone"),
    Mutant(state_faults.muon_on_a_shard, "muon", "each rank orthogonalises the part of a matrix that it holds"),
    Mutant(state_faults.heads_orthogonalised_together, "muon", "a projection is one matrix, not one per head"),
    Mutant(state_faults.answers_of_muon_not_sent_back, "muon", "only the owner's part of a matrix is orthogonalised"),
    Mutant(state_faults.logits_of_this_rank_only, "muon", "each rank clips by the largest logit of its own tokens"),
    Mutant(
        state_faults.keys_clipped_by_one_of_their_heads,
        "muon",
        "a key that several query heads share is scaled by one of them",
    ),
    # ---- recipes, clones, exchanges beside the shared expert, bounded rows, shared memory, pages, graphs ----
    *(
        Mutant(*fault)
        for module in (
            precision_faults,
            echo_faults,
            overlap_faults,
            bounded_faults,
            memory_faults,
            page_faults,
            graph_faults,
        )
        for fault in module.FAULTS
    ),
)


def caught(verdict: Verdict) -> bool:
    """Whether a named quantity differs; a crash or a timeout does not count."""
    return verdict.failure is None and any(not row.holds for row in verdict.rows)


def prove_mutants() -> Iterator[tuple[Mutant | None, Verdict]]:
    """First every case without a fault (None), then every fault."""
    for case in CASES.values():
        yield None, prove(case)
    for mutant in MUTANTS:
        yield mutant, prove(CASES[mutant.case], seconds=300.0, fault=mutant.seed)
