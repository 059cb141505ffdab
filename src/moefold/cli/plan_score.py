"""`moefold plan --score`: the planner's own error against a folder of published runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from moefold.plan.published.assess import Assessment, assess, prediction_lines
from moefold.plan.published.error_page import error_page, summary
from moefold.plan.published.fitted_file import fitted_source
from moefold.tables import text_table


def run_score(
    folder: Path,
    predictions: Path | None,
    page: Path | None,
    constants: Path | None,
    as_json: bool,
    progress: Callable[[str, int, int], None],
) -> int:
    """Prints the error by set; writes the predictions, the page and the fitted constants where asked."""
    result = assess(folder, progress)
    if predictions is not None:
        predictions.write_text("".join(json.dumps(line) + "\n" for line in prediction_lines(result)), "utf-8")
    if page is not None:
        page.write_text(error_page(result), "utf-8")
    if constants is not None:
        constants.write_text(fitted_source(result.fitted.constants, result.intervals), "utf-8")
    print(json.dumps(_data(result), indent=2) if as_json else _text(result))
    return 0


def _text(result: Assessment) -> str:
    sets = text_table(("set", "runs", "macro", "median", "bias"), summary(result))
    ranks = text_table(
        ("sweep", "layouts", "Spearman", "regret"),
        [(each.name, each.layouts, f"{each.spearman:+.2f}", f"{100 * each.regret:.1f} %") for each in result.ranks],
    )
    said = (
        f"said to fit but do not: {len(result.false_fits)}; said not to fit but ran: {len(result.false_oom)} of "
        f"{len(result.points)}; the 80 % interval holds {100 * result.covered:.0f} %"
    )
    return f"{sets}\n\n{ranks}\n\n{said}"


def _data(result: Assessment) -> dict[str, object]:
    return {
        "sets": [asdict(each) for each in result.sets],
        "ranks": [asdict(each) for each in result.ranks],
        "false_fits": list(result.false_fits),
        "false_oom": list(result.false_oom),
        "interval_holds": result.covered,
        "errors": dict(result.errors),
        "errors_without_the_card": dict(result.gpu_errors),
        "errors_without_the_family": dict(result.family_errors),
        "memory_errors": dict(result.memory_errors),
    }
