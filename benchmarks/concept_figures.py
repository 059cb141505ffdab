"""Draw the figures of the concept pages, from the code that they explain.

    python -m benchmarks.concept_figures

`folding.svg` is a `FoldedLayout`, `dispatch.svg` the rows per token of each dispatcher, `walls.svg` predictions. A test
holds docs/figures to what this writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from pathlib import Path

import moefold
from moefold.config.parallel import ParallelConfig
from moefold.topology.folded_layout import FoldedLayout, fold

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
COLORS = ("#2468c9", "#d9541e", "#12836a", "#b98100", "#7d55b8", "#9a958b", "#4f86d6", "#b3261e")
WALLS = {"compute": 0, "communication": 1, "host": 3, "bubble": 5, "optimizer": 4}
CASES = ("qwen3_30b_a3b@H100x8", "mixtral_8x22b@H100x128", "deepseek_v3@H100x2048", "deepseek_v3@GB200x256")
STYLE = "text{font:13px Helvetica,Arial,sans-serif;fill:#1c1b19}.soft{fill:#6b6862}.num{fill:#fff;text-anchor:middle}"


def figures() -> dict[str, str]:
    """Every figure by its file name."""
    return {"folding.svg": folding(), "dispatch.svg": dispatch(), "walls.svg": walls()}


def _svg(width: int, height: int, title: str, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def folding() -> str:
    """16 ranks by two grids: a colour is a group whose ranks hold parts of one thing."""
    layout = fold(ParallelConfig(pp=2, tp=2, ep=4), 16)
    rows = [("attention: tp 2, dp 4, pp 2", "tp"), ("experts: ep 4, edp 2, pp 2", "ep")]
    body = []
    for place, (name, axis) in enumerate(rows):
        y = 52 + place * 96
        body.append(f'<text x="16" y="{y - 12}">{name}; a colour is one group of {axis}</text>')
        body += _ranks(layout, axis, y)
    body.append('<text class="soft" x="16" y="236">Pipeline stage 0 has ranks 0 to 7, stage 1 ranks 8 to 15.</text>')
    return _svg(760, 252, "one world, two grids", "\n".join(body))


def _ranks(layout: FoldedLayout, axis: str, y: int) -> Iterator[str]:
    groups = sorted({layout.ranks(axis, rank) for rank in range(layout.world)})
    for rank in range(layout.world):
        (index,) = [number for number, group in enumerate(groups) if rank in group]
        x = 16 + rank * 45 + (12 if rank >= layout.world // 2 else 0)
        yield f'<rect x="{x}" y="{y}" width="42" height="42" rx="6" fill="{COLORS[index % len(COLORS)]}"/>'
        yield f'<text class="num" x="{x + 21}" y="{y + 26}">{rank}</text>'


def dispatch(experts: int = 256, top_k: int = 8) -> str:
    """Rows that a token causes, over the number of ranks of the group."""
    worlds = [2**power for power in range(1, 7)]
    curves = {
        "all_to_all: a row per assignment": [float(top_k)] * len(worlds),
        "deduplicated: a row per rank": [_ranks_of_a_token(experts, top_k, world) for world in worlds],
        "all_gather: every rank but its own": [float(world - 1) for world in worlds],
    }
    high = 16.0
    xs = [70 + 110 * place for place in range(len(worlds))]
    body = [
        f'<path d="M60 {_y(tick, high):.0f}H640" stroke="#e4e1d9"/>'
        f'<text class="soft" x="28" y="{_y(tick, high) + 4:.0f}">{tick}</text>'
        for tick in (0, 4, 8, 12, 16)
    ]
    body += [f'<text class="soft" x="{x - 6}" y="268">{world}</text>' for x, world in zip(xs, worlds)]
    body.append('<text class="soft" x="300" y="290">ranks of the ep group</text>')
    body.append(f'<text class="soft" x="16" y="20">rows per token; {experts} experts, top {top_k}</text>')
    for number, (name, values) in enumerate(curves.items()):
        inside = [(x, _y(value, high)) for x, value in zip(xs, values) if value <= high]
        path = "L".join(f"{x} {y:.1f}" for x, y in inside)
        body.append(f'<path d="M{path}" fill="none" stroke="{COLORS[number]}" stroke-width="2.5"/>')
        body.append(f'<rect x="330" y="{8 + 18 * number}" width="11" height="11" rx="3" fill="{COLORS[number]}"/>')
        body.append(f'<text x="348" y="{18 + 18 * number}">{name}</text>')
    return _svg(660, 304, "rows per token by dispatcher", "\n".join(body))


def _y(value: float, high: float) -> float:
    return 250 - 170 * value / high


def _ranks_of_a_token(experts: int, top_k: int, world: int) -> float:
    """The mean number of ranks that have one of its experts (docs/dispatch.md has the formula)."""
    return world * (1 - comb(experts - experts // world, top_k) / comb(experts, top_k))


def walls() -> str:
    """Recipes with the layouts that the planner chose for them: shares of a step's exposed time."""
    body = ['<text x="16" y="26">Exposed time of a step by cause, predicted for layouts that the planner chose</text>']
    for place, name in enumerate(CASES):
        model, _, cluster = name.partition("@")
        gpu, _, gpus = cluster.rpartition("x")
        plan = moefold.plan(moefold.load_run(name), gpu=gpu, gpus=int(gpus), search=False)
        body += _bar(plan, f"{model}, {int(gpus):,} {gpu}", 46 + 44 * place)
    for number, (wall, color) in enumerate(WALLS.items()):
        x, y = 16 + 122 * number, 60 + 44 * len(CASES)
        body.append(f'<rect x="{x}" y="{y}" width="11" height="11" rx="3" fill="{COLORS[color]}"/>')
        body.append(f'<text x="{x + 17}" y="{y + 10}">{wall}</text>')
    return _svg(760, 88 + 44 * len(CASES), "walls by model and cluster", "\n".join(body))


def _bar(plan: moefold.Plan, name: str, y: int) -> Sequence[str]:
    time = plan.proposal.chosen.time
    total = sum(time.of(wall) for wall in WALLS)
    x, parts = 250.0, [f'<text x="16" y="{y + 20}">{name}</text>']
    for wall, color in WALLS.items():
        share = time.of(wall) / total
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{490 * share:.1f}" height="30" fill="{COLORS[color]}"/>')
        if share > 0.06:
            parts.append(f'<text class="num" x="{x + 245 * share:.1f}" y="{y + 20}">{share:.0%}</text>')
        x += 490 * share
    return parts


if __name__ == "__main__":
    for name, text in figures().items():
        (FOLDER / name).write_text(text, "utf-8")
        print(FOLDER / name)
