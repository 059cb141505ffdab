"""A case of the proof: a run and a number of ranks; its reduced form, and its form as one line of JSON.

A drawn case has a number, but the number depends on the code that draws. A case that failed once must be provable for
good, so it is kept as its world size and the keys of its run that differ from the defaults, with a sentence about what
it found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from math import lcm
from pathlib import Path
from random import Random
from typing import Any

from moefold.batching.document_packing import plan_for
from moefold.batching.wave_packing import StepPlan
from moefold.blueprint.narrow_matmuls import module_of, stays_wide
from moefold.blueprint.parameters import parameters
from moefold.config.attention import AttentionConfig, GatedDeltaNetConfig, MLAConfig
from moefold.config.data import DataConfig
from moefold.config.loading import run_from_mapping
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.optim import OptimConfig
from moefold.config.parallel import ParallelConfig, RankOrderConfig
from moefold.config.precision import ComputeFormat, Format, KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, MoefoldError
from moefold.prove.narrow_cases import carry_recipe, fit_blocks, refuse_unproved
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
        """Document lengths of every sample: the whole sequence, a packed window, or one document of any length."""
        random, data = Random(self.run.seed), self.run.data
        if data.packing == "concat":
            return ((data.seq_len,),) * data.global_batch
        if data.packing == "concat_masked":
            return tuple(_packed_window(random, data.seq_len) for _ in range(data.global_batch))
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
        words = [f"{k}{v}" for k, v in degrees.items() if v > 1]
        order = self.run.parallel.rank_order
        words += [f"ranks {order.dense} {order.expert}"] if order != RankOrderConfig() else []
        return f"{self.run.name} on {self.world}: {' '.join(words)}"


def _packed_window(random: Random, length: int) -> tuple[int, ...]:
    """Lengths of up to three documents that fill a window."""
    cuts = sorted(random.sample(range(1, length), random.randint(0, min(2, length - 1))))
    return tuple(stop - start for start, stop in pairwise((0, *cuts, length)))


# Large enough to show every fault, small enough for sixteen processes on a laptop.
_MAX_LAYERS, _MAX_EXPERTS, _MAX_DIM, _MAX_VOCAB, _MAX_LORA_RANK = 3, 16, 64, 256, 4
PROOF_OPTIM = OptimConfig(lr=1e-2, clip_norm=0.5)


def reduce_run(run: RunConfig, world: int, dtype: Format = "float64") -> Case:
    """The same run with smaller sizes: structure, routing and layout stay."""
    refuse_unproved(run, dtype)
    run = fit_blocks(replace(run, model=_reduce_model(run.model, run)))
    parallel, model = run.parallel, run.model
    dp = fold(parallel, world).size("dp")
    # A stage string is for the full number of layers; use as many balanced stages.
    parallel = replace(parallel, stages=None)
    min_microbatches = schedule_named(parallel.schedule).microbatches_per_stage * parallel.pp * parallel.vpp
    data = DataConfig(seq_len=11, global_batch=max(2, min_microbatches) * dp, micro_batch=1, packing=run.data.packing)
    asked, names = run.optim, [spec.name for spec in parameters(model)]
    modules = {module_of(name) for name in names}
    wide = tuple(pattern for pattern in run.precision.wide if any(stays_wide(name, (pattern,)) for name in modules))
    precision = replace(carry_recipe(proof_precision(dtype), run.precision), wide=wide)
    reduced = replace(run, model=model, parallel=parallel, data=data, precision=precision)
    # A pattern may name a layer that the smaller model does not have.
    frozen = tuple(pattern for pattern in asked.frozen if any(fnmatchcase(name, pattern) for name in names))
    optim = replace(PROOF_OPTIM, algorithm=asked.algorithm, muon=asked.muon, qk_clip=asked.qk_clip)
    optim = replace(optim, trained=asked.trained, frozen=frozen)
    kernels = replace(proof_kernels(dtype), casts=run.kernels.casts, row_padding=run.kernels.row_padding)
    return Case(replace(reduced, kernels=kernels, optim=optim), world)


def proof_precision(dtype: Format) -> PrecisionConfig:
    """bfloat16 has float32 parameters, as in training."""
    return PrecisionConfig("float64" if dtype == "float64" else "float32", dtype)


def proof_kernels(dtype: ComputeFormat) -> KernelsConfig:
    """torch has no grouped GEMM in float64."""
    return KernelsConfig("sequential" if dtype == "float64" else "grouped")


def reference_case(case: Case) -> Case:
    """The same in float64, with the reference's kernels."""
    precision = carry_recipe(proof_precision("float64"), case.run.precision)
    kernels = replace(proof_kernels("float64"), row_padding=case.run.kernels.row_padding)
    return Case(replace(case.run, precision=precision, kernels=kernels), case.world)


def _reduce_model(model: ModelConfig, run: RunConfig) -> ModelConfig:
    tp, ep, etp = run.parallel.tp, run.parallel.ep, run.parallel.etp
    moe = model.moe
    if moe is not None:
        devices = 1 if moe.capacity is None else moe.capacity.device_groups
        groups = lcm(ep, moe.router.num_groups, moe.balance.device_groups, devices)
        experts = min(moe.num_experts, max(_MAX_EXPERTS, groups) // groups * groups)
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
        vocab_size=min(model.vocab_size, _MAX_VOCAB) // tp * tp,
        dim=min(model.dim, _MAX_DIM),
        num_layers=min(model.num_layers, _MAX_LAYERS),
        num_dense_layers=min(model.num_dense_layers, 1),
        moe_every=min(model.moe_every, 2),
        dense_hidden_dim=8 * tp * 3,
        attention=_reduce_attention(model, run.parallel),
        linear_attention=_reduce_linear(model, run.parallel),
        moe=moe,
        init_std=0.2,
        lora=None if model.lora is None else replace(model.lora, rank=min(model.lora.rank, _MAX_LORA_RANK)),
    )


def _reduce_top_groups(moe: MoEConfig) -> int:
    """The nearest legal number: groups hold ``top_k`` experts, and divide ``top_k`` for ``topk_sum``."""
    needed = -(-moe.top_k // (moe.num_experts // moe.router.num_groups))
    legal = list(range(needed, moe.router.num_groups + 1))
    if moe.router.group_score == "topk_sum":
        legal = [size for size in legal if moe.top_k % size == 0 or size == moe.router.num_groups]
    return min(legal, key=lambda size: abs(size - moe.router.top_groups))


def _reduce_attention(model: ModelConfig, parallel: ParallelConfig) -> AttentionConfig:
    attention, tp = model.attention, parallel.tp
    # Ulysses needs at least one head per rank.
    ulysses = {parallel.context.full, parallel.context.windowed} != {"ring"}
    heads = max(2, tp * (parallel.cp if ulysses else 1))
    if isinstance(attention, MLAConfig):
        q_latent = None if attention.q_latent is None else 20
        return replace(attention, num_heads=heads, q_latent=q_latent, kv_latent=12, nope_dim=8, rope_dim=4, value_dim=6)
    grouped = min(attention.num_heads // attention.num_kv_heads, 2)
    kv_heads = heads
    window = None if attention.window is None else 4
    rope_dim = None if attention.rope_dim is None else 4
    # Of three layers one has no RoPE.
    attention = replace(
        attention,
        chunk=None if attention.chunk is None else 4,
        nope_every=None if attention.nope_every is None else 2,
        nope_floor=3,
    )
    heads = kv_heads * grouped
    return replace(attention, num_heads=heads, num_kv_heads=kv_heads, head_dim=8, rope_dim=rope_dim, window=window)


def _reduce_linear(model: ModelConfig, parallel: ParallelConfig) -> GatedDeltaNetConfig | None:
    """At most every third layer is a full one, as there are so few; chunks are shorter than the sequence."""
    linear = model.linear_attention
    if linear is None:
        return None
    keys = max(2, parallel.tp)
    shared = min(linear.num_value_heads // linear.num_key_heads, 2)
    every = min(linear.full_attention_every, _MAX_LAYERS, model.num_layers)
    return GatedDeltaNetConfig(keys, keys * shared, 4, 6, linear.conv_size, every, chunk_size=4)


# ---- cases as text ----


@dataclass(frozen=True)
class KeptCase:
    """A case and what it once found."""

    case: Case
    found: str


def case_line(case: Case, found: str) -> str:
    """The line that `read_cases` reads back as the same case."""
    changed = _changed(asdict(case.run), asdict(RunConfig()))
    return json.dumps({"found": found, "world": case.world, "run": changed})


def read_cases(path: Path) -> list[KeptCase]:
    """Every case of a file, in its order."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise MoefoldError(f"cannot read cases from {path}: {error}") from None
    return [_read(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _read(line: str, where: str) -> KeptCase:
    try:
        match json.loads(line):
            case {"found": str(found), "world": int(world), "run": dict(run), **others} if not others:
                return KeptCase(Case(run_from_mapping(run), world), found)
    except ConfigError as error:
        raise MoefoldError(f"{where}: {error}") from None
    except ValueError as error:
        raise MoefoldError(f"{where}: not JSON: {error}") from None
    raise MoefoldError(f'{where}: a case is {{"found": TEXT, "world": N, "run": {{...}}}} and nothing else')


def _changed(value: Any, default: Any) -> Any:
    """What of ``value`` differs from the default; a section of another kind stays whole."""
    if not isinstance(value, dict) or not isinstance(default, dict) or value.get("kind") != default.get("kind"):
        return value
    return {
        key: _changed(inner, default[key]) for key, inner in value.items() if key == "kind" or inner != default[key]
    }
