"""One self-contained HTML document: its frame, cards, figures, and the CSS that all pages share, light and dark.

A page has a Content-Security-Policy in itself, because it is mostly opened as a file: it loads nothing, sends nothing,
and runs no script but its own, which are named by their hashes. So text of a run that slipped into a page as HTML could
not run either. Styles may be inline; no style is made from text of a run.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape


def document(
    title: str, sections: Iterable[str], css: str, script: str = "", downloads: Mapping[str, object] | None = None
) -> str:
    """The whole text of a page. ``sections`` are HTML; the title is plain text.

    ``downloads`` are data by file name: they are in the page, and links at its end save them as JSON.
    """
    kept = "".join(
        f'<script type="application/json" data-file="{escape(name)}">{_script_json(data)}</script>'
        for name, data in (downloads or {}).items()
    )
    scripts = [each for each in (script, DOWNLOAD if kept else "") if each]
    code = "".join(f"<script>{each}</script>" for each in scripts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy(*scripts)}">'
        f'<meta name="referrer" content="no-referrer"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{css}</style></head><body><main>{''.join(sections)}</main>{kept}{code}</body></html>\n"
    )


def content_policy(*scripts: str) -> str:
    """Of a page that has these scripts and loads nothing; pictures are in the page itself."""
    hashes = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts]
    named = " ".join(hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {named}; style-src 'unsafe-inline'; img-src data:; "
        "form-action 'self'; base-uri 'none'"
    )


def _script_json(data: object) -> str:
    """No text of the data can end the element that holds it, and none looks like an address of the page."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("/", "\\/")


def card(value: str, label: str, small: str = "") -> str:
    """One headline number."""
    more = f"<small>{escape(small)}</small>" if small else ""
    return f'<div class="card"><span>{escape(label)}</span><b>{escape(value)}</b>{more}</div>'


def figure(title: str, legend: Sequence[tuple[str, int]], note: str, body: str) -> str:
    """A title, a legend if there are several colors, the picture, a note."""
    keys = "".join(f'<span class="key"><i class="c{color}"></i>{escape(name)}</span>' for name, color in legend)
    head = f"<figcaption><b>{escape(title)}</b>{keys if len(legend) > 1 else ''}</figcaption>"
    return f"<figure>{head}{body}{f'<p class=note>{escape(note)}</p>' if note else ''}</figure>"


DOWNLOAD = """
for (const data of document.querySelectorAll('script[data-file]')) {
  const link = document.createElement('a'), line = document.createElement('p');
  link.href = URL.createObjectURL(new Blob([data.textContent], {type: 'application/json'}));
  link.download = data.dataset.file; link.textContent = `Save the data of this page: ${data.dataset.file}`;
  line.className = 'note download'; line.append(link); document.querySelector('main').append(line);
}
"""

CSS = """
:root{color-scheme:light dark;--page:#f6f5f1;--card:#fffefb;--ink:#1c1b19;--soft:#6b6862;--line:#e4e1d9;
--c1:#2468c9;--c2:#d9541e;--c3:#12836a;--c4:#b98100;--c5:#9a958b;--bad:#b3261e;--good:#12734f}
@media (prefers-color-scheme:dark){:root{--page:#141413;--card:#1d1d1b;--ink:#eceae4;--soft:#9d9990;--line:#33322e;
--c1:#6ba2f2;--c2:#f0824e;--c3:#3dbd9b;--c4:#e0ad36;--c5:#77736b;--bad:#f2897f;--good:#5fcf9f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",
Roboto,"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1240px;margin:0 auto;padding:36px 28px 60px}
h1{font-size:30px;line-height:1.15;letter-spacing:-.02em;margin:0}
h2{font-size:19px;letter-spacing:-.01em;margin:44px 0 14px}
.sub{color:var(--soft);margin:6px 0 26px}
.badge{display:inline-block;border-radius:99px;padding:1px 11px;font-size:13px;font-weight:600;margin-left:10px;
vertical-align:5px;border:1px solid currentColor}.badge.good{color:var(--good)}.badge.bad{color:var(--bad)}
.badge.open{color:var(--c4)}
.cards{display:grid;grid-template-columns:repeat(5,1fr);gap:12px}
@media (max-width:900px){.cards{grid-template-columns:repeat(2,1fr)}}
.card,figure,.panel{background:var(--card);border:1px solid var(--line);border-radius:12px}
.card{padding:13px 16px}.card b{display:block;font-size:23px;line-height:1.25;letter-spacing:-.02em;font-weight:650}
.card span{color:var(--soft);font-size:13px}.card small{color:var(--soft);font-size:12.5px;display:block}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
@media (max-width:900px){.charts{grid-template-columns:minmax(0,1fr)}}
figure{margin:0;padding:14px 16px 10px;position:relative;min-width:0}figure.wide{grid-column:1/-1}
figcaption{display:flex;flex-wrap:wrap;align-items:center;gap:2px 14px;margin-bottom:8px}figcaption b{font-weight:620}
.key{color:var(--soft);font-size:13px;display:inline-flex;align-items:center;gap:6px}
.key i{width:11px;height:11px;border-radius:3px;display:inline-block;background:var(--c)}
.note{color:var(--soft);font-size:12.5px;margin:4px 0 2px}
svg{display:block;width:100%;height:auto;overflow:visible}
.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.band{fill:var(--c);opacity:.17}.area{fill:var(--c);stroke:var(--card);stroke-width:.6}
.dot{fill:var(--c);stroke:var(--card);stroke-width:1.5}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1;opacity:.6}
.mark{stroke:var(--bad);stroke-width:1.5}.tick{fill:var(--soft);font-size:12px}.end{text-anchor:end}.mid{text-anchor:middle}
.cursor{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}
.tip{position:absolute;pointer-events:none;background:var(--ink);color:var(--card);border-radius:7px;padding:5px 10px;
font-size:12.5px;line-height:1.45;white-space:nowrap;transform:translate(-50%,-112%);z-index:2}
.bar{display:flex;height:30px;border-radius:7px;overflow:hidden;gap:2px}.bar i{background:var(--c);min-width:1px}
.panel{padding:16px}.bar+.keys{margin-top:10px;display:flex;flex-wrap:wrap;gap:4px 20px}
table{border-collapse:collapse;width:100%;font-size:13.5px}th{color:var(--soft);font-weight:500}
th,td{text-align:right;padding:5px 10px;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}
tr:last-child td{border-bottom:0}td.text{text-align:left}.scroll{max-height:430px;overflow:auto}
.warn{color:var(--bad);font-weight:600}
ul{margin:0;padding-left:20px}details{margin-top:14px}summary{cursor:pointer;color:var(--soft)}
:root{--c6:#7d55b8;--wait:#d9541e;--forward:#2468c9;--backward:#12836a;--weight:#b98100;--idle:#eceae3}
@media (prefers-color-scheme:dark){:root{--c6:#b294e6;--wait:#f0824e;--forward:#4f86d6;--backward:#2d9b7e;
--weight:#c99a2e;--idle:#292825}}
.c6{--c:var(--c6)}
.held{display:grid;grid-template-columns:auto minmax(0,1fr) auto;gap:6px 12px;align-items:center;font-size:13px}
.held .track{position:relative;height:20px;background:var(--idle);border-radius:5px;overflow:hidden}
.held .track .bar{height:100%;border-radius:0;gap:1px}
.held .track .full{position:absolute;top:0;bottom:0;border-left:2px solid var(--bad)}
.held b{font-weight:600}.held .soft,.soft{color:var(--soft)}
.keys{display:flex;flex-wrap:wrap;gap:4px 20px;margin-top:10px}
.wide-picture{overflow-x:auto}.wide-picture svg{min-width:860px}
.f{fill:var(--forward)}.b{fill:var(--backward)}.w{fill:var(--weight)}.idle{fill:var(--idle)}.wait{fill:var(--wait)}
.num{fill:#fff;font-size:9px;text-anchor:middle}
a{color:var(--c1)}
table.sides td{white-space:normal;overflow-wrap:break-word;vertical-align:top}
@media (max-width:1150px){.charts .tick{font-size:14px}.charts .wide-picture .tick{font-size:12px}}
@media (max-width:640px){main{padding:22px 14px 40px}h1{font-size:23px;overflow-wrap:anywhere}h2{margin:32px 0 10px}
.card b{font-size:19px}.card{padding:10px 12px}th,td{padding:5px 7px}figure,.panel{padding:10px 10px 8px}
.charts .tick{font-size:18px}table.sides{font-size:12px}.charts .wide-picture .tick{font-size:12px}
.held{grid-template-columns:auto minmax(0,1fr)}.held .amount{display:none}}
pre{font:12.5px/1.5 ui-monospace,"SF Mono",Menlo,Consolas,monospace;overflow:auto;margin:10px 0 0}
"""
