"""How tensor and expert parallelism shard each parameter: one table from name patterns to (axis, dim).

    tp  shards dense matrices by heads or hidden dim, and the vocabulary
    ep  shards the stack of experts
    etp shards every expert's hidden dim

What no rule shards is replicated along the axis. The same table is read for bytes, for placements and for checkpoints.
Sharded data parallelism then cuts once more whatever is left, along `shard_dim`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moefold.blueprint.lora_adapters import weight_of
from moefold.blueprint.parameters import ParameterSpec, is_expert
from moefold.topology.folded_layout import FoldedLayout, GridName


@dataclass(frozen=True)
class Cut:
    """Equal contiguous pieces of `dim`, one per position along `axis`."""

    axis: str
    dim: int


@dataclass(frozen=True)
class ShardRule:
    """Names that match `pattern` (without the block they are in) are sharded over `axis` along `dim`."""

    pattern: str
    axis: str
    dim: int


# A layer, or the layer inside of an MTP module.
_BLOCK = re.compile(r"^(layers\.\d+|mtp\.\d+\.block)\.")

RULES = (
    ShardRule("embedding.weight", "tp", 0),
    ShardRule("head.weight", "tp", 0),
    # Heads: projections to them by rows, from them by columns.
    ShardRule("attention.[qkv].weight", "tp", 0),
    ShardRule("attention.[qkv].bias", "tp", 0),
    ShardRule("attention.q_up.weight", "tp", 0),
    ShardRule("attention.kv_up.weight", "tp", 0),
    ShardRule("attention.sinks", "tp", 0),
    ShardRule("attention.out.weight", "tp", 1),
    # Linear attention: rows are grouped by key head. Its convolution is whole on every rank.
    ShardRule("attention.qkvz.weight", "tp", 0),
    ShardRule("attention.ba.weight", "tp", 0),
    ShardRule("attention.A_log", "tp", 0),
    ShardRule("attention.dt_bias", "tp", 0),
    ShardRule("attention.linear_out.weight", "tp", 1),
    ShardRule("recurrence.in.weight", "tp", 0),
    ShardRule("recurrence.out.weight", "tp", 1),
    # Hidden dims: gate and up are stacked [2, F, D], so dim 1 gives a rank the same columns of both.
    ShardRule("feed_forward.gate_up", "tp", 1),
    ShardRule("feed_forward.down", "tp", 1),
    ShardRule("feed_forward.shared.gate_up", "tp", 1),
    ShardRule("feed_forward.shared.down", "tp", 1),
    # Experts, and inside each its hidden dim.
    ShardRule("feed_forward.experts.*", "ep", 0),
    ShardRule("feed_forward.experts.gate_up", "etp", 2),
    ShardRule("feed_forward.experts.gate_up_bias", "etp", 2),
    ShardRule("feed_forward.experts.down", "etp", 2),
)


def rules_for(name: str) -> tuple[ShardRule, ...]:
    inner = _BLOCK.sub("", name)
    return tuple(rule for rule in RULES if fnmatchcase(inner, rule.pattern))


def cuts(spec: ParameterSpec) -> tuple[Cut, ...]:
    """The table, and one case that the name does not tell: a norm over all heads at once is sharded with the heads."""
    if spec.spans_heads:
        return (Cut("tp", 0),)
    if spec.weight_dims:
        return _adapter_cuts(spec)
    return tuple(Cut(rule.axis, rule.dim) for rule in rules_for(spec.name))


def _adapter_cuts(spec: ParameterSpec) -> tuple[Cut, ...]:
    """As those of its weight: of A along the input, of B along the output, and of both along the stack of experts."""
    inner, rules = spec.weight_dims - 1, rules_for(weight_of(spec.name))
    if spec.kind == "lora_b":
        return tuple(Cut(rule.axis, rule.dim) for rule in rules if rule.dim < inner)
    last = len(spec.shape) - 1
    return tuple(
        Cut(rule.axis, last if rule.dim == inner else 0) for rule in rules if rule.dim == inner or _is_ep(rule)
    )


def _is_ep(rule: ShardRule) -> bool:
    return rule.axis == "ep"


def grid_of(name: str) -> GridName:
    return "expert" if is_expert(name) else "attention"


def partial_axes(spec: ParameterSpec) -> tuple[str, ...]:
    """Axes along which the parameter is replicated but sees different tokens, heads or partial sums.

    Gradients must be summed over them, beside the data-parallel axes. A dense parameter that tp does not cut sees each
    rank's share of the tokens (norms, router, latent projections, the join of an MTP module) or of the heads (a norm
    per head). An expert's output bias joins outputs that are partial sums over etp: however the ranks share adding it,
    they share its gradient.
    """
    axis = "etp" if is_expert(spec.name) else "tp"
    return () if any(cut.axis == axis for cut in cuts(spec)) else (axis,)


def local_shape(spec: ParameterSpec, layout: FoldedLayout) -> tuple[int, ...]:
    """What any one rank holds before sharded data parallelism; all ranks hold equally much."""
    shape = list(spec.shape)
    for cut in cuts(spec):
        ways = layout.size(cut.axis)
        assert shape[cut.dim] % ways == 0, f"{spec.name} {spec.shape} does not divide over {cut.axis}={ways}"
        shape[cut.dim] //= ways
    return tuple(shape)


def local_slices(spec: ParameterSpec, layout: FoldedLayout, rank: int) -> tuple[slice, ...]:
    """The region of the global tensor that this rank holds before sharded data parallelism."""
    local = local_shape(spec, layout)
    position = {cut.dim: layout.coordinate(rank, cut.axis) for cut in cuts(spec)}
    starts = [position.get(dim, 0) * size for dim, size in enumerate(local)]
    return tuple(slice(start, start + size) for start, size in zip(starts, local))


def shard_dim(local_shape: tuple[int, ...], ways: int) -> int:
    """The dim that sharded data parallelism shards: the first that divides evenly, else dim 0 unevenly."""
    return next((dim for dim, size in enumerate(local_shape) if size % ways == 0), 0)


def data_sharded_box(spec: ParameterSpec, layout: FoldedLayout, rank: int) -> tuple[slice, ...]:
    """The region that this rank holds under `parallel.sharding: fsdp`."""
    group = "expert_shard" if grid_of(spec.name) == "expert" else "dense_shard"
    return chunk_box(local_slices(spec, layout, rank), layout.index(group, rank), layout.size(group))


def chunk_box(box: tuple[slice, ...], index: int, ways: int) -> tuple[slice, ...]:
    """Chunk `index` of the box along its `shard_dim`, as `torch.chunk` does: full ones first, then the rest."""
    sizes = tuple(part.stop - part.start for part in box)
    dim = shard_dim(sizes, ways)
    chunk = -(-sizes[dim] // ways)
    start = min(chunk * index, sizes[dim])
    stop = min(start + chunk, sizes[dim])
    first = box[dim].start
    return (*box[:dim], slice(first + start, first + stop), *box[dim + 1 :])
