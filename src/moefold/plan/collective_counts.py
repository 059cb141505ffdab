"""Every collective of one step of a moefold run on one rank: name, group, how often, and how many bytes.

Counted as the ledger counts: bytes that the rank passes to the collective, forward and backward, with even routing. The
dry run, which executes the step, finds the same numbers; a test compares the two, byte for byte.

    who sends                   what
    sharded data parallelism    all_gather of weights, reduce_scatter of gradients: per microbatch, or per step
    tensor parallelism          all_gather of tokens before a sharded matmul, reduce_scatter after
    context parallelism         keys and values around the ring, their gradients back
    expert parallelism          dispatch of counts, rows and probs, combine (`plan/expert_messages.py`)
    the pipeline                hidden states forward, gradients backward
    the end of the step         partial gradients, losses, counts, the norm

Of the T tokens of a microbatch a rank's context shard has S, of which t are on this rank. An all_gather takes t tokens
and its backward reduces S; a reduce_scatter takes S, in `precision.tp_reduce`, and its backward gathers t.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from moefold.blueprint.flat_layout import MEBIBYTE, FlatBucket, even_part, fill_buckets
from moefold.blueprint.narrow_matmuls import code_bytes, gather_casts, scales_by_grid
from moefold.blueprint.param_groups import is_trained
from moefold.blueprint.parameters import ParameterSpec, is_expert, moe_block_names, parameters
from moefold.blueprint.row_bounds import bounds_rows
from moefold.blueprint.sharding import grid_of, local_shape, partial_axes, shard_dim
from moefold.blueprint.stage_modules import Parts
from moefold.blueprint.stages import StageSpec, stages_of
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.moe import MoEConfig
from moefold.config.precision import BYTES
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem
from moefold.plan.expert_messages import Tally, expert_messages, tokens_of, tp_gather, tp_reduce
from moefold.plan.optimizer_messages import gathered_keys, optimizer_messages
from moefold.plan.stage_contents import flat_layout_of, parts_by_rank
from moefold.schedule.actions import place
from moefold.schedule.names import run_reshards_per_step, schedule_named
from moefold.topology.folded_layout import FoldedLayout, GridName, fold

# Shard and replicate, by grid.
_FLAT_GROUPS: dict[GridName, tuple[str, str]] = {
    "attention": ("dense_shard", "dense_replicate"),
    "expert": ("expert_shard", "expert_replicate"),
}
_DATA_GROUPS = ("dense_shard", "dense_replicate", "expert_shard", "expert_replicate")
# Losses and norms: two sums, five balance losses of a layer, and the norm, in the formats that they are kept in.
_LOSSES, _BALANCE, _NORM = 8, 20, 8
# Keys and values of a group of heads are not cut into smaller messages than this; as in `parallel/ring_attention.py`.
_SMALLEST_MESSAGE = 1 << 16


class Message(NamedTuple):
    """One operation over one group."""

    name: str
    group: str
    count: int  # type: ignore[assignment]
    bytes: int


def messages(run: RunConfig, world: int, rank: int = 0, microbatches: int | None = None) -> tuple[Message, ...]:
    """Those of one step of ``rank``; of ``microbatches`` if given, else of as many as the run's batch has."""
    layout = fold(run.parallel, world)
    number = microbatches or run.data.global_batch // (run.data.micro_batch * layout.size("dp"))
    tally = Tally(layout)
    here = layout.coordinate(rank, "pp")
    parts = parts_by_rank(run)
    _sharding(run, layout, parts[here], rank, number, tally)
    _microbatches(run, layout, here, rank, number, tally)
    _end_of_step(run, layout, parts, rank, tally)
    found = sorted((key, count) for key, count in tally.calls.items())
    return tuple(Message(*key, count, tally.sizes[key]) for key, count in found)


# ---- sharded data parallelism ----


def _sharding(run: RunConfig, layout: FoldedLayout, parts: Parts, rank: int, number: int, tally: Tally) -> None:
    if run.parallel.sharding == "flat":
        _flat_buffers(run, layout, rank, tally)
        return
    held = [spec for spec in parameters(run.model) if parts.holds(spec.name)]
    once = run_reshards_per_step(run.parallel)
    precision = run.precision
    own_routers = precision.gather_format != precision.params
    casts = gather_casts(run)
    for kind, scales in scales_by_grid(casts, held, layout).items():
        # The largest magnitude of every block, from which each rank computes the scale.
        tally.add("all_reduce", _FLAT_GROUPS[kind][0], 4 * scales)
    if once:
        _buckets(run, layout, [spec for spec in held if is_trained(spec.name, run.optim)], tally)
    for grid, specs in _modules(held, own_routers).items():
        is_root, experts = grid == "", grid.endswith(".experts")
        own = ("expert_shard", "expert_replicate") if experts else ("dense_shard", "dense_replicate")
        # FSDP calls groups with the same ranks by one name; what the step reduces itself goes by its own.
        shard, copies = (_known_as(layout, rank, name) for name in own)
        ways = layout.size(own[0])
        sizes = [_padded(local_shape(spec, layout), ways) for spec in specs]
        trained = [size for spec, size in zip(specs, sizes, strict=True) if is_trained(spec.name, run.optim)]
        router = grid.endswith(".router")
        word = BYTES[precision.params if router else precision.gather_format]
        gathered = sum(
            size * code_bytes(casts.get(spec.name), word) for spec, (size, _) in zip(specs, sizes, strict=True)
        )
        reduced = BYTES[precision.reduce_format]
        if once:
            tally.add("all_gather", shard, gathered)
        else:
            # The root and routers stay unsharded from their forward to their backward; layers unshard for both.
            tally.add("all_gather", shard, gathered, number * (1 if is_root or router else 2))
            if trained:
                name, sent = _reduction(run)
                tally.add(name, shard, sum(whole for _, whole in trained) * sent, number)
                tally.add("all_reduce", copies, sum(size for size, _ in trained) * reduced, number)


def _buckets(run: RunConfig, layout: FoldedLayout, held: Sequence[ParameterSpec], tally: Tally) -> None:
    """Gradients of a step that reduces them itself, once: dense ones and experts' apart."""
    each, limit = BYTES[run.precision.reduce_format], int(run.parallel.bucket_mb * MEBIBYTE)
    for grid, shard, copies in (
        ("attention", "dense_shard", "dense_replicate"),
        ("expert", "expert_shard", "expert_replicate"),
    ):
        ways = layout.size(shard)
        mine = [spec for spec in held if grid_of(spec.name) == grid]
        sizes = {spec.name: _padded(local_shape(spec, layout), ways)[1] * each for spec in mine}
        for names in fill_buckets(sizes, limit):
            whole = sum(sizes[name] for name in names)
            name, sent = _reduction(run)
            tally.add(name, shard, whole // each * sent)
            tally.add("all_reduce", copies, whole // ways)


def _reduction(run: RunConfig) -> tuple[str, int]:
    """Of gradients over the ranks that shard them: the collective, and bytes of an element in it."""
    if run.precision.reduce == "bfloat16_all_to_all":
        return "all_to_all", BYTES["bfloat16"]
    return "reduce_scatter", BYTES[run.precision.reduce_format]


def _flat_buffers(run: RunConfig, layout: FoldedLayout, rank: int, tally: Tally) -> None:
    """Per bucket and step: weights once, in the format of the buffer or as codes, and gradients once.

    The even part of a bucket goes by one all_gather and one reduce_scatter, what the last rank owns beyond it by a
    broadcast and an all_reduce; replicas then sum what the rank owns. Frozen weights are gathered once, when loaded.
    In four steps the even part goes by two of each: whole inside of a host, this rank's share of it between hosts.
    """
    each = BYTES[run.precision.reduce_format]
    for bucket in _trained_buckets(run, layout, rank):
        shard, copies = _FLAT_GROUPS[bucket.grid]
        ways = layout.size(shard)
        even, kept = even_part(bucket.size, ways), bucket.element_bytes
        rest = bucket.size - ways * even
        if bucket.num_scales:
            # The largest magnitude of every block, from which each rank computes the scale.
            tally.add("all_reduce", shard, bucket.num_scales * 4)
        name, sent = _reduction(run)
        if even and 1 < bucket.inside < ways:
            of_place = ways // bucket.inside * even
            tally.add("reduce_scatter", f"{shard}_inside", ways * even * each)
            tally.add(name, f"{shard}_across", of_place * sent)
            tally.add("all_gather", f"{shard}_across", even * kept)
            tally.add("all_gather", f"{shard}_inside", of_place * kept)
        elif even:
            tally.add("all_gather", shard, even * kept)
            tally.add(name, shard, ways * even * sent)
        if rest:
            tally.add("broadcast", shard, rest * kept)
            tally.add("all_reduce", shard, rest * each)
        if owned := bucket.owned(ways, layout.ranks(shard, rank).index(rank)):
            tally.add("all_reduce", copies, len(owned) * each)


def _shard_sizes(run: RunConfig, layout: FoldedLayout, parts: Parts, rank: int) -> dict[str, int]:
    """Elements of the gradients that this rank has after they were summed over data-parallel ranks, by name."""
    if run.parallel.sharding == "flat":
        return {
            name: size
            for bucket in _trained_buckets(run, layout, rank)
            for name, size in _owned_sizes(bucket, layout, rank).items()
        }
    return {
        spec.name: _padded(local_shape(spec, layout), layout.size(_FLAT_GROUPS[grid_of(spec.name)][0]))[0]
        for spec in parameters(run.model)
        if parts.holds(spec.name) and is_trained(spec.name, run.optim)
    }


def _trained_buckets(run: RunConfig, layout: FoldedLayout, rank: int) -> list[FlatBucket]:
    return [bucket for bucket in flat_layout_of(run, layout, layout.coordinate(rank, "pp")) if bucket.trained]


def _owned_sizes(bucket: FlatBucket, layout: FoldedLayout, rank: int) -> dict[str, int]:
    shard = _FLAT_GROUPS[bucket.grid][0]
    owned = bucket.owned(layout.size(shard), layout.ranks(shard, rank).index(rank))
    cuts = {each.name: min(owned.stop, each.stop) - max(owned.start, each.start) for each in bucket.parameters}
    return {name: size for name, size in cuts.items() if size > 0}


def _modules(held: Iterable[ParameterSpec], own_routers: bool) -> dict[str, list[ParameterSpec]]:
    """Parameters by the module that unshards them: experts, layers, MTP modules, and the root for the rest.

    Routers are apart where the others are cast before they are sent.
    """
    found: dict[str, list[ParameterSpec]] = {}
    for spec in held:
        first, number, *inner = spec.name.split(".")
        module = f"{first}.{number}" if first in ("layers", "mtp") else ""
        if is_expert(spec.name):
            module += ".experts"
        elif own_routers and "router" in inner:
            module += ".router"
        found.setdefault(module, []).append(spec)
    return found


def _known_as(layout: FoldedLayout, rank: int, name: str) -> str:
    """The first data-parallel group with the same ranks; dense ones come first."""
    return next(known for known in _DATA_GROUPS if layout.ranks(known, rank) == layout.ranks(name, rank))


def _padded(shape: tuple[int, ...], ways: int) -> tuple[int, int]:
    """Elements of a shard, and of all shards together; the last one is padded."""
    dim = shard_dim(shape, ways)
    shard = prod(shape) // shape[dim] * -(-shape[dim] // ways)
    return shard, shard * ways


# ---- what every microbatch sends ----


def _microbatches(run: RunConfig, layout: FoldedLayout, here: int, rank: int, number: int, tally: Tally) -> None:
    stages = stages_of(run.model, run.parallel)
    holder = place(run.parallel.pp, run.parallel.vpp, schedule_named(run.parallel.schedule).placement)
    for stage in stages:
        if holder[stage.index] != here:
            continue
        _stage(run, layout, stage, rank, number, tally)
        tokens = tokens_of(run, layout)
        sent = tokens.mine * run.model.dim * tokens.word
        for other, border in ((stage.index + 1, stage.index), (stage.index - 1, stage.index - 1)):
            if 0 <= other < len(stages) and holder[other] != here:
                tally.add("send", "pp", sent, number * _streams(stages, border))


def _streams(stages: tuple[StageSpec, ...], border: int) -> int:
    """How many hidden states cross the border after this stage: one, and one per MTP module that has run."""
    return 1 + sum(len(stage.mtp) for stage in stages[: border + 1])


def _stage(run: RunConfig, layout: FoldedLayout, stage: StageSpec, rank: int, number: int, tally: Tally) -> None:
    model = run.model
    for _ in range(int(stage.embedding) + len(stage.mtp)):
        embedding_messages(run, layout, number, tally)
    blocks = [*stage.layers, *(model.num_layers + module for module in stage.mtp)]
    for is_moe, count in Counter(model.is_moe_layer(layer) for layer in blocks).items():
        block_messages(run, layout, rank, is_moe, number * count, tally)
    if stage.loss:
        for _ in range(1 + model.num_mtp):
            loss_messages(run, layout, number, tally)


# ---- once per step ----


def _end_of_step(run: RunConfig, layout: FoldedLayout, parts: tuple[Parts, ...], rank: int, tally: Tally) -> None:
    each = BYTES[run.precision.params]
    partial: dict[str, dict[str, int]] = {}
    shards = _shard_sizes(run, layout, parts[layout.coordinate(rank, "pp")], rank)
    for spec in parameters(run.model):
        if spec.name not in shards:
            continue
        for axis in partial_axes(spec):
            partial.setdefault(axis, {})[spec.name] = shards[spec.name] * each
        others = sum(each_rank.holds(spec.name) for each_rank in parts) - 1
        if others:
            tally.add("send", "pp", shards[spec.name] * each, others)
    for axis, sizes in partial.items():
        for names in fill_buckets(sizes, int(run.parallel.bucket_mb * MEBIBYTE)):
            tally.add("all_reduce", axis, sum(sizes[name] for name in names))
    for axis in ("dp", "cp", "pp"):
        tally.add("all_reduce", axis, _LOSSES)
    experts = run.model.moe.num_experts if run.model.moe is not None else 0
    # Assignments per expert: before dropping, after it, and of the plain top-k.
    layers = len(moe_block_names(run.model))
    counts = 3 * layers * experts * 8
    if bounds_rows(run) and layout.size("expert_block") > 1:
        # And rows that did not fit.
        counts += 8
    for size in (_BALANCE * layers, counts, _NORM):
        tally.add("all_reduce", "world", size)
    optimizer_messages(run, layout, rank, tally)


# ---- tokens of a microbatch, in each part of the model ----


def embedding_messages(run: RunConfig, layout: FoldedLayout, times: int, tally: Tally) -> None:
    """Each rank looks up its shard of the vocabulary; their sum is the embedding. Frozen, it has no backward."""
    is_updated = is_trained("embedding.weight", run.optim)
    tp_reduce(run, layout, run.model.dim, times, tally, backward=is_updated, in_chunks=False)


def loss_messages(run: RunConfig, layout: FoldedLayout, times: int, tally: Tally) -> None:
    """Tokens are gathered, each rank has its shard of the vocabulary, two numbers per token are reduced."""
    tokens = tokens_of(run, layout)
    tp_gather(run, layout, run.model.dim, times, tally, in_chunks=False)
    tally.add("all_gather", "tp", tokens.shared * tokens.wide, times)
    tally.add("all_reduce", "tp", tokens.shared * tokens.wide, times)


def block_messages(run: RunConfig, layout: FoldedLayout, rank: int, is_moe: bool, times: int, tally: Tally) -> None:
    """One layer, forward and backward."""
    again = "attention" in run.memory.recompute
    _attention(run, layout, times, again, tally)
    if layout.size("cp") > 1:
        _context(run, layout, rank, times, again, tally)
    moe = run.model.moe
    if not is_moe or moe is None:
        tp_gather(run, layout, run.model.dim, times, tally, "feed_forward" in run.memory.recompute)
        tp_reduce(run, layout, run.model.dim, times, tally)
        return
    if moe.shared_hidden_dim:
        recomputed = "experts" in run.memory.recompute
        tp_gather(run, layout, run.model.dim, times, tally, recomputed)
        tp_reduce(run, layout, run.model.dim, times, tally, recomputed)
    _balance(run, layout, moe, times, tally)
    expert_messages(run, layout, rank, moe, times, tally)


def _attention(run: RunConfig, layout: FoldedLayout, times: int, again: bool, tally: Tally) -> None:
    attention, dim = run.model.attention, run.model.dim
    if isinstance(attention, MLAConfig):
        tp_gather(run, layout, attention.q_latent or dim, times, tally, again)
        tp_gather(run, layout, attention.kv_latent + attention.rope_dim, times, tally, again)
    else:
        tp_gather(run, layout, dim, times, tally, again)
        if attention.qk_norm == "full":
            # Squares of the other ranks' heads, of queries and of keys, forward and backward.
            tokens = tokens_of(run, layout)
            tally.add("all_reduce", "tp", tokens.shared * tokens.wide, times * 2 * (2 + again))
    tp_reduce(run, layout, dim, times, tally)


# ---- context ----


def _context(run: RunConfig, layout: FoldedLayout, rank: int, times: int, again: bool, tally: Tally) -> None:
    """The ring: tokens are sharded in zigzag, so a rank sends both chunks to ranks before it, one to those after."""
    attention, tokens, cp = run.model.attention, tokens_of(run, layout), layout.size("cp")
    if run.parallel.context.full != "ring" or (
        isinstance(attention, GQAConfig) and (attention.window is not None or attention.chunk is not None)
    ):
        what = "only a ring over whole documents is counted, not all-to-all over heads, windows or chunks"
        raise ConfigError(Problem("parallel.context", what, "use ring"))
    heads, entries = _keys(attention, layout.size("tp"))
    kept = tokens.shared * heads * entries * tokens.word
    slices = min(heads, max(1, kept // _SMALLEST_MESSAGE))
    place = layout.coordinate(rank, "cp")
    sent = arriving = 0
    for other in range(cp):
        if other != place:
            sent += tokens.shared // 2 * (2 if other < place else 1)
            arriving += tokens.shared // 2 * (2 if place < other else 1)
    group, calls = f"context_{cp}", slices * (cp - 1)
    rounds = 2 + again
    tally.calls["send", group] += times * calls * (rounds + 1)
    tally.sizes["send", group] += times * heads * entries * (rounds * sent * tokens.word + arriving * tokens.wide)
    gathered_keys(run, layout, times * (1 + again), tally)


def _keys(attention: GQAConfig | MLAConfig, tp: int) -> tuple[int, int]:
    """Key heads of this rank, and entries of a key and a value together."""
    if isinstance(attention, MLAConfig):
        return attention.num_heads // tp, attention.nope_dim + attention.rope_dim + attention.value_dim
    return attention.num_kv_heads // tp, 2 * attention.head_dim


# ---- experts ----


def _balance(run: RunConfig, layout: FoldedLayout, moe: MoEConfig, times: int, tally: Tally) -> None:
    """Counts for the balance losses, summed over the ranks that share the tokens or over all."""
    balance, context = moe.balance, f"context_{layout.size('cp')}"
    for coefficient, sets in (
        (balance.microbatch, 1),
        (balance.sequence, run.data.micro_batch),
        (balance.device, 1),
    ):
        if coefficient:
            for group in ("tp", context):
                tally.add("all_reduce", group, sets * moe.num_experts * 8, times)
    if balance.global_batch:
        tally.add("all_reduce", "stage", moe.num_experts * 8, times)
