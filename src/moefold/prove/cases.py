"""One question to the proof: this run, on this many ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import lcm
from random import Random

from moefold.batching.run_plan import plan_for
from moefold.batching.step_plan import StepPlan
from moefold.config.attention import AttentionConfig, MLAConfig
from moefold.config.data import DataConfig
from moefold.config.kernels import KernelsConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.optim import OptimConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import Format, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.schedule.names import schedule_named
from moefold.topology.folded_layout import FoldedLayout, fold


@dataclass(frozen=True)
class Case:
    run: RunConfig
    world: int

    @property
    def layout(self) -> FoldedLayout:
        return fold(self.run.parallel, self.world)

    @cached_property
    def documents(self) -> tuple[tuple[int, ...], ...]:
        """The lengths of every sample's documents: the whole sequence, pieces of it, or one document of any length."""
        random, data = Random(self.run.seed), self.run.data
        if data.packing == "concat":
            return ((data.seq_len,),) * data.global_batch
        if data.packing == "concat_masked":
            return tuple(_pieces(random, data.seq_len) for _ in range(data.global_batch))
        return tuple((random.randint(1, data.seq_len),) for _ in range(data.global_batch))

    @cached_property
    def plan(self) -> StepPlan:
        """Which samples form which microbatch, as in training."""
        return plan_for(self.run, [sum(lengths) for lengths in self.documents], self.layout)

    @property
    def num_waves(self) -> int:
        """How many microbatches each rank runs, one after the other."""
        return len(self.plan.waves)

    @property
    def title(self) -> str:
        degrees = {"dp": self.layout.size("dp"), "edp": self.layout.size("edp")}
        degrees |= {axis: getattr(self.run.parallel, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
        return f"{self.run.name} on {self.world}: " + " ".join(f"{k}{v}" for k, v in degrees.items() if v > 1)


def _pieces(random: Random, length: int) -> tuple[int, ...]:
    """Up to three documents that fill a window."""
    cuts = sorted(random.sample(range(1, length), random.randint(0, min(2, length - 1))))
    return tuple(stop - start for start, stop in pairwise((0, *cuts, length)))


# Big enough to show every mistake, small enough for sixteen processes on a laptop.
_MOST_LAYERS, _MOST_EXPERTS, _MOST_WIDTH, _MOST_VOCABULARY = 3, 16, 64, 256
PROVING_OPTIM = OptimConfig(lr=1e-2, clip_norm=0.5)


def reduce_run(run: RunConfig, world: int, dtype: Format = "float64") -> Case:
    """The same run with its sizes cut down: structure, routing and layout stay, numbers shrink."""
    parallel, model = run.parallel, _reduce_model(run.model, run)
    dp = fold(parallel, world).size("dp")
    # A stage string is about the full number of layers; balanced stages are as many.
    parallel = replace(parallel, stages=None)
    fewest = schedule_named(parallel.schedule).microbatches_per_stage * parallel.pp * parallel.vpp
    data = DataConfig(seq_len=11, global_batch=max(2, fewest) * dp, micro_batch=1, packing=run.data.packing)
    reduced = replace(run, model=model, parallel=parallel, data=data, precision=proving_precision(dtype))
    reduced = replace(reduced, kernels=proving_kernels(dtype))
    return Case(replace(reduced, optim=PROVING_OPTIM), world)


def proving_precision(dtype: Format) -> PrecisionConfig:
    """bfloat16 keeps its parameters in float32, as training does."""
    return PrecisionConfig("float64" if dtype == "float64" else "float32", dtype)


def proving_kernels(dtype: Format) -> KernelsConfig:
    """torch's grouped GEMM has no float64 kernel."""
    return KernelsConfig("sequential" if dtype == "float64" else "grouped")


def _reduce_model(model: ModelConfig, run: RunConfig) -> ModelConfig:
    tp, ep, etp = run.parallel.tp, run.parallel.ep, run.parallel.etp
    moe = model.moe
    if moe is not None:
        devices = 1 if moe.capacity is None else moe.capacity.device_groups
        groups = lcm(ep, moe.router.num_groups, moe.balance.device_groups, devices)
        experts = min(moe.num_experts, max(_MOST_EXPERTS, groups) // groups * groups)
        moe = replace(
            moe,
            num_experts=experts,
            top_k=min(moe.top_k, max(1, experts // 4)),
            expert_hidden_dim=8 * etp,
            shared_hidden_dim=8 * tp if moe.shared_hidden_dim else 0,
            latent_dim=24 if moe.latent_dim is not None else None,
        )
        if moe.router.num_groups > 1:
            moe = replace(moe, router=replace(moe.router, top_groups=_reduce_top_groups(moe)))
    return replace(
        model,
        vocab_size=min(model.vocab_size, _MOST_VOCABULARY) // tp * tp,
        dim=min(model.dim, _MOST_WIDTH),
        num_layers=min(model.num_layers, _MOST_LAYERS),
        num_dense_layers=min(model.num_dense_layers, 1),
        dense_hidden_dim=8 * tp * 3,
        attention=_reduce_attention(model, run.parallel),
        moe=moe,
        init_std=0.2,
    )


def _reduce_top_groups(moe: MoEConfig) -> int:
    """As many as there were, or the nearest number that holds ``top_k`` experts and divides it for a ``topk_sum``."""
    needed = -(-moe.top_k // (moe.num_experts // moe.router.num_groups))
    legal = list(range(needed, moe.router.num_groups + 1))
    if moe.router.group_score == "topk_sum":
        legal = [size for size in legal if moe.top_k % size == 0 or size == moe.router.num_groups]
    return min(legal, key=lambda size: abs(size - moe.router.top_groups))


def _reduce_attention(model: ModelConfig, parallel: ParallelConfig) -> AttentionConfig:
    attention, tp = model.attention, parallel.tp
    # Ranks that trade heads for tokens need some each.
    trades = {parallel.context.full, parallel.context.windowed} != {"ring"}
    heads = max(2, tp * (parallel.cp if trades else 1))
    if isinstance(attention, MLAConfig):
        q_latent = None if attention.q_latent is None else 20
        return replace(attention, num_heads=heads, q_latent=q_latent, kv_latent=12, nope_dim=8, rope_dim=4, value_dim=6)
    grouped = min(attention.num_heads // attention.num_kv_heads, 2)
    kv_heads = heads
    window = None if attention.window is None else 4
    return replace(attention, num_heads=kv_heads * grouped, num_kv_heads=kv_heads, head_dim=8, window=window)
