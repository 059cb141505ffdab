"""Text of a run, a file or a request that would become HTML or a script in a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

from tests.support import NotTried

from moefold.cli.main import main
from moefold.config.loading import override
from moefold.hardware.cluster import cluster_of
from moefold.html.document import card, document, figure
from moefold.plan.report.form import form_html, values_of
from moefold.plan.report.plan_page import page as plan_page
from moefold.plan.search.proposal import Question, propose
from moefold.recipes.catalog import recipe
from moefold.train.report.compare_page import compare_page
from moefold.train.report.history import read_history
from moefold.train.report.run_page import page as run_page

# Each would put `owned` into the title of the page.
PAYLOADS = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    '"><svg onload="document.title=\'owned\'">',
    "' onmouseover='document.title=\"owned\"' x='",
    "</script><script>document.title='owned'</script>",
    "</title><script>document.title='owned'</script>",
    "<!--<script>document.title='owned'</script>",
    "javascript:document.title='owned'",
)
EVERYTHING = " ".join(PAYLOADS)
FIXED = "tp=1,cp=1,pp=2,vpp=1,ep=8,etp=1,sequences=1,replicate=1,recompute=none"


class Found(HTMLParser):
    """Scripts, handlers of events, and addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.gained, self.script = "", "", False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        if tag == "meta" and named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named.get("content") or ""
        self.script = tag == "script" and named.get("type") != "application/json"
        for name, value in attributes:
            if name.startswith("on") or (value or "").lower().startswith("javascript:"):
                self.gained += f"<{tag} {name}={value!r}> "
        if tag in ("iframe", "object", "embed", "base", "link"):
            self.gained += f"<{tag}> "

    def handle_data(self, data: str) -> None:
        if self.script and f"sha256-{b64encode(sha256(data.encode()).digest()).decode()}" not in self.policy:
            self.gained += f"a script that the policy does not name: {data[:80]!r} "

    def handle_endtag(self, tag: str) -> None:
        self.script = False


def gained_by(html: str) -> str | None:
    found = Found()
    found.feed(html)
    found.close()
    if not found.policy or re.search(r"script-src[^;]*unsafe|default-src(?! 'none')", found.policy):
        return f"the policy is {found.policy!r}"
    return found.gained or None


def history_at(folder: Path) -> Path:
    """A run all of whose text is hostile."""
    folder.mkdir(parents=True)
    bad = EVERYTHING
    start = {
        "kind": "start",
        "time": 1.0,
        "step": 0,
        "run": bad,
        "world": 2,
        "steps": 9,
        "device": bad,
        "mfu_note": bad,
    }
    start |= {"experts": bad, "flops_convention": bad, "config": {"name": bad, bad: bad, "data": {"train": bad}}}
    lines: list[dict[str, object]] = [start]
    for step in range(1, 9):
        line = {"kind": "step", "time": 1.0 + step, "step": step, "steps": 9, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1}
        line |= {"tokens": 512, "seconds": {"total": 1.0, "step": 0.5, bad: 0.1}, "metrics": {bad: 0.5}, "world": 2}
        line |= {"balance": {bad: 0.1}, "skipped": bad if step == 3 else None, "counts": [[1, 2], [3, 4]]}
        lines.append(line | {"counts_steps": 1, "dropped": 0, "memory_bytes": 1, "speed": {}, "load": 1.0})
    lines += [{"kind": "validation", "step": 8, "loss": 1.0, "metrics": {bad: 1.0}}]
    lines += [{"kind": "roll_back", "step": 7, "reason": bad}, {"kind": "stop", "step": 8, "reason": bad}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def question() -> Question:
    run = override(recipe("olmoe_1b_7b"), {"data.global_batch": 256})
    return Question(run, EVERYTHING, cluster_of("H100", 16), fixed=FIXED)


def report(place: Path) -> str | None:
    return gained_by(run_page(read_history(history_at(place / "run"))))


def comparison(place: Path) -> str | None:
    runs = {f"{name} {EVERYTHING}": read_history(history_at(place / name)) for name in ("a", "b")}
    return gained_by(compare_page(runs))


def plan(place: Path) -> str | None:
    return gained_by(plan_page(propose(question())))


def reflected(place: Path) -> str | None:
    """Values of a request that the form shows again."""
    values = dict.fromkeys(values_of(question()), EVERYTHING)
    sections = [form_html(values, question(), [EVERYTHING])]
    return gained_by(document(EVERYTHING, sections, "")) if sections else None


def parts(place: Path) -> str | None:
    """Every part of a page that takes text, and data that is kept inside a script element."""
    bad = EVERYTHING
    sections = [card(bad, bad, bad), figure(bad, [(bad, 1), (bad, 2)], bad, "")]
    return gained_by(document(bad, sections, "", "1", {bad: {bad: bad, "list": [bad]}}))


def drawing(place: Path) -> str | None:
    """Pictures that the command line writes have no scripts."""
    main(["schedule", "1f1b", "--stages", "2", "--microbatches", "4", "--svg", str(place / "x.svg")])
    text = (place / "x.svg").read_text()
    found = re.search(r"<script|\son\w+=|javascript:|<foreignObject", text, re.IGNORECASE)
    return f"the picture has {found[0]!r}" if found else None


def in_a_browser(place: Path) -> str | None:
    """All pages in a real browser, and one where the escaping is gone: its policy must hold by itself."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise NotTried("no Chromium")
    pages: dict[str, Callable[[], str]] = {
        "report": lambda: run_page(read_history(history_at(place / "run"))),
        "unescaped": lambda: document("x", [EVERYTHING], "", "1"),
    }
    for name, make in pages.items():
        path = place / f"{name}.html"
        path.write_text(make())
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=2000"]
        words += [f"--user-data-dir={place / 'profile'}", path.as_uri()]
        shown = subprocess.run(words, capture_output=True, timeout=240).stdout.decode(errors="replace")
        if "<main>" not in shown or re.search(r"<title>[^<]*\bowned</title>", shown):
            return f"{name}: the browser has {shown[:300]!r}"
    return None


ATTACKS = {
    "pages": [
        ("HTML in a run's name, metrics, settings and reasons", "a script runs in report.html", report),
        ("HTML in the names of compared runs", "a script runs in compared.html", comparison),
        ("HTML in the name of a planned run", "a script runs in the plan's page", plan),
        ("HTML in the values of a request", "a script runs in the served page", reflected),
        ("HTML in every part of a page, and in data inside a script element", "a script runs", parts),
        ("scripts in pictures", "a script runs in an SVG file", drawing),
        ("HTML that was not escaped, in a browser", "a script runs though the policy forbids it", in_a_browser),
    ]
}
SLOW = (in_a_browser,)
