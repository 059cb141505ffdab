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
