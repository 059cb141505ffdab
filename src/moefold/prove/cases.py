"""One question to the proof: this run, on this many ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from moefold.config.attention import AttentionConfig, MLAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.optim import OptimConfig
from moefold.config.precision import Format, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.topology.layout import FoldedLayout, fold


@dataclass(frozen=True)
class Case:
    run: RunConfig
    world: int

    @property
    def layout(self) -> FoldedLayout:
        return fold(self.run.parallel, self.world)

    @property
    def num_waves(self) -> int:
        """How many microbatches each rank runs, one after the other."""
        return self.run.data.global_batch // (self.run.data.micro_batch * self.layout.size("dp"))

    @property
    def title(self) -> str:
        degrees = {"dp": self.layout.size("dp"), "edp": self.layout.size("edp")}
        degrees |= {axis: getattr(self.run.parallel, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
        return f"{self.run.name} on {self.world}: " + " ".join(f"{k}{v}" for k, v in degrees.items() if v > 1)


# Big enough to show every mistake, small enough for sixteen processes on a laptop.
_MOST_LAYERS, _MOST_EXPERTS, _MOST_WIDTH, _MOST_VOCABULARY = 3, 16, 64, 256
PROVING_OPTIM = OptimConfig(rate=1e-2, clip_norm=0.5)


def reduce_run(run: RunConfig, world: int, dtype: Format = "float64") -> Case:
    """The same run with its sizes cut down: structure, routing and layout stay, numbers shrink."""
    parallel, model = run.parallel, _reduce_model(run.model, run)
    dp = fold(parallel, world).size("dp")
    data = DataConfig(seq_len=11, global_batch=2 * dp, micro_batch=1)
    return Case(replace(run, model=model, data=data, precision=proving_precision(dtype), optim=PROVING_OPTIM), world)


def proving_precision(dtype: Format) -> PrecisionConfig:
    """float64 has no grouped kernel and needs none; bfloat16 keeps its parameters in float32, as training does."""
    if dtype == "float64":
        return PrecisionConfig("float64", "float64", "sequential")
    return PrecisionConfig("float32", dtype, "grouped")


def _reduce_model(model: ModelConfig, run: RunConfig) -> ModelConfig:
    tp, ep, etp = run.parallel.tp, run.parallel.ep, run.parallel.etp
    moe = model.moe
    if moe is not None:
        groups = lcm(ep, moe.router.num_groups, moe.balance.device_groups)
        experts = min(moe.num_experts, max(_MOST_EXPERTS, groups) // groups * groups)
        moe = replace(
            moe,
            num_experts=experts,
            top_k=min(moe.top_k, max(1, experts // 4)),
            expert_width=8 * etp,
            shared_width=8 * tp if moe.shared_width else 0,
            latent_width=24 if moe.latent_width is not None else None,
        )
        per_group = experts // moe.router.num_groups
        if moe.router.num_groups > 1:
            needed = -(-moe.top_k // per_group)
            router = replace(moe.router, top_groups=max(needed, min(moe.router.top_groups, moe.router.num_groups)))
            moe = replace(moe, router=router)
    return replace(
        model,
        vocab_size=min(model.vocab_size, _MOST_VOCABULARY) // tp * tp,
        width=min(model.width, _MOST_WIDTH),
        num_layers=min(model.num_layers, _MOST_LAYERS),
        num_dense_layers=min(model.num_dense_layers, 1),
        dense_width=8 * tp * 3,
        attention=_reduce_attention(model, tp),
        moe=moe,
        init_std=0.2,
    )


def _reduce_attention(model: ModelConfig, tp: int) -> AttentionConfig:
    attention = model.attention
    if isinstance(attention, MLAConfig):
        q_latent = None if attention.q_latent is None else 20
        return replace(
            attention, num_heads=max(2, tp), q_latent=q_latent, kv_latent=12, nope_dim=8, rope_dim=4, value_dim=6
        )
    grouped = min(attention.num_heads // attention.num_kv_heads, 2)
    kv_heads = max(2, tp)
    window = None if attention.window is None else 4
    return replace(attention, num_heads=kv_heads * grouped, num_kv_heads=kv_heads, head_dim=8, window=window)
