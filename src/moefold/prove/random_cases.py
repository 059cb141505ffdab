"""Random legal cases: every kind of model, routing, dispatcher and layout, in sizes that do not divide evenly.

Layouts are drawn without replacement: all legal ones in random order, each once before any comes twice. Everything else
is drawn for each case until the run has no problems. A case's number encodes its seed and how many cases were drawn
before it, so it can be drawn again alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product
from random import Random
from typing import Literal, get_args

from moefold.checks.run_all import problems
from moefold.config.attention import AttentionConfig, GQAConfig, MLAConfig, RopeConfig, YarnConfig
from moefold.config.data import DataConfig, PackingMode
from moefold.config.memory import MemoryConfig, RecomputedPhase, RetainedStep, Retention
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig, RouterKind
from moefold.config.optim import MuonConfig, NewtonSchulzCoefficients
from moefold.config.parallel import ContextConfig, ContextMode, DispatcherName, ParallelConfig
from moefold.config.precision import Format, KernelsConfig
from moefold.config.run import RunConfig
from moefold.errors import MoefoldError
from moefold.prove.case_variants import (
    unless_refused,
    with_attention_variants,
    with_clones,
    with_exchanges,
    with_finetuning,
    with_four_steps,
    with_graphs,
    with_hybrids,
    with_interleaved_layers,
    with_narrow_savings,
    with_overlaps,
    with_rank_order,
    with_recipes,
    with_row_bounds,
    with_small_buckets,
)
from moefold.prove.cases import PROOF_OPTIM, Case, proof_kernels, proof_precision
from moefold.schedule.names import SCHEDULES

_DEGREES = (1, 2, 4, 8)
# Case numbers per seed.
_CASES_PER_SEED = 100_003


@dataclass(frozen=True)
class _Degrees:
    world: int
    pp: int
    cp: int
    tp: int
    ep: int
    etp: int

    @property
    def stage(self) -> int:
        return self.world // self.pp

    @property
    def dp(self) -> int:
        return self.stage // (self.cp * self.tp)


def draw_narrow_cases(count: int, max_world: int, seed: int) -> Iterator[Case]:
    """Of the cases of a seed, the first ``count`` with a precision recipe; they keep their numbers."""
    drawn = draw_cases(_CASES_PER_SEED, max_world, seed)
    return islice((case for case in drawn if case.run.precision.recipe is not None), count)


def draw_cases(count: int, max_world: int, seed: int, dtype: Format = "float64") -> Iterator[Case]:
    if count > _CASES_PER_SEED:
        raise MoefoldError(
            f"a seed has at most {_CASES_PER_SEED:,} cases, not {count:,}; draw the rest from another seed"
        )
    random = Random(seed)
    remaining: list[_Degrees] = []
    for number in range(count):
        if not remaining:
            # Routing is recorded for one microbatch only, so bfloat16 proves layouts of one stage.
            remaining = [
                degrees for degrees in _all_degrees(max_world) if dtype != "bfloat16" or degrees.pp * degrees.cp == 1
            ]
            random.shuffle(remaining)
        yield _draw(random, remaining.pop(), seed * _CASES_PER_SEED + number, dtype)


def draw_case(number: int, max_world: int, dtype: Format = "float64") -> Case:
    """The drawn case of this number; the largest world and the format must be those it was drawn with."""
    seed, before = divmod(number, _CASES_PER_SEED)
    *_, case = draw_cases(before + 1, max_world, seed, dtype)
    return case


def _all_degrees(max_world: int) -> Iterator[_Degrees]:
    for world in (size for size in _DEGREES if size <= max_world):
        for pp in (size for size in _DEGREES if world % size == 0):
            stage = world // pp
            for cp, tp in product((1, 2, 4), _DEGREES):
                for ep, etp in product(_DEGREES, _DEGREES):
                    if stage % (cp * tp) == 0 and stage % (ep * etp) == 0:
                        yield _Degrees(world, pp, cp, tp, ep, etp)


def _draw(random: Random, degrees: _Degrees, seed: int, dtype: Format) -> Case:
    """Draw until the checks find no problem; most draws are legal."""
    while True:
        parallel = _parallel(random, degrees, dtype)
        data = _data(random, degrees, parallel, dtype)
        if data.packing == "bin_packed" and random.random() < 0.6:
            parallel = replace(parallel, dynamic_cp=True)
        model = _model(random, degrees, parallel, dtype)
        if parallel.pp * parallel.vpp > 1 and random.random() < 0.5:
            parallel = replace(parallel, stages=_stages(random, model, parallel.pp * parallel.vpp))
        run = RunConfig(
            name=f"case {seed}",
            seed=seed,
            model=model,
            parallel=parallel,
            data=data,
            precision=proof_precision(dtype),
            kernels=_kernels(random, model, dtype),
            optim=PROOF_OPTIM,
            memory=_memory(random),
        )
        if not problems(run, degrees.world):
            run = with_hybrids(run, degrees.world)
            run = with_interleaved_layers(with_attention_variants(run, degrees.world), degrees.world)
            run = _with_savings(run, degrees.world, dtype)
            if dtype == "float64":
                run = with_recipes(with_finetuning(run, degrees.world), degrees.world)
                run = with_narrow_savings(run, degrees.world)
            run = with_row_bounds(with_clones(with_exchanges(run), degrees.world), degrees.world)
            run = with_graphs(with_overlaps(run, degrees.world), degrees.world)
            run = with_small_buckets(with_four_steps(with_rank_order(run, degrees.world), degrees.world))
            return Case(run, degrees.world)


def _with_savings(run: RunConfig, world: int, dtype: Format) -> RunConfig:
    """Sharding, retained steps, the optimizer and its states, each where the run may have it.

    Drawn from the case's own number: draws from the sequence would change all cases of every seed.
    """
    random = Random(f"savings of {run.seed}")
    if random.random() < 0.4:
        run = unless_refused(run, replace(run, parallel=replace(run.parallel, sharding="flat")), world)
    choices: tuple[Retention, ...] = ("keep", "keep", "discard", "offload")
    for step in get_args(RetainedStep) if random.random() < 0.5 else ():
        retain = replace(run.memory.retain, **{step: random.choice(choices)})
        run = unless_refused(run, replace(run, memory=replace(run.memory, retain=retain)), world)
    places: tuple[Literal["device", "host", "cpu"], ...] = ("device", "device", "host", "cpu")
    place = random.choice(places)
    run = unless_refused(run, replace(run, memory=replace(run.memory, optimizer=place)), world)
    return _with_formats(random, run, world) if dtype == "bfloat16" else _with_muon(random, run, world, dtype)


def _with_formats(random: Random, run: RunConfig, world: int) -> RunConfig:
    """Moments in bfloat16 are one more rounding of those that the bound counts. Those in float8 round to four bits, and
    the bound for them would be another."""
    rounding: Literal["nearest", "stochastic"] = random.choice(("nearest", "stochastic"))
    if random.random() < 0.4:
        precision = replace(run.precision, moments="bfloat16", moments_rounding=rounding)
        run = unless_refused(run, replace(run, precision=precision), world)
    if random.random() < 0.6:
        run = unless_refused(run, replace(run, precision=replace(run.precision, master="remainder")), world)
    return run


def _with_muon(random: Random, run: RunConfig, world: int, dtype: Format) -> RunConfig:
    """In float64 only: Newton-Schulz makes all singular values about 1, those too that are rounding.

    Where every document has one token, gradients of queries and keys are rounding, and Muon's update of them would be.
    """
    muon = MuonConfig(nesterov=random.random() < 0.7, coefficients=random.choice(get_args(NewtonSchulzCoefficients)))
    attends = any(length > 1 for lengths in Case(run, world).documents for length in lengths)
    if dtype == "float64" and random.random() < 0.4 and attends:
        run = unless_refused(run, replace(run, optim=replace(run.optim, algorithm="muon", muon=muon)), world)
    bound = random.choice((0.5, 1.0, 2.0))
    if dtype == "float64" and random.random() < 0.3:
        run = unless_refused(run, replace(run, optim=replace(run.optim, qk_clip=bound)), world)
    return run


def _kernels(random: Random, model: ModelConfig, dtype: Format) -> KernelsConfig:
    """Half of the runs that can have fused experts; the reference has sequential ones."""
    plain, moe = proof_kernels(dtype), model.moe
    padded = moe is not None and moe.capacity is not None and moe.capacity.pad
    fits = dtype == "float64" and moe is not None and moe.weight_at == "activation" and not padded
    return replace(plain, experts="fused") if fits and random.random() < 0.5 else plain


def _parallel(random: Random, degrees: _Degrees, dtype: Format) -> ParallelConfig:
    edp = degrees.stage // (degrees.ep * degrees.etp)
    # Schedules on one stage as well: they defer weight gradients and overlap.
    plain = dtype == "bfloat16" or (degrees.pp == 1 and random.random() < 0.5)
    schedule = SCHEDULES["1f1b"] if plain else random.choice(list(SCHEDULES.values()))
    # One with bounds is a variant (`with_row_bounds`).
    dispatcher = random.choice([name for name in get_args(DispatcherName) if name != "all_to_all_bounded"])
    return ParallelConfig(
        pp=degrees.pp,
        cp=degrees.cp,
        tp=degrees.tp,
        ep=degrees.ep,
        etp=degrees.etp,
        vpp=random.randint(1, 4) if schedule.virtual is None else schedule.virtual,
        schedule=schedule.name,
        context=_context(random, degrees.cp),
        dp_replicate=_replicas(random, degrees.dp),
        edp_replicate=_replicas(random, edp),
        dispatcher=dispatcher,
        ep_inner=random.choice([size for size in _DEGREES if degrees.ep % size == 0])
        if dispatcher == "two_level"
        else 1,
    )


def _context(random: Random, cp: int) -> ContextConfig:
    modes: tuple[ContextMode, ...] = ("ring", "all_to_all", "hierarchical")
    full, windowed = random.choice(modes), random.choice(modes)
    nested = "hierarchical" in (full, windowed)
    return ContextConfig(full, windowed, inner=random.choice([1, 2, 4][: cp.bit_length()]) if nested else 1)


def _stages(random: Random, model: ModelConfig, count: int) -> str:
    """Any partition of the model into stages, empty ones too."""
    letters = "E" + "t" * model.num_layers + "m" * model.num_mtp + "L"
    cuts = sorted(random.choices(range(1, len(letters)), k=count - 1))
    return "|".join(letters[start:stop] for start, stop in pairwise((0, *cuts, len(letters))))


def _memory(random: Random) -> MemoryConfig:
    phases: tuple[RecomputedPhase, ...] = ("attention", "feed_forward", "experts")
    return MemoryConfig(tuple(phase for phase in phases if random.random() < 0.2))


def _replicas(random: Random, ways: int) -> int:
    """Mostly fully sharded, sometimes hybrid, sometimes replicated."""
    divisors = [size for size in _DEGREES if ways % size == 0]
    return random.choice(divisors) if random.random() < 0.4 else 1


def _data(random: Random, degrees: _Degrees, parallel: ParallelConfig, dtype: Format) -> DataConfig:
    micro_batch = random.choice((1, 1, 2, 3))
    kinds: tuple[PackingMode, ...] = ("concat", "concat", "concat_masked", "padded", "bin_packed", "bin_packed")
    documents = "concat" if dtype == "bfloat16" else random.choice(kinds)
    # Routing is recorded for one wave only.
    waves = 1 if dtype == "bfloat16" else random.choice((1, 2, 3, 5)) if degrees.pp > 1 else random.choice((1, 2))
    waves = max(waves, SCHEDULES[parallel.schedule].microbatches_per_stage * parallel.pp * parallel.vpp)
    return DataConfig(
        seq_len=random.choice((5, 7, 8, 9, 11)),
        global_batch=waves * degrees.dp * micro_batch,
        micro_batch=micro_batch,
        packing=documents,
    )


def _model(random: Random, degrees: _Degrees, parallel: ParallelConfig, dtype: Format) -> ModelConfig:
    num_layers = random.choice((1, 2, 2, 3)) if degrees.pp == 1 else random.choice((1, 2, 3, 4, 5))
    return ModelConfig(
        vocab_size=8 * random.choice((5, 7)),
        dim=random.choice((24, 32)),
        num_layers=num_layers,
        attention=_attention(random, parallel, degrees.dp),
        rope=_rope(random),
        moe=_moe(random, degrees, dtype),
        num_dense_layers=random.choice((0, 0, 1)) if num_layers > 1 else 0,
        dense_hidden_dim=8 * random.choice((3, 5)),
        tied_embeddings=random.random() < 0.25,
        init_std=0.2,
        num_mtp=0 if dtype == "bfloat16" else random.choice((0, 0, 1, 2)),
        # Not drawn: another draw would change all cases of every seed.
        mtp_divisor="labels" if num_layers % 2 else "tokens",
    )


def _attention(random: Random, parallel: ParallelConfig, dp: int) -> AttentionConfig:
    # Ulysses needs at least one head per rank.
    ulysses = {parallel.context.full, parallel.context.windowed} != {"ring"}
    head_ranks = parallel.cp * (dp if parallel.dynamic_cp else 1) if ulysses else 1
    heads = max(2, parallel.tp * head_ranks)
    if random.random() < 0.45:
        return MLAConfig(
            num_heads=heads, q_latent=random.choice((None, 20)), kv_latent=12, nope_dim=8, rope_dim=4, value_dim=6
        )
    kv_heads = max(2, parallel.tp)
    return GQAConfig(
        num_heads=max(heads, kv_heads) * random.choice((1, 2)),
        num_kv_heads=kv_heads,
        head_dim=8,
        qk_norm=random.choice(("none", "head", "full")),
        qkv_bias=random.random() < 0.4,
        out_bias=random.random() < 0.4,
        sinks=random.random() < 0.3,
        window=random.choice((None, None, 4)),
        window_every=random.choice((1, 2)),
    )


def _rope(random: Random) -> RopeConfig:
    yarn = YarnConfig(factor=4.0, original_context=8, mscale=1.0, mscale_all_dim=0.7) if random.random() < 0.3 else None
    return RopeConfig(theta=100.0, interleaved=random.random() < 0.4, yarn=yarn)


def _moe(random: Random, degrees: _Degrees, dtype: Format) -> MoEConfig:
    num_experts = max(degrees.ep, random.choice((8, 16)))
    return MoEConfig(
        num_experts=num_experts,
        top_k=random.choice((1, 2, 3, 4)),
        expert_hidden_dim=degrees.etp * (8 if dtype == "bfloat16" else random.choice((3, 8))),
        router=_router(random, num_experts),
        balance=_balance(random, num_experts),
        capacity=_capacity(random),
        shared_hidden_dim=random.choice((0, 8 * degrees.tp)),
        shared_gate=random.random() < 0.5,
        latent_dim=random.choice((None, None, 16)),
        activation=random.choice(("swiglu", "swiglu", "clamped_swiglu")),
        expert_mlp_bias=random.random() < 0.4,
        weight_at=random.choice(("activation", "output")),
    )


def _router(random: Random, num_experts: int) -> RouterConfig:
    kinds: tuple[RouterKind, ...] = ("topk", "topk", "sinkhorn", "expert_choice", "balanced")
    kind = random.choice(kinds)
    grouped = kind == "topk" and random.random() < 0.4
    return RouterConfig(
        kind=kind,
        score=random.choice(("softmax", "sigmoid")),
        score_when="before_topk" if kind == "expert_choice" else random.choice(("before_topk", "after_topk")),
        normalize=random.random() < 0.5,
        scale=random.choice((1.0, 2.5)),
        num_groups=4 if grouped else 1,
        top_groups=random.choice((1, 2, 2)) if grouped else 1,
        group_score=random.choice(("max", "topk_sum")) if grouped else "max",
        logit_bias=random.random() < 0.3,
        expert_bias=kind == "topk" and random.random() < 0.5,
        bias_update_rate=1e-2,
    )


def _balance(random: Random, num_experts: int) -> BalanceConfig:
    def coefficient() -> float:
        return random.choice((0.0, 0.1, 0.3))

    return BalanceConfig(
        microbatch=coefficient(),
        sequence=coefficient(),
        sequence_mean=random.choice(("sequences", "tokens")),
        global_batch=coefficient(),
        device=coefficient(),
        device_groups=random.choice((2, 4)),
        z=coefficient() / 10,
    )


def _capacity(random: Random) -> CapacityConfig | None:
    if random.random() < 0.5:
        return None
    per: Literal["expert", "device"] = random.choice(("expert", "expert", "device"))
    return CapacityConfig(
        factor=random.choice((0.7, 1.0, 1.5)),
        per=per,
        device_groups=random.choice((2, 4)) if per == "device" else 1,
        drop=random.choice(("probability", "position")),
        scope=random.choice(("full", "local")),
        pad=per == "expert" and random.random() < 0.5,
    )
