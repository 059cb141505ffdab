"""A proof that cannot fail is worthless: seed known faults and see each one caught.

Every fault is tried on a case in which it matters; the same cases without a fault must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from moefold.config.attention import GQAConfig, RopeConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.prove import sabotage
from moefold.prove.cases import PROVING_OPTIM, Case
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


def _case(name: str, parallel: ParallelConfig, qk_norm: Literal["none", "head", "full"], **moe: Any) -> Case:
    model = ModelConfig(
        vocab_size=48,
        width=24,
        num_layers=2,
        attention=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=qk_norm, qkv_bias=True),
        rope=RopeConfig(theta=100.0),
        moe=MoEConfig(
            num_experts=8,
            top_k=2,
            expert_width=8,
            balance=BalanceConfig(microbatch=0.3, sequence=0.2, global_batch=0.3, device=0.1, device_groups=2, z=0.01),
            **moe,
        ),
        num_dense_layers=1,
        dense_width=16,
        init_std=0.2,
    )
    # A shard boundary falls inside a sequence.
    data = DataConfig(seq_len=6, global_batch=12, micro_batch=3)
    precision = PrecisionConfig(params="float64", compute="float64", experts="sequential")
    return Case(RunConfig(name, 5, model, parallel, precision, data, PROVING_OPTIM), 4)


CASES = {
    case.run.name: case
    for case in (
        _case(
            "folded",
            ParallelConfig(tp=2, ep=4),
            "full",
            router=RouterConfig(expert_bias=True, normalize=True),
            shared_width=8,
        ),
        _case("split", ParallelConfig(tp=2, ep=2, etp=2), "head", expert_bias=True),
        _case(
            "gathered",
            ParallelConfig(tp=2, ep=2, dispatcher="all_gather"),
            "none",
            capacity=CapacityConfig(factor=0.8),
        ),
        _case("copied", ParallelConfig(ep=2, dp_replicate=2, edp_replicate=2), "none"),
    )
}

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
    Mutant(sabotage.start_depends_on_the_layout, "folded", "each rank seeds its own part by its own shape"),
    Mutant(sabotage.decay_on_everything, "folded", "norms and biases are pulled to zero"),
)


def prove_mutants() -> Iterator[tuple[Mutant | None, Verdict]]:
    """First every case without a fault (None), then every fault."""
    for case in CASES.values():
        yield None, prove(case)
    for mutant in MUTANTS:
        yield mutant, prove(CASES[mutant.case], seconds=30.0, sabotage=mutant.seed)
