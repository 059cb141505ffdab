"""Tables for every printed report, as plain text for a terminal and as Markdown for a page.

Cells are text; numbers are formatted by the caller. A column whose filled cells are all numbers, perhaps with a unit,
is right-aligned.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

GAP = "  "
_NUMBER = re.compile(r"[-+<>~= ]*[0-9][0-9.,_]*([eE][-+]?[0-9]+)?( ?[A-Za-z%/]{1,7})?")


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns two spaces apart under a ruled header; no trailing blanks."""
    cells = _as_text(header, rows)
    widths = [max(map(_width, column)) for column in zip(*cells)]
    right = [_holds_numbers(column[1:]) for column in zip(*cells)]
    lines = [
        GAP.join(_pad(cell, width, to_right) for cell, width, to_right in zip(row, widths, right)) for row in cells
    ]
    return "\n".join(line.rstrip() for line in (lines[0], GAP.join("-" * width for width in widths), *lines[1:]))


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same as a Markdown table; a bar inside a cell is escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in _as_text(header, rows)]
    rule = ["---:" if _holds_numbers(column[1:]) else "---" for column in zip(*cells)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:]))


def _as_text(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[list[str]]:
    for row in rows:
        assert len(row) == len(header), f"a row of {len(row)} cells under {len(header)} headings: {row}"
    return [[" ".join(str(cell).split()) for cell in row] for row in (header, *rows)]


def _holds_numbers(column: Sequence[str]) -> bool:
    filled = [cell for cell in column if cell not in ("", "-")]
    return bool(filled) and all(_NUMBER.fullmatch(cell) for cell in filled)


def _pad(cell: str, width: int, to_right: bool) -> str:
    blanks = " " * (width - _width(cell))
    return blanks + cell if to_right else cell + blanks


def _width(cell: str) -> int:
    """Columns on a terminal: wide characters take two, combining marks none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in cell
    )
