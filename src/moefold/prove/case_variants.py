"""Variants of a drawn case: options of models that came later than the order of draws.

Each is drawn from the case's own number: one more draw from the sequence would change all cases of every seed. What the
checks refuse for a run is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Literal, get_args

from moefold.checks.retained_steps import PAGED_STEPS
from moefold.checks.run_all import problems
from moefold.config.attention import GatedDeltaNetConfig, GQAConfig, Llama3RopeConfig
from moefold.config.memory import MemoryConfig, RetainedStep, Retention
from moefold.config.model import LoraConfig, ModelConfig
from moefold.config.parallel import EchoConfig, RankOrderConfig
from moefold.config.precision import CastBackend, GraphScope, PrecisionConfig, RowPadding
from moefold.config.precision_recipes import DispatchFormat, RecipeName
from moefold.config.run import RunConfig
from moefold.prove.narrow_cases import DRAWN_RECIPES, PROVED_RECIPES, fit_blocks, shares_amaxes_of_shares
from moefold.topology.folded_layout import DENSE_ORDERS, EXPERT_ORDERS

# Of the cases in float64, those that are given a precision recipe; some of them cannot have it.
_RECIPE_SHARE = 0.45
# Of all cases, those that are given bounds of rows; some of them cannot have them.
_BOUNDED_SHARE = 0.2


def with_hybrids(run: RunConfig, world: int) -> RunConfig:
    """Layers of linear attention, gated attention and norms centred at zero, where the run may have them.

    Drawn from the case's own number, as savings are. Linear attention not in bfloat16: it norms outputs that may be
    nearly zero, and at these sizes gradients would be rounding.
    """
    random, model = Random(f"hybrids of {run.seed}"), run.model
    # Chunks shorter than most sequences, so that states pass between them.
    key_heads = max(2, run.parallel.tp)
    linear = GatedDeltaNetConfig(
        key_heads, key_heads * random.choice((1, 2)), 4, 6, random.choice((2, 4)), random.choice((2, 3)), chunk_size=4
    )
    if random.random() < 0.7 and run.precision.compute != "bfloat16":
        run = unless_refused(run, replace(run, model=replace(run.model, linear_attention=linear)), world)
    if random.random() < 0.3:
        run = unless_refused(run, replace(run, model=replace(run.model, norm_scale="one_plus_weight")), world)
    if isinstance(model.attention, GQAConfig) and random.random() < 0.4:
        attention = replace(model.attention, output_gate=True)
        run = unless_refused(run, replace(run, model=replace(run.model, attention=attention)), world)
    return run


def with_overlaps(run: RunConfig, world: int) -> RunConfig:
    """Shared experts beside dispatch and combine in half of the cases that may have it, tokens in chunks in most; half
    of those with tensor parallelism, and most of those that exchange heads, do so in chunks."""
    if Random(f"overlaps of {run.seed}").random() >= 0.5:
        beside = replace(run, parallel=replace(run.parallel, overlap=("shared_experts",)))
        run = unless_refused(run, beside, world)
    random = Random(f"tensor parallelism of {run.seed}")
    tp_chunks = random.choice((2, 2, 3, 5))
    if random.random() < 0.5:
        parallel = replace(run.parallel, overlap=(*run.parallel.overlap, "tensor_parallel"), tp_chunks=tp_chunks)
        run = unless_refused(run, replace(run, parallel=parallel), world)
    random = Random(f"ulysses of {run.seed}")
    ulysses_chunks = random.choice((2, 2, 3, 5))
    if random.random() < 0.7:
        parallel = replace(run.parallel, overlap=(*run.parallel.overlap, "ulysses"), ulysses_chunks=ulysses_chunks)
        run = unless_refused(run, replace(run, parallel=parallel), world)
    random = Random(f"chunks of {run.seed}")
    chunks = random.choice((2, 2, 3, 4))
    if random.random() < 0.2:
        return run
    return unless_refused(run, replace(run, parallel=replace(run.parallel, exchange_chunks=chunks)), world)


def with_attention_variants(run: RunConfig, world: int) -> RunConfig:
    """Partial RoPE and norms after it; layers without RoPE, chunks, and norms without weights."""
    random, attention = Random(f"attention of {run.seed}"), run.model.attention
    if not isinstance(attention, GQAConfig):
        return run
    rope_dim = random.choice((None, None, 4, 2))
    when: Literal["before_rope", "after_rope"] = random.choice(("before_rope", "after_rope"))
    choices: list[Callable[[GQAConfig], GQAConfig]] = [
        lambda attention: replace(attention, rope_dim=rope_dim),
        lambda attention: replace(attention, qk_norm_when=when),
    ]
    if random.random() < 0.4:
        choices.append(lambda attention: replace(attention, nope_every=2, nope_temperature=0.3, nope_floor=3))
        choices.append(lambda attention: replace(attention, chunk=4))
    if random.random() < 0.2:
        choices.append(lambda attention: replace(attention, qk_norm="unit"))
    for change in choices:
        assert isinstance(run.model.attention, GQAConfig)
        run = unless_refused(run, replace(run, model=replace(run.model, attention=change(run.model.attention))), world)
    return run


def with_interleaved_layers(run: RunConfig, world: int) -> RunConfig:
    """Dense and MoE layers in turn, probs on the experts' inputs, Llama 3.1's RoPE."""
    random, rope, moe = Random(f"layers of {run.seed}"), run.model.rope, run.model.moe
    assert moe is not None
    choices: tuple[Callable[[ModelConfig], ModelConfig], ...] = (
        lambda model: replace(model, moe_every=2),
        lambda model: replace(model, moe=replace(moe, weight_at="input")),
        lambda model: replace(model, rope=replace(rope, yarn=None, llama3=Llama3RopeConfig(4.0, 8))),
    )
    for change in choices:
        if random.random() < 0.3:
            run = unless_refused(run, replace(run, model=change(run.model)), world)
    return run


def with_finetuning(run: RunConfig, world: int) -> RunConfig:
    """Adapters and frozen parameters in a quarter of the cases; in float64, where frozen weights are not narrower."""
    random = Random(f"fine-tuning of {run.seed}")
    targets = random.choice((LoraConfig().targets, ("*.experts.*",), ("*.attention.*", "*.shared.*")))
    lora = LoraConfig(rank=random.randint(1, 5), alpha=random.choice((1.0, 8.0)), targets=targets)
    frozen = random.choice((("*.router.*",), ("embedding.*",), ("layers.0.*", "*norm*"), ()))
    trained: Literal["all", "adapters"] = random.choice(("all", "adapters", "adapters"))
    if random.random() < 0.15:
        run = unless_refused(
            run,
            replace(run, model=replace(run.model, lora=lora), optim=replace(run.optim, trained=trained)),
            world,
        )
    if random.random() < 0.15:
        run = unless_refused(run, replace(run, optim=replace(run.optim, frozen=frozen)), world)
    return run


def with_recipes(run: RunConfig, world: int) -> RunConfig:
    """A precision recipe in about a third of the cases, with sizes in which layouts cut between its blocks.

    Features and tokens fill more than one block of some of them. A recipe has no fused experts and no adapters.
    """
    random = Random(f"recipes of {run.seed}")
    name: RecipeName = random.choice(DRAWN_RECIPES)
    casts: CastBackend = random.choice(("torch", "native"))
    dim, hidden, seq_len = random.choice((None, 40)), random.choice((None, 40)), random.choice((None, None, 37))
    wide = random.choice((("*.shared_gate",), ("*.shared_gate",), ("layers.0.*",), ("*.attention.*",), ("*.experts",)))
    if random.random() >= _RECIPE_SHARE or name not in PROVED_RECIPES:
        return run
    moe, model, data = run.model.moe, run.model, run.data
    assert moe is not None
    # Padding would lie between rows that are narrowed together (`refuse_unproved`).
    capacity = None if moe.capacity is None else replace(moe.capacity, pad=False)
    moe = replace(moe, capacity=capacity, expert_hidden_dim=hidden or moe.expert_hidden_dim)
    model = replace(model, dim=dim or model.dim, lora=None, moe=moe)
    data = replace(data, seq_len=seq_len or data.seq_len)
    changed = replace(run, model=model, data=data, kernels=replace(run.kernels, experts="sequential", casts=casts))
    changed = replace(changed, precision=replace(run.precision, recipe=name, wide=wide))
    return run if shares_amaxes_of_shares(changed) else unless_refused(run, fit_blocks(changed), world)


def with_narrow_savings(run: RunConfig, world: int) -> RunConfig:
    """What goes with a recipe: rows sent as codes (without one too), weights gathered as codes, inputs kept as codes,
    where rows are padded, a scale per token."""
    random = Random(f"narrow savings of {run.seed}")
    dispatch: DispatchFormat = random.choice(get_args(DispatchFormat))
    padding: RowPadding = random.choice(get_args(RowPadding))
    quantized = [step for step in get_args(RetainedStep) if random.random() < 0.6]
    share = 0.15 if run.precision.recipe is None else 0.4
    choices: list[tuple[float, Callable[[PrecisionConfig], PrecisionConfig]]] = [
        (share, lambda precision: replace(precision, dispatch=dispatch)),
        (0.8, lambda precision: replace(precision, gather="narrow")),
        (0.25, lambda precision: replace(precision, down_input="per_token")),
    ]
    for part, change in choices:
        if random.random() < part:
            run = unless_refused(run, replace(run, precision=change(run.precision)), world)
    run = unless_refused(run, replace(run, kernels=replace(run.kernels, row_padding=padding)), world)
    for step in quantized if run.precision.recipe is not None and random.random() < 0.6 else ():
        narrow: dict[str, Retention] = {step: "quantize"}
        retain = replace(run.memory.retain, **narrow)
        run = unless_refused(run, replace(run, memory=replace(run.memory, retain=retain)), world)
    return run


def with_clones(run: RunConfig, world: int) -> RunConfig:
    """Clones of hot experts in a third of the cases that can have them."""
    random = Random(f"clones of {run.seed}")
    echo = EchoConfig(slots=random.choice((1, 1, 2)), min_rows=random.choice((1, 1, 3)))
    if random.random() < 0.35:
        run = unless_refused(run, replace(run, parallel=replace(run.parallel, echo=echo)), world)
    return run


def with_row_bounds(run: RunConfig, world: int) -> RunConfig:
    """Dropless without a host read in a fifth of the cases; small bounds, so that some steps run twice."""
    random = Random(f"row bounds of {run.seed}")
    row, more = random.choice((1.0, 1.1, 1.25, 2.0)), random.choice((1.0, 1.2, 2.0))
    if random.random() >= _BOUNDED_SHARE:
        return run
    bounds = replace(
        run.parallel, dispatcher="all_to_all_bounded", ep_inner=1, row_bound=row, pair_bound=round(row * more, 3)
    )
    run = unless_refused(run, replace(run, parallel=bounds), world)
    return _with_pages(random, run, world)


def _with_pages(random: Random, run: RunConfig, world: int) -> RunConfig:
    """Of what experts keep some steps in pages, in half of the cases; few pages of few rows, so that they run out."""
    how = {"page_bound": random.choice((1.0, 1.1, 2.0)), "page_spill": random.choice((0.0, 0.0, 0.4))}
    paged: tuple[RetainedStep, ...] = tuple(step for step in PAGED_STEPS if random.random() < 0.7)
    rows = random.choice((1, 3, 64))
    if random.random() < 0.5:
        return run
    for step in paged:
        paged_step: dict[RetainedStep, Retention] = {step: "page"}
        retain = replace(run.memory.retain, **paged_step)
        memory = replace(run.memory, retain=retain, page_rows=rows, **how)  # type: ignore[arg-type]
        run = unless_refused(run, replace(run, memory=memory), world)
    return run


def with_graphs(run: RunConfig, world: int) -> RunConfig:
    """Captured phases in half of the cases that can have them, with the sharding, order and documents that they need.

    Experts in float64 read counts, so what lies between exchanges is not among them. Narrower cases replay the
    reference's routing by the identity of batches, of which a graph has its own.
    """
    random, moe = Random(f"graphs of {run.seed}"), run.model.moe
    scopes: tuple[tuple[GraphScope, ...], ...] = (("attn",), ("moe_router",), ("attn", "moe_router"), ("attn", "mlp"))
    scope = random.choice(scopes)
    if random.random() < 0.5 or run.precision.compute != "float64":
        return run
    assert moe is not None
    moe = replace(moe, balance=replace(moe.balance, global_batch=0.0))
    schedule = "1f1b" if run.parallel.vpp == 1 else "interleaved"
    changed = replace(
        run,
        model=replace(run.model, moe=moe),
        parallel=replace(run.parallel, sharding="flat", schedule=schedule, dynamic_cp=False),
        data=replace(run.data, packing="concat"),
        memory=MemoryConfig(optimizer=run.memory.optimizer),
        optim=replace(run.optim, qk_clip=None),
        kernels=replace(run.kernels, graphs="partial", graph_scope=scope),
    )
    return unless_refused(run, changed, world)


def with_rank_order(run: RunConfig, world: int) -> RunConfig:
    """Any order of the axes of both grids in half of the cases; the attention grid of some cannot have it."""
    random = Random(f"order of {run.seed}")
    if random.random() < 0.5:
        return run
    order = RankOrderConfig(expert=random.choice(EXPERT_ORDERS))
    run = replace(run, parallel=replace(run.parallel, rank_order=order))
    both = replace(run.parallel, rank_order=replace(order, dense=random.choice(DENSE_ORDERS)))
    return unless_refused(run, replace(run, parallel=both), world)


def with_exchanges(run: RunConfig) -> RunConfig:
    """Rows of experts by gloo in half of the cases, through shared memory in the others."""
    if Random(f"exchanges of {run.seed}").random() < 0.5:
        return replace(run, parallel=replace(run.parallel, cpu_exchange="gloo"))
    return run


def with_four_steps(run: RunConfig, world: int) -> RunConfig:
    """Of flat buffers, most are summed and gathered inside of hosts and between them."""
    random = Random(f"four steps of {run.seed}")
    sizes = random.sample((2, 4), 2)
    if run.parallel.sharding != "flat" or random.random() < 0.2:
        return run
    for size in sizes:
        parallel = replace(run.parallel, param_sync="hierarchical", ranks_per_host=size)
        if not problems(changed := replace(run, parallel=parallel), world):
            return changed
    return run


# Of gradients in float64: from a norm by itself to about a layer of a case's model.
SMALL_BUCKETS_MB = (0.001, 0.01, 0.1)


def with_small_buckets(run: RunConfig) -> RunConfig:
    """Of flat buffers, half are of a layer or less, which travel while other layers compute."""
    random = Random(f"buckets of {run.seed}")
    if run.parallel.sharding != "flat" or random.random() < 0.5:
        return run
    return replace(run, parallel=replace(run.parallel, bucket_mb=random.choice(SMALL_BUCKETS_MB)))


def unless_refused(run: RunConfig, changed: RunConfig, world: int) -> RunConfig:
    return run if problems(changed, world) else changed
