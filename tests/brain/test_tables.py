from __future__ import annotations

from moefold.tables import markdown_table, text_table

HEADER, ROWS = ("axis", "ranks"), [("tp", 4), ("dense|shard", 1024)]


def test_text() -> None:
    assert text_table(HEADER, ROWS).splitlines() == [
        "axis         ranks",
        "-----------  -----",
        "tp               4",
        "dense|shard   1024",
    ]


def test_markdown() -> None:
    assert markdown_table(HEADER, ROWS).splitlines() == [
        "| axis | ranks |",
        "| --- | ---: |",
        "| tp | 4 |",
        "| dense\\|shard | 1024 |",
    ]


def test_wide_characters_and_line_breaks_keep_the_columns_straight() -> None:
    lines = text_table(("name", "n"), [("専門家", 1), ("two\nlines", 2)]).splitlines()
    assert lines[2] == "専門家     1" and lines[3] == "two lines  2"


def test_a_table_without_rows_is_its_header() -> None:
    assert text_table(("a", "b"), []) == "a  b\n-  -"


def test_only_numbers_with_or_without_a_unit_go_to_the_right() -> None:
    cells = ["1,024", "-3.5e-07", "80.0 GiB", "671.0B", "12 %", ""]
    assert ": |" in markdown_table(("n",), [[cell] for cell in cells])
    for words in ("0, 1, 2", "3 of 4 groups", "2nd choice"):
        assert ": |" not in markdown_table(("n",), [[cell] for cell in [*cells, words]])
