"""What a set of cases covered: every claim of the proof with the number of cases behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.moe import MoEConfig
from moefold.prove.cases import Case
from moefold.prove.verdict import Verdict


def features_of(case: Case) -> Iterator[tuple[str, str]]:
    """(group, feature) pairs of one case."""
    yield from _layout_features(case)
    yield from _attention_features(case)
    if case.run.model.moe is not None:
        yield from _moe_features(case.run.model.moe)
    yield "batch", "several waves" if case.num_waves > 1 else "one wave"
    if case.run.model.tied_embeddings:
        yield "model", "tied embeddings"
    if case.run.model.num_dense_layers:
        yield "model", "dense layers first"


def _layout_features(case: Case) -> Iterator[tuple[str, str]]:
    parallel, layout = case.run.parallel, case.layout
    sizes = {axis: layout.size(axis) for axis in ("tp", "dp", "ep", "etp", "edp")}
    for axis, size in sizes.items():
        yield f"{axis} =", str(size)
    alone = sizes["ep"] * sizes["etp"] == 1
    yield "dispatcher", "local" if alone else parallel.dispatcher
    if not alone and sizes["etp"] > 1:
        yield "dispatcher", f"{parallel.dispatcher} with etp"
    if sizes["ep"] > sizes["dp"]:
        yield "folding", "ep > dp (over tp)"
    if sizes["etp"] != sizes["tp"]:
        yield "folding", "etp != tp"
    for what, copies, ways in (
        ("dense", parallel.dp_replicate, sizes["dp"]),
        ("experts", parallel.edp_replicate, sizes["edp"]),
    ):
        if copies > 1:
            yield "hybrid sharding", f"{what}: " + ("copies only" if copies == ways else "copies of shards")


def _attention_features(case: Case) -> Iterator[tuple[str, str]]:
    attention, rope = case.run.model.attention, case.run.model.rope
    yield "attention", attention.kind
    if isinstance(attention, MLAConfig):
        yield "attention", "mla with query latent" if attention.q_latent else "mla without query latent"
    if isinstance(attention, GQAConfig):
        yield "attention", f"qk norm: {attention.qk_norm}"
        for name in ("qkv_bias", "out_bias", "sinks", "window"):
            if getattr(attention, name):
                yield "attention", name
    if rope.yarn is not None:
        yield "attention", "yarn"
    if rope.interleaved:
        yield "attention", "interleaved rope"


def _moe_features(moe: MoEConfig) -> Iterator[tuple[str, str]]:
    router = moe.router
    yield "routing", router.kind
    yield "routing", f"{router.score} {router.score_when}"
    if router.num_groups > 1:
        yield "routing", f"group-limited ({router.group_score})"
    if router.expert_bias:
        yield "routing", "loss-free bias"
    for name in ("microbatch", "sequence", "global_batch", "device", "z"):
        if getattr(moe.balance, name):
            yield "balance", name
    if moe.capacity is None:
        yield "capacity", "dropless"
    else:
        yield "capacity", f"drop by {moe.capacity.drop}"
        yield "capacity", f"{moe.capacity.scope} scope"
        if moe.capacity.pad:
            yield "capacity", "padded"
    if moe.shared_width:
        yield "experts", "shared, gated" if moe.shared_gate else "shared"
    if moe.latent_width is not None:
        yield "experts", "latent"
    if moe.expert_bias:
        yield "experts", "biases"
    yield "experts", f"weight at {moe.weight_at}"
    yield "experts", moe.activation


def coverage(verdicts: Iterable[Verdict]) -> dict[str, Counter[str]]:
    table: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        for group, feature in features_of(verdict.case):
            table.setdefault(group, Counter())[feature] += 1
        for fact in verdict.facts:
            table.setdefault("happened", Counter())[fact] += 1
    return table
