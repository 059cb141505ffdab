"""Verdicts as text and as JSON, and what a difference usually means."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from textwrap import wrap
from typing import Any

from moefold.prove.case_features import coverage
from moefold.prove.cases import case_line
from moefold.prove.mutants import Mutant, caught
from moefold.prove.verdict import Verdict
from moefold.tables import text_table


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
