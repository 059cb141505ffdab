"""Cases as text: one line of JSON that holds everything a case is.

A drawn case has a number, but the number means something only to the code that draws: one more choice there, and it is
another case. A case that failed once must be provable for good, so it is kept as its world size and the keys of its run
that differ from the defaults, with a sentence about what it found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moefold.config.loading import run_from_mapping
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, MoefoldError
from moefold.prove.cases import Case


@dataclass(frozen=True)
class KeptCase:
    """A case and what it once found."""

    case: Case
    found: str


def case_line(case: Case, found: str) -> str:
    """The line that `read_cases` reads back as the same case."""
    changed = _changed(asdict(case.run), asdict(RunConfig()))
    return json.dumps({"found": found, "world": case.world, "run": changed})


def read_cases(path: Path) -> list[KeptCase]:
    """Every case of a file, in its order."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise MoefoldError(f"cannot read cases from {path}: {error}") from None
    return [_read(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _read(line: str, where: str) -> KeptCase:
    try:
        match json.loads(line):
            case {"found": str(found), "world": int(world), "run": dict(run), **others} if not others:
                return KeptCase(Case(run_from_mapping(run), world), found)
    except ConfigError as error:
        raise MoefoldError(f"{where}: {error}") from None
    except ValueError as error:
        raise MoefoldError(f"{where}: not JSON: {error}") from None
    raise MoefoldError(f'{where}: a case is {{"found": TEXT, "world": N, "run": {{...}}}} and nothing else')


def _changed(value: Any, default: Any) -> Any:
    """What of ``value`` is not the default's; a section whose kind differs is another section, and stays whole."""
    if not isinstance(value, dict) or not isinstance(default, dict) or value.get("kind") != default.get("kind"):
        return value
    return {
        key: _changed(inner, default[key]) for key, inner in value.items() if key == "kind" or inner != default[key]
    }
