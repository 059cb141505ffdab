"""`moefold plan --records`: predict a file of published records and write one line for each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from moefold.cli.progress import with_progress
from moefold.errors import MoefoldError
from moefold.plan.published.predict_records import Unread, predict_lines


def run_records(records: Path, predictions: Path | None, as_json: bool) -> int:
    """Exit code 0 if at least one record was predicted; those that were not are named on stderr."""
    lines = _read(records)
    total = sum(bool(line.strip()) for line in lines)
    answers = list(with_progress(predict_lines(lines), total, "predicting records"))
    predicted = [answer for answer in answers if isinstance(answer, dict)]
    unread = [answer for answer in answers if isinstance(answer, Unread)]
    for each in unread:
        print(f"not predicted: {each.id}: {each.reason}", file=sys.stderr)
    text = "".join(json.dumps(answer) + "\n" for answer in predicted)
    if predictions is not None:
        _write(predictions, text)
    elif not as_json:
        sys.stdout.write(text)
    _summarize(len(answers), predicted, unread, as_json, predictions)
    return 0 if predicted else 1


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
    # Predictions on stdout stay a clean file.
    print(words, file=sys.stdout if predictions else sys.stderr)


def _read(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise MoefoldError(f"{path}: cannot be read: {error}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MoefoldError(f"{path}: cannot be written: {error.strerror}; choose another --predictions") from error
