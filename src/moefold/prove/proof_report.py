"""Verdicts as text and as JSON, what a difference usually means, and which features a set of cases covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from textwrap import wrap
from typing import Any

from moefold.blueprint.stages import stages_of
from moefold.checks.context import modes_in_use
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.moe import MoEConfig
from moefold.config.precision import PrecisionConfig
from moefold.plan.dispatch_choice import dispatcher_in_use
from moefold.prove.cases import Case, case_line
from moefold.prove.mutants import Mutant, caught
from moefold.prove.verdict import Verdict
from moefold.schedule.names import schedule_named
from moefold.tables import text_table


def features_of(case: Case) -> Iterator[tuple[str, str]]:
    """(group, feature) pairs of one case."""
    model = case.run.model
    yield from _layout_features(case)
    yield from _pipeline_features(case)
    yield from _context_features(case)
    yield from _attention_features(case)
    if model.moe is not None:
        yield from _moe_features(model.moe)
    yield "documents", case.run.data.packing
    yield "batch", "several waves" if case.num_waves > 1 else "one wave"
    if model.tied_embeddings:
        yield "model", "tied embeddings" if case.run.parallel.pp == 1 else "tied embeddings over stages"
    if model.num_dense_layers:
        yield "model", "dense layers first"
    if model.moe_every > 1:
        yield "model", "MoE and dense layers in turn"
    yield "MTP modules", str(model.num_mtp)
    if model.num_mtp:
        yield "MTP loss divided by", model.mtp_divisor
    for phase in case.run.memory.recompute or ("nothing",):
        yield "recompute", phase
    yield from _saving_features(case)
    yield from _precision_features(case)


def _saving_features(case: Case) -> Iterator[tuple[str, str]]:
    """The form of sharding, steps that are not kept, the optimizer, and what its states are and where."""
    memory, precision, optim = case.run.memory, case.run.precision, case.run.optim
    yield "sharding", case.run.parallel.sharding
    yield "optimizer states", f"on the {memory.optimizer}"
    if precision.moments is not None:
        yield "optimizer states", f"moments in {precision.moments}, rounded {precision.moments_rounding}"
    if precision.master is not None:
        yield "optimizer states", f"main weights by {precision.master}"
    yield "optimizer", optim.algorithm
    if optim.algorithm == "muon":
        yield "optimizer", f"muon, {case.run.parallel.sharding}"
    if optim.qk_clip is not None:
        yield "optimizer", "QK-clip"
    if case.run.model.lora is not None:
        yield "fine-tuning", f"adapters, {case.run.parallel.sharding}, {optim.trained} trained"
    if optim.frozen:
        yield "fine-tuning", f"frozen parameters, {case.run.parallel.sharding}"
    for step, choice in memory.retained().items():
        if choice != "keep":
            yield "retained steps", f"{step}: {choice}"


def _precision_features(case: Case) -> Iterator[tuple[str, str]]:
    precision, parallel = case.run.precision, case.run.parallel
    yield "precision recipe", precision.recipe or "none"
    if precision.dispatch is not None:
        yield "precision recipe", f"rows sent as {precision.dispatch}"
    if precision.recipe is None:
        return
    yield "precision recipe", f"casts by {case.run.kernels.casts}"
    if parallel.tp * parallel.etp > 1:
        yield "precision recipe", "matrices cut over tp or etp"
    if precision.wide != PrecisionConfig().wide:
        yield "precision recipe", "modules that stay wide"
    if precision.gather == "narrow":
        yield "precision recipe", f"weights gathered as codes, {parallel.sharding}"
    if precision.down_input != PrecisionConfig().down_input:
        yield "precision recipe", f"down projections' inputs: {precision.down_input}"
    yield "precision recipe", f"rows padded by {case.run.kernels.row_padding}"
    if schedule_named(parallel.schedule).splits_backward:
        yield "precision recipe", "deferred weight gradients"


def _layout_features(case: Case) -> Iterator[tuple[str, str]]:
    parallel, layout = case.run.parallel, case.layout
    sizes = {axis: layout.size(axis) for axis in ("pp", "cp", "tp", "dp", "ep", "etp", "edp")}
    for axis, size in sizes.items():
        yield f"{axis} =", str(size)
    alone = sizes["ep"] * sizes["etp"] == 1
    yield "experts", case.run.kernels.experts
    yield "dispatcher", "local" if alone else parallel.dispatcher
    if not alone and sizes["etp"] > 1:
        yield "dispatcher", f"{parallel.dispatcher} with etp"
    if not alone and 1 < parallel.ep_inner < sizes["ep"]:
        yield "dispatcher", "two_level over hosts"
    if not alone and parallel.dispatcher == "adaptive":
        yield "dispatcher", f"adaptive: {dispatcher_in_use(case.run)}"
    if not alone:
        yield "folding", _folding(case)
    if sizes["etp"] != sizes["tp"]:
        yield "folding", "etp != tp"
    for what, replicas, ways in (
        ("dense", parallel.dp_replicate, sizes["dp"]),
        ("experts", parallel.edp_replicate, sizes["edp"]),
    ):
        if replicas > 1:
            yield "hybrid sharding", f"{what}: " + ("replicated" if replicas == ways else "replicated shards")


def _folding(case: Case) -> str:
    """Which axes of the attention grid one full set of experts spans."""
    layout = case.layout
    block = layout.ranks("expert_block", 0)
    spanned = [axis for axis in ("dp", "cp", "tp") if len({layout.index(axis, rank) for rank in block}) > 1]
    return f"experts over {' x '.join(spanned)}" + (" inside a stage" if case.run.parallel.pp > 1 else "")


def _pipeline_features(case: Case) -> Iterator[tuple[str, str]]:
    """Also for one rank: a schedule may have several stages there, defer weight gradients, or overlap."""
    parallel = case.run.parallel
    schedule = schedule_named(parallel.schedule)
    if parallel.pp * parallel.vpp == 1 and not (schedule.splits_backward or schedule.overlaps):
        return
    yield "schedule", schedule.name if parallel.pp > 1 else f"{schedule.name} on one rank"
    yield "vpp =", str(parallel.vpp)
    stages = stages_of(case.run.model, parallel)
    if len(stages) == 1:
        return
    yield "stages", "balanced" if parallel.stages is None else "by string"
    if len({len(stage.layers) for stage in stages}) > 1:
        yield "stages", "of unequal numbers of layers"
    if any(stage.empty for stage in stages):
        yield "stages", "an empty one"
    if any(stage.loss and not (stage.layers or stage.mtp) for stage in stages):
        yield "stages", "the loss alone"
    if any(stage.mtp and not stage.loss for stage in stages):
        yield "stages", "an MTP module before the loss"


def _context_features(case: Case) -> Iterator[tuple[str, str]]:
    parallel = case.run.parallel
    if max(case.layout.context_sizes(parallel.dynamic_cp)) == 1:
        return
    for layers, mode in modes_in_use(case.run).items():
        yield "context", f"{mode} in {layers} layers"
        if mode == "hierarchical":
            yield "context", f"hierarchical in sets of {parallel.context.inner}"
    if parallel.dynamic_cp:
        yield "context", "dynamic"


def _attention_features(case: Case) -> Iterator[tuple[str, str]]:
    attention, rope = case.run.model.attention, case.run.model.rope
    yield "attention", attention.kind
    if isinstance(attention, MLAConfig):
        yield "attention", "mla with query latent" if attention.q_latent else "mla without query latent"
    if isinstance(attention, GQAConfig):
        yield "attention", f"qk norm: {attention.qk_norm}"
        if attention.qk_norm_when == "after_rope":
            yield "attention", "qk norm after rope"
        if attention.rope_dim is not None:
            yield "attention", "partial rope"
        if attention.nope_every is not None:
            yield "attention", "layers without rope"
        if attention.nope_temperature:
            yield "attention", "queries scaled by position"
        for name in ("qkv_bias", "out_bias", "sinks", "window", "chunk", "output_gate"):
            if getattr(attention, name):
                yield "attention", name
    if case.run.model.linear_attention is not None:
        yield "attention", "linear: gated delta net" + (" over tp" if case.run.parallel.tp > 1 else "")
    if case.run.model.norm_scale == "one_plus_weight":
        yield "attention", "norms centred at zero"
    if rope.yarn is not None:
        yield "attention", "yarn"
    if rope.llama3 is not None:
        yield "attention", "llama3 rope"
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
            yield "balance", f"sequence, mean over {moe.balance.sequence_mean}" if name == "sequence" else name
    if moe.capacity is None:
        yield "capacity", "dropless"
    else:
        yield "capacity", f"per {moe.capacity.per}"
        yield "capacity", f"drop by {moe.capacity.drop}"
        yield "capacity", f"{moe.capacity.scope} scope"
        if moe.capacity.pad:
            yield "capacity", "padded"
    if moe.shared_hidden_dim:
        yield "experts", "shared, gated" if moe.shared_gate else "shared"
    if moe.latent_dim is not None:
        yield "experts", "latent"
    if moe.expert_mlp_bias:
        yield "experts", "biases"
    yield "experts", f"prob applied at {moe.weight_at}"
    yield "experts", moe.activation


def coverage(verdicts: Iterable[Verdict]) -> dict[str, Counter[str]]:
    """Number of cases with each feature, by group; special situations that occurred come last."""
    table: dict[str, Counter[str]] = {}
    occurred: Counter[str] = Counter()
    for verdict in verdicts:
        for group, feature in dict.fromkeys(features_of(verdict.case)):
            table.setdefault(group, Counter())[feature] += 1
        occurred.update(verdict.observations)
    return table | {"occurred": occurred} if occurred else table


def case_report(verdict: Verdict, max_rows: int = 12) -> str:
    """The largest errors first; rows that fail say what the difference usually means."""
    if verdict.failure is not None:
        return f"{verdict.case.title}\nDOES NOT RUN: {verdict.failure}"
    rows = [
        (
            row.quantity,
            f"{row.error:.1e}",
            f"{row.tolerance:.1e}",
            "holds" if row.holds else "FAILS",
            "" if row.holds else _explain(row.quantity, row.uncovered),
        )
        for row in verdict.rows[:max_rows]
    ]
    table = text_table(("quantity", "relative error", "allowed", "", "usually means"), rows)
    left = len(verdict.rows) - len(rows)
    more = f"\n... and {left} quantities with smaller errors" if left > 0 else ""
    failed = sum(not row.holds for row in verdict.rows)
    summary = f"{len(verdict.rows)} quantities compared, largest relative error {verdict.worst:.1e}: " + (
        "the layout computes what one process computes" if verdict.holds else f"{failed} FAIL"
    )
    return f"{verdict.case.title}\n\n{table}{more}\n\n{summary}"


def drawn_case_report(verdict: Verdict, max_world: int) -> str:
    """`case_report` with the command that repeats the case and its line for a file of kept cases."""
    run = verdict.case.run
    dtype = "" if run.precision.compute == "float64" else f" --dtype {run.precision.compute}"
    repeat = f"moefold prove --case {run.seed} --max-world {max_world}{dtype}"
    line = case_line(verdict.case, verdict.culprit)
    return (
        f"{case_report(verdict)}\n\nRepeat it:  {repeat}\n"
        f"Keep it:    one more line of tests/ranks/failed_cases.jsonl, with what it found\n{line}"
    )


def _explain(quantity: str, uncovered: int) -> str:
    if uncovered:
        return f"{abs(uncovered)} elements held by {'no rank' if uncovered > 0 else 'several ranks at once'}"
    return meaning_of(quantity)


def coverage_report(verdicts: Sequence[Verdict]) -> str:
    rows: list[tuple[str, str]] = []
    for group, counts in coverage(verdicts).items():
        cells = ", ".join(f"{feature}: {count}" for feature, count in sorted(counts.items()))
        first, *others = wrap(cells, 96)
        rows += [(group, first), *(("", line) for line in others)]
    return text_table(("covered", "cases"), rows)


def cases_summary(verdicts: Sequence[Verdict], seconds: float) -> str:
    held = sum(verdict.holds for verdict in verdicts)
    worst = max((verdict.worst for verdict in verdicts if verdict.failure is None), default=float("nan"))
    return f"{held} of {len(verdicts)} cases hold; largest relative error {worst:.1e}; {seconds:.0f} s"


def mutants_report(results: Sequence[tuple[Mutant, Verdict]]) -> str:
    rows = [(mutant.name, mutant.case, _outcome(verdict), verdict.culprit, mutant.cause) for mutant, verdict in results]
    found = sum(caught(verdict) for _, verdict in results)
    table = text_table(("seeded fault", "case", "", "first seen at", "how it happens in real code"), rows)
    return f"{table}\n\n{found} of {len(results)} seeded faults caught"


def _outcome(verdict: Verdict) -> str:
    if verdict.failure is not None:
        return "DOES NOT RUN"
    return "caught" if caught(verdict) else "NOT CAUGHT"


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "case": verdict.case.title,
        "world": verdict.case.world,
        "holds": verdict.holds,
        "worst": verdict.worst if verdict.failure is None else None,
        "failure": verdict.failure,
        "rows": [
            {"quantity": row.quantity, "error": row.error, "allowed": row.tolerance, "holds": row.holds}
            for row in verdict.rows
        ],
    }


# ---- diagnosis ----

MEANINGS = (
    ("codes/*", "narrowed weights: blocks of a shard are not those of the matrix, another cast, or stale codes"),
    ("scales/*", "narrowed weights: blocks of a shard are not those of the matrix, or lie in the other direction"),
    ("counts", "routing differs: scores, selection, or counts not summed over all ranks of the stage"),
    (
        "plain",
        "the top-k that balance losses count has a bias, groups or padding in it, or was not summed over all ranks",
    ),
    ("kept", "capacities counted over other tokens, or other assignments kept first"),
    ("dropped", "capacities counted over other tokens than the reference's"),
    ("loss", "the forward differs, labels were counted on some ranks only, or losses not summed over dp and cp"),
    ("mtp_loss", "MTP: tokens or labels shifted, past a document's end, or losses of modules summed, not averaged"),
    (
        "balance/sequence",
        "counts of a document not summed over its context ranks, or wrong boundaries or number of documents",
    ),
    (
        "balance/global_batch",
        "counts not summed over every rank, or earlier microbatches left out or of another layer",
    ),
    ("balance/z", "a token's logits counted on no rank or on several, or padding counted"),
    ("balance/*", "counts not summed over the ranks of a microbatch, padding counted, or a wrong divisor"),
    ("expert_bias/*", "the loss-free bias updated by a local load, or twice"),
    ("grad_norm", "a shard missing from the norm, or a shard counted once per replica or once per stage that holds it"),
    ("gradient/*.experts.down_bias", "the bias of a split expert: added by several ranks, or not summed over etp"),
    (
        "gradient/*.experts.*",
        "experts: reduction over edp, rows at the wrong expert, or probs applied at the wrong place",
    ),
    (
        "gradient/*.router.*",
        "router: not summed over tp, balance losses of its stage left out, or the probs' gradient lost",
    ),
    ("gradient/*.latent_*", "latent projection: not summed over tp"),
    ("gradient/*.shared*", "shared expert: all_gather and reduce_scatter around it, or its gate not summed over tp"),
    ("gradient/mtp.*.join.weight", "MTP module: its tokens, its hidden state, or not summed over tp"),
    ("gradient/mtp.*.token_norm.weight", "MTP module: its tokens, or not summed over tp"),
    ("gradient/mtp.*.hidden_norm.weight", "MTP module: the hidden state it received, or not summed over tp"),
    ("gradient/mtp_norms.*", "norm after an MTP module: its hidden state's gradient, or not summed over tp"),
    (
        "gradient/final_norm.weight",
        "final norm: read by the head and by the first MTP module, on any stage",
    ),
    ("gradient/*q_norm.weight", "norm inside attention: not summed over the ranks that hold other heads or tokens"),
    ("gradient/*k_norm.weight", "norm inside attention: not summed over the ranks that hold other heads or tokens"),
    ("gradient/*kv_norm.weight", "norm inside attention: not summed over the ranks that hold other heads or tokens"),
    ("gradient/*norm.weight", "norm: sees its shard's tokens only, so it must be summed over tp"),
    ("gradient/*.attention.sinks", "sinks: merged once per partial attention, or not summed over cp"),
    (
        "gradient/*.attention.*",
        "attention: positions, window or document boundaries, keys' gradients not returned, an all_gather's backward",
    ),
    (
        "gradient/embedding.weight",
        "vocabulary rows: wrong offset, or a sum missing over ranks, or over stages that hold them",
    ),
    ("gradient/head.weight", "vocabulary rows: wrong offset, or the loss's gradient counted once per rank"),
    (
        "gradient/*",
        "dense parameter: reduction over dp and cp missing, averaged or doubled, or a microbatch's gradient lost",
    ),
    ("unchanged/*", "inputs kept as codes are not the operands that wide ones narrow to, or deferring changes a sum"),
    ("exp_avg*", "gradients agree, the clipped ones do not: norm or clipping"),
    ("momentum/*", "gradients agree, Muon's momentum does not: clipping, or momentum of another parameter"),
    ("master/*", "main weights lost digits: the remainder beside bfloat16 weights was dropped, or is another weight's"),
    (
        "parameter/*",
        "the update: lr, decay of the wrong kinds, another parameter's state, part of a matrix, a local largest logit",
    ),
)


def meaning_of(quantity: str) -> str:
    """Of a difference in this quantity: the text of the first pattern that its name matches."""
    return next(text for pattern, text in MEANINGS if fnmatchcase(quantity, pattern))
