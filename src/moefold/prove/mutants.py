"""A proof that cannot fail is worthless: seed known faults and see each one caught.

Every fault is tried on a case in which it matters; the same cases without a fault must hold. A fault is caught when the
ranks got to the end and some quantity differs: a crash would be found by anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from moefold.config.attention import GQAConfig, RopeConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.config.parallel import ContextConfig, ParallelConfig
from moefold.config.run import RunConfig
from moefold.prove.cases import PROVING_OPTIM, Case, proving_kernels, proving_precision
from moefold.prove.faults import dispatch_faults as sabotage_dispatch
from moefold.prove.faults import document_faults as sabotage_documents
from moefold.prove.faults import parallel_faults as sabotage
from moefold.prove.faults import pipeline_faults as sabotage_pipeline
from moefold.prove.faults import routing_faults
from moefold.prove.verdict import Verdict, prove


@dataclass(frozen=True)
class Mutant:
    """One seeded fault: what it does to a rank, where it is tried, and how it comes about in real code."""

    seed: Callable[[], None]
    case: str
    story: str

    @property
    def name(self) -> str:
        return self.seed.__name__.replace("_", " ")


_BALANCE = BalanceConfig(microbatch=0.3, sequence=0.2, global_batch=0.3, device=0.1, device_groups=2, z=0.01)
_ATTENTION = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=True)
_MOE = MoEConfig(num_experts=8, top_k=2, expert_hidden_dim=8, balance=_BALANCE)
_MODEL = ModelConfig(
    vocab_size=48,
    dim=24,
    num_layers=2,
    attention=_ATTENTION,
    rope=RopeConfig(theta=100.0),
    moe=_MOE,
    num_dense_layers=1,
    dense_hidden_dim=16,
    init_std=0.2,
)
# A shard boundary falls inside a sequence.
_DATA = DataConfig(seq_len=6, global_batch=12, micro_batch=3)


def _case(name: str, parallel: ParallelConfig, model: ModelConfig, data: DataConfig = _DATA) -> Case:
    precision, kernels = proving_precision("float64"), proving_kernels("float64")
    return Case(RunConfig(name, 5, model, parallel, precision, kernels, data, PROVING_OPTIM), 4)


def _model(attention: GQAConfig = _ATTENTION, moe: MoEConfig = _MOE, **others: Any) -> ModelConfig:
    return replace(_MODEL, attention=attention, moe=moe, **others)


_ONE_STAGE = (
    _case(
        "folded",
        ParallelConfig(tp=2, ep=4),
        _model(
            replace(_ATTENTION, qk_norm="full"),
            replace(_MOE, router=RouterConfig(expert_bias=True, normalize=True), shared_hidden_dim=8),
        ),
    ),
    _case(
        "split",
        ParallelConfig(tp=2, ep=2, etp=2),
        _model(replace(_ATTENTION, qk_norm="head"), replace(_MOE, expert_mlp_bias=True)),
    ),
    _case(
        "gathered",
        ParallelConfig(tp=2, ep=2, dispatcher="all_gather"),
        _model(moe=replace(_MOE, capacity=CapacityConfig(factor=0.8))),
    ),
    # Bias, groups and a capacity per device: what is asked, what is chosen and what is kept all differ.
    _case(
        "limited",
        ParallelConfig(tp=2, ep=4),
        _model(
            moe=replace(
                _MOE,
                num_experts=16,
                top_k=4,
                router=RouterConfig(
                    score="sigmoid",
                    normalize=True,
                    num_groups=4,
                    top_groups=2,
                    group_score="topk_sum",
                    expert_bias=True,
                ),
                capacity=CapacityConfig(factor=0.8, per="device", device_groups=4),
            )
        ),
    ),
    _case("once", ParallelConfig(ep=4, dispatcher="two_level", ep_inner=2), _model(moe=replace(_MOE, top_k=3))),
    _case("copied", ParallelConfig(ep=2, dp_replicate=2, edp_replicate=2), _model()),
    _case("padded", ParallelConfig(tp=2, ep=4), _model(num_mtp=1), replace(_DATA, packing="padded")),
)
_STAGES = (
    # Both ranks of the pipeline hold the tied embedding, and streams of two modules that look ahead cross stages.
    _case(
        "interleaved",
        ParallelConfig(pp=2, vpp=2, schedule="interleaved", stages="Et|tt|tm|mL", ep=2),
        _model(num_layers=4, num_mtp=2, tied_embeddings=True),
        replace(_DATA, global_batch=18, packing="concat_masked"),
    ),
    _case("put off", ParallelConfig(pp=2, schedule="zb_h1", tp=2, ep=2), _model(num_layers=3)),
    _case(
        "overlapped",
        ParallelConfig(pp=2, schedule="1f1b_overlapped", ep=2),
        _model(num_layers=3),
        replace(_DATA, global_batch=16, micro_batch=2),
    ),
)
_CONTEXT = (
    _case(
        "ring",
        ParallelConfig(cp=4, ep=4),
        _model(replace(_ATTENTION, sinks=True), num_mtp=1),
        DataConfig(seq_len=17, global_batch=4, micro_batch=2, packing="bin_packed"),
    ),
    _case(
        "traded",
        ParallelConfig(cp=2, tp=2, ep=4, context=ContextConfig(full="all_to_all")),
        _model(),
        DataConfig(seq_len=13, global_batch=4, micro_batch=2, packing="concat_masked"),
    ),
    # Waves of two ranks per document and of one. Counts of documents that other ranks hold have other shapes, so the
    # loss per sequence is off: one fault adds up counts over too many ranks.
    _case(
        "dynamic",
        ParallelConfig(cp=2, ep=2, dynamic_cp=True),
        _model(moe=replace(_MOE, balance=replace(_BALANCE, sequence=0.0), capacity=CapacityConfig(factor=0.8))),
        DataConfig(seq_len=11, global_batch=8, micro_batch=1, packing="bin_packed"),
    ),
)
CASES = {case.run.name: case for case in (*_ONE_STAGE, *_STAGES, *_CONTEXT)}

MUTANTS = (
    Mutant(sabotage.no_expert_sum_over_edp, "copied", "the copies of an expert are left out of the gradient reduction"),
    Mutant(sabotage.mean_over_dp, "copied", "a data-parallel wrapper averages where the loss was already divided"),
    Mutant(
        sabotage.experts_scaled_by_edp_over_dp, "gathered", "expert gradients get a factor that belongs to another loss"
    ),
    Mutant(sabotage.router_not_summed_over_tp, "folded", "the router is taken for an ordinary replicated parameter"),
    Mutant(sabotage.norm_not_summed_over_tp, "folded", "a norm before attention sees its shard's tokens only"),
    Mutant(sabotage.head_norm_not_summed_over_tp, "split", "a norm per head sees its rank's heads only"),
    Mutant(sabotage.split_bias_not_summed_over_etp, "split", "the bias of a split expert learns on one rank only"),
    Mutant(sabotage.local_label_count, "folded", "the loss is divided by the labels of this rank"),
    Mutant(sabotage.experts_in_the_wrong_order, "folded", "ranks load each other's experts"),
    Mutant(sabotage.combine_drops_a_row, "folded", "the way home loses one answer"),
    Mutant(sabotage.weight_applied_twice, "folded", "in the expert, and again on the way home"),
    Mutant(sabotage.weight_not_applied, "folded", "each side leaves it to the other"),
    Mutant(sabotage.weight_gradient_lost, "folded", "weights travel outside of the gradient's sight"),
    Mutant(sabotage.gathered_weights_gradient_not_summed, "gathered", "a gather with the other gather's gradient"),
    Mutant(sabotage.split_experts_not_added, "split", "each rank keeps its own part of a split expert's answer"),
    Mutant(sabotage.split_bias_added_by_all, "split", "each part of a split expert adds the whole bias"),
    Mutant(sabotage.norm_counts_copies, "folded", "a replicated parameter enters the norm once per copy"),
    Mutant(sabotage.norm_misses_a_shard, "folded", "the experts of other ranks are missing from the norm"),
    Mutant(sabotage.norm_of_this_rank_only, "folded", "every rank clips by its own norm"),
    Mutant(sabotage.gradients_not_clipped, "folded", "the bound is never applied"),
    Mutant(sabotage.bias_from_local_load, "folded", "the loss-free bias follows this rank's tokens"),
    Mutant(sabotage.balance_over_own_tokens_only, "folded", "loads are counted over a shard, not over the microbatch"),
    Mutant(sabotage.balance_of_global_batch_over_one_microbatch, "folded", "the global loss never leaves its rank"),
    Mutant(sabotage.earlier_microbatches_forgotten, "folded", "accumulation restarts the global loss's counts"),
    Mutant(sabotage.positions_restart_in_every_shard, "folded", "a shard takes its first token for position 0"),
    Mutant(sabotage.vocabulary_offset_forgotten, "folded", "every rank looks for labels in the first vocabulary part"),
    Mutant(
        sabotage.loss_gradient_once_per_rank, "folded", "the loss is the same everywhere and its gradients are added"
    ),
    Mutant(sabotage.target_gradient_once_per_rank, "folded", "the same for the label's own score"),
    Mutant(sabotage.gather_forgets_other_ranks_gradients, "folded", "a gather whose backward only cuts"),
    Mutant(sabotage.partial_sums_averaged, "folded", "a mean where partial sums meet"),
    Mutant(sabotage.full_width_norm_over_own_heads, "folded", "a norm over all heads takes its own for all"),
    Mutant(sabotage.shards_in_the_wrong_order, "folded", "a rank reads its neighbour's labels of the tokens' sets"),
    Mutant(sabotage.capacity_of_the_shard, "gathered", "a capacity for the microbatch is applied to each shard"),
    Mutant(sabotage.dropped_choices_forgotten_by_others, "gathered", "who was dropped is not told to the other ranks"),
    Mutant(
        routing_faults.balance_counts_where_tokens_went,
        "limited",
        "the balance losses see the bias's and groups' choice",
    ),
    Mutant(routing_faults.drops_by_the_raw_score, "limited", "who is dropped is decided before scores are normalised"),
    Mutant(
        routing_faults.bias_counts_what_was_dropped,
        "limited",
        "the loss-free bias follows what was asked, not computed",
    ),
    Mutant(
        routing_faults.capacity_of_a_device_for_each_expert,
        "limited",
        "the experts of a device do not share its room",
    ),
    Mutant(routing_faults.a_group_scored_by_its_best_expert, "limited", "V2's rule for groups where V3's is meant"),
    Mutant(sabotage.start_depends_on_the_layout, "folded", "each rank seeds its own part by its own shape"),
    Mutant(sabotage.decay_on_everything, "folded", "norms and biases are pulled to zero"),
    Mutant(sabotage_dispatch.one_choice_per_row, "once", "a row that came once is answered by one expert only"),
    Mutant(sabotage_dispatch.gradient_of_one_copy, "once", "of a row that went to several ranks, one sends a gradient"),
    Mutant(sabotage_dispatch.weights_gradient_of_one_rank, "once", "of a token's weights, one rank's have a gradient"),
    Mutant(sabotage_dispatch.hosts_not_added_up, "once", "of several hosts' answers, the first is taken"),
    # ---- pipelines ----
    Mutant(
        sabotage_pipeline.tied_weight_not_summed_over_stages,
        "interleaved",
        "each stage updates its copy of a tied weight by itself",
    ),
    Mutant(
        sabotage_pipeline.tied_weight_twice_in_the_norm, "interleaved", "both holders of a tied weight enter the norm"
    ),
    Mutant(
        sabotage_pipeline.weight_gradients_of_a_microbatch_lost, "put off", "what was put off is dropped in the bubble"
    ),
    Mutant(
        sabotage_pipeline.weight_gradients_of_a_microbatch_added_twice,
        "put off",
        "both halves of a backward add the weight's gradient",
    ),
    Mutant(
        sabotage_pipeline.weight_gradients_of_overlapped_pairs_lost,
        "overlapped",
        "what is left to do after a forward beside a backward is not done",
    ),
    Mutant(
        sabotage_pipeline.gradient_of_the_microbatch_before,
        "interleaved",
        "a receive buffer is read before the next message is in",
    ),
    Mutant(sabotage_pipeline.streams_of_two_microbatches_swapped, "put off", "a stage runs the first microbatch again"),
    Mutant(
        sabotage_pipeline.gradient_of_the_second_stream_forgotten,
        "interleaved",
        "a stage hands back the gradient of the model's stream and drops the other's",
    ),
    Mutant(
        sabotage_pipeline.balance_of_middle_stages_forgotten,
        "interleaved",
        "only the last stage has a loss, so only there a backward begins",
    ),
    Mutant(
        sabotage_pipeline.earlier_counts_of_another_layer,
        "interleaved",
        "rows of counts are numbered inside a stage, not over the model",
    ),
    Mutant(
        sabotage_pipeline.losses_ahead_added_not_averaged, "interleaved", "two modules that look ahead count double"
    ),
    # ---- documents, and ranks that share them ----
    Mutant(
        sabotage_documents.keys_of_the_neighbour_before, "ring", "the ring computes with the keys of the step before"
    ),
    Mutant(
        sabotage_documents.parts_merged_without_rescaling, "ring", "each step's softmax counts as if it were the whole"
    ),
    Mutant(
        sabotage_documents.key_gradients_not_brought_home, "ring", "keys learn from the queries of their own rank only"
    ),
    Mutant(
        sabotage_documents.heads_come_back_in_another_order, "traded", "the way back is dealt from the wrong rank on"
    ),
    Mutant(
        sabotage_documents.documents_see_each_other, "traded", "attention takes a packed microbatch for one sequence"
    ),
    Mutant(
        sabotage_documents.positions_count_what_a_rank_holds,
        "ring",
        "a rank takes its two chunks for one piece of text",
    ),
    Mutant(
        sabotage_documents.gathered_tokens_in_the_order_of_ranks,
        "dynamic",
        "who is dropped is decided for a token and applied to another",
    ),
    Mutant(
        sabotage_documents.looks_one_token_too_far_ahead, "ring", "labels are shifted already, and shifted once more"
    ),
    Mutant(
        sabotage_documents.looks_ahead_into_the_next_document,
        "interleaved",
        "the label past a document's end is not ignored",
    ),
    Mutant(sabotage_documents.loss_divided_by_padded_tokens, "padded", "the loss is averaged over all places"),
    Mutant(sabotage_documents.pads_in_the_balance_losses, "padded", "pads have probabilities like any token"),
    Mutant(sabotage_documents.pads_sent_to_experts, "padded", "pads take part in routing and in everyone's load"),
    Mutant(
        sabotage_documents.sequence_balance_over_the_microbatch,
        "interleaved",
        "packed documents are one sequence to the balance loss",
    ),
    Mutant(sabotage_documents.sequences_of_this_microbatch_only, "interleaved", "the mean is over a rank's sequences"),
    Mutant(sabotage_documents.shared_sequences_counted_once_per_rank, "ring", "a document on several ranks is several"),
    Mutant(sabotage_documents.sequences_weighed_by_their_tokens, "interleaved", "a mean over tokens, not sequences"),
    Mutant(
        sabotage_documents.loss_of_one_context_rank_only, "ring", "the loss is summed over dp and forgotten over cp"
    ),
    Mutant(sabotage_documents.labels_not_counted_over_context_ranks, "traded", "labels are counted over dp only"),
    Mutant(
        sabotage_documents.shared_tokens_counted_once_per_rank, "ring", "every rank counts the microbatch as its own"
    ),
    Mutant(sabotage_documents.balance_over_one_context_share, "traded", "loads are counted over a share of a document"),
    Mutant(
        sabotage_documents.balance_over_the_largest_context_group,
        "dynamic",
        "counts are added over the largest group, whatever the wave's",
    ),
)


def caught(verdict: Verdict) -> bool:
    """Whether a named quantity differs; ranks that crashed or hung have shown nothing."""
    return verdict.failure is None and any(not row.holds for row in verdict.rows)


def prove_mutants() -> Iterator[tuple[Mutant | None, Verdict]]:
    """First every case without a fault (None), then every fault."""
    for case in CASES.values():
        yield None, prove(case)
    for mutant in MUTANTS:
        yield mutant, prove(CASES[mutant.case], seconds=60.0, sabotage=mutant.seed)
