"""What every page we write must be: whole HTML, and nothing in it that is loaded from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class _Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    VOID = frozenset({"meta", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_whole(text: str) -> None:
    parser = _Balanced()
    parser.feed(text)
    parser.close()
    assert not parser.open
    assert not re.search(r"https?:|//[a-z]|(?<![a-z])url\(|@import|<link|<iframe|srcset", text, re.IGNORECASE)
