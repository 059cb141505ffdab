"""What `bench dispatch --adaptive` says: each case's times, the choice, how many were good, and this machine's link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moefold.bench.adaptive_cases import CHOICES, NEAR, WANTED, Measured, fit_link, with_link
from moefold.tables import text_table


def adaptive_report(measured: Sequence[Measured]) -> str:
    header = ("tokens", "width", "bytes", "E", "K", "ep", *CHOICES, "chosen", "x fastest")
    rows = [
        (
            *(each.case.tokens, each.case.dim, each.case.word, each.case.num_experts, each.case.top_k, each.case.ep),
            *(f"{each.seconds[name] * 1e3:.2f} ms" for name in CHOICES),
            each.chosen,
            f"{each.ratio:.2f}",
        )
        for each in measured
    ]
    link = fit_link(measured)
    told = "\n".join(f"    {name}: {value:.3g}" for name, value in asdict(link).items())
    return "\n\n".join(
        (
            text_table(header, rows),
            verdict(measured),
            f"what explains these times best:\nparallel:\n  link:\n{told}",
            f"with that link {sum(each.good for each in with_link(measured, link))} of {len(measured)}",
        )
    )


def verdict(measured: Sequence[Measured]) -> str:
    good = sum(each.good for each in measured)
    kept = "kept" if good >= WANTED * len(measured) else "NOT KEPT"
    return (
        f"the choice is the fastest or within {NEAR - 1:.0%} of it in {good} of {len(measured)} cases; "
        f"promised are {WANTED:.0%}: {kept}"
    )


def adaptive_data(measured: Sequence[Measured]) -> dict[str, Any]:
    link = fit_link(measured)
    return {
        "cases": [
            {"case": asdict(each.case), "seconds": each.seconds, "chosen": each.chosen, "ratio": each.ratio}
            for each in measured
        ],
        "good": sum(each.good for each in measured),
        "wanted": WANTED * len(measured),
        "link": asdict(link),
        "good_with_link": sum(each.good for each in with_link(measured, link)),
    }
