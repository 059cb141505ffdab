"""The frame of a page: one self-contained HTML document, and the small pieces that all pages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def document(title: str, sections: Iterable[str], css: str, script: str = "") -> str:
    """The whole text of a page. ``sections`` are HTML; the title is plain text."""
    code = f"<script>{script}</script>" if script else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{css}</style></head><body><main>{''.join(sections)}</main>{code}</body></html>\n"
    )


def card(value: str, label: str, small: str = "") -> str:
    """One headline number."""
    more = f"<small>{escape(small)}</small>" if small else ""
    return f'<div class="card"><span>{escape(label)}</span><b>{escape(value)}</b>{more}</div>'


def figure(title: str, legend: Sequence[tuple[str, int]], note: str, body: str) -> str:
    """A title, what the colors mean if there are several, the picture, a remark."""
    keys = "".join(f'<span class="key"><i class="c{color}"></i>{escape(name)}</span>' for name, color in legend)
    head = f"<figcaption><b>{escape(title)}</b>{keys if len(legend) > 1 else ''}</figcaption>"
    return f"<figure>{head}{body}{f'<p class=note>{escape(note)}</p>' if note else ''}</figure>"
