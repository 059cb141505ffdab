"""`moefold plan --records` predicts published records; `moefold plan --score` measures the planner's error on them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moefold.cli.run_argument import with_progress
from moefold.errors import MoefoldError
from moefold.plan.published.assess import Assessment, assess, prediction_lines
from moefold.plan.published.error_page import error_page, summary
from moefold.plan.published.fit import fitted_source
from moefold.plan.published.points import nearest_record, record_words
from moefold.plan.published.predict_records import Unread, predict_lines
from moefold.plan.published.records import Record, unread_flags
from moefold.private_files import replace_file
from moefold.recipes.catalog import recipe, tuned_layouts
from moefold.tables import text_table


def run_records(records: Path, predictions: Path | None, as_json: bool) -> int:
    """Returns 0 if at least one record was predicted; the others are listed on stderr."""
    lines = _read(records)
    total = sum(bool(line.strip()) for line in lines)
    results = list(with_progress(predict_lines(lines), total, "predicting records"))
    predicted = [answer for answer in results if isinstance(answer, dict)]
    unread = [answer for answer in results if isinstance(answer, Unread)]
    for each in unread:
        print(f"not predicted: {each.id}: {each.reason}", file=sys.stderr)
    if words := _unread_words(json.loads(line) for line in lines if _is_record(line)):
        print(words, file=sys.stderr)
    text = "".join(json.dumps(answer) + "\n" for answer in predicted)
    if predictions is not None:
        _write(predictions, text)
    elif not as_json:
        sys.stdout.write(text)
    _summarize(len(results), predicted, unread, as_json, predictions)
    return 0 if predicted else 1


def _is_record(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _unread_words(records: Iterable[Record]) -> str:
    """Flags that change nothing in any prediction and for which nobody said why, with how many records have them."""
    unread: Counter[str] = Counter()
    for record in records:
        if isinstance(record.get("flags") or {}, dict):
            unread.update(unread_flags(record))
    listed = ", ".join(f"{name} ({number})" for name, number in sorted(unread.items()))
    return f"flags that are not read, and the number of records: {listed}" if listed else ""


def _summarize(
    total: int, predicted: list[dict[str, Any]], unread: list[Unread], as_json: bool, predictions: Path | None
) -> None:
    if as_json:
        skipped = [{"id": each.id, "reason": each.reason} for each in unread]
        print(json.dumps({"records": total, "predictions": predicted, "not_predicted": skipped}, indent=2))
        return
    fits = sum(answer["fits"] for answer in predicted)
    where = f", written to {predictions}" if predictions else ""
    words = f"{len(predicted)} of {total} records predicted ({fits} fit), {len(unread)} not{where}"
    # On stdout there are only predictions, so that it can be redirected into a file.
    print(words, file=sys.stdout if predictions else sys.stderr)


def _read(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise MoefoldError(f"{path}: cannot be read: {error}") from error


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text)
    except OSError as error:
        raise MoefoldError(f"{path}: cannot be written: {error.strerror}; choose another --predictions") from error


def run_score(
    folder: Path,
    predictions: Path | None,
    page: Path | None,
    constants: Path | None,
    as_json: bool,
    progress: Callable[[str, int, int], None],
) -> int:
    """Prints the error per set of runs; writes predictions, page and fitted constants where paths are given."""
    result = assess(folder, progress)
    if predictions is not None:
        replace_file(predictions, "".join(json.dumps(line) + "\n" for line in prediction_lines(result)))
    if page is not None:
        replace_file(page, error_page(result))
    if constants is not None:
        anchors = {name: (each.common, each.own) for name, each in result.shares.items()}
        replace_file(constants, fitted_source(result.fitted.constants, result.intervals, anchors))
    if words := _unread_words(result.records.values()):
        print(words, file=sys.stderr)
    print(json.dumps(_data(result), indent=2) if as_json else _text(result))
    return 0


def _beside_tuned(result: Assessment) -> list[dict[str, object]]:
    """Every tuned layout of a recipe, and the nearest published run with what was predicted for it, itself left out."""
    rows = []
    for name, layouts in tuned_layouts().items():
        for where, tuned in layouts.items():
            gpu, _, number = where.rpartition("x")
            run = recipe(f"{name}@{where}")
            record = nearest_record(run, gpu.upper(), int(number), result.records.values())
            if record is not None:
                measured = record["target"]["tokens_per_s_per_gpu"]
                rows.append(
                    {
                        "layout": f"{name}@{where}",
                        "tokens_per_gpu_second": run.data.global_batch
                        * run.data.seq_len
                        / tuned.step_seconds
                        / int(number),
                        "nearest": record["id"],
                        "what": record_words(record)[0],
                        "measured": measured,
                        "predicted": measured / (1 + result.errors[record["id"]]),
                    }
                )
    return rows


def _text(result: Assessment) -> str:
    sets = text_table(("set", "runs", "macro", "median", "bias"), summary(result))
    ranks = text_table(
        ("sweep", "layouts", "Spearman", "regret"),
        [(each.name, each.layouts, f"{each.spearman:+.2f}", f"{100 * each.regret:.1f} %") for each in result.ranks],
    )
    said = (
        f"said to fit but do not: {len(result.false_fits)}; said not to fit but ran: {len(result.false_oom)} of "
        f"{len(result.points)}; the 80 % interval holds {100 * result.held:.0f} %"
    )
    tuned = text_table(
        ("tuned layout", "predicted", "nearest published run", "measured", "predicted for it"),
        [
            (row["layout"], f"{row['tokens_per_gpu_second']:,.0f}", row["what"])
            + (f"{row['measured']:,.0f}", f"{row['predicted']:,.0f}")
            for row in _beside_tuned(result)
        ],
    )
    return f"{sets}\n\n{ranks}\n\n{said}\n\ntokens per GPU and second\n\n{tuned}"


def _data(result: Assessment) -> dict[str, object]:
    return {
        "sets": [asdict(each) for each in result.sets],
        "ranks": [asdict(each) for each in result.ranks],
        "false_fits": list(result.false_fits),
        "false_oom": list(result.false_oom),
        "interval_holds": result.held,
        "errors": dict(result.errors),
        "errors_without_the_gpu": dict(result.gpu_errors),
        "errors_without_the_family": dict(result.family_errors),
        "memory_errors": dict(result.memory_errors),
        "anchors": [asdict(each) for each in (*result.anchored, *result.anchored_sweeps)],
        "tuned_layouts": _beside_tuned(result),
    }
