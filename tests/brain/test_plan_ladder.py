"""The ladder of docs/memory.md: what each saving leaves on the fullest rank of DeepSeek-V3, as the planner says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moefold.hardware.cluster import cluster_of
from moefold.plan.memory.peak import predict_memory
from moefold.plan.memory.saving_steps import saving
from moefold.plan.workload import Workload, changed
from moefold.recipes.catalog import recipe

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
LAYOUTS = (
    (256, 4096, {"pp": 4, "vpp": 4, "ep": 64}),
    (256, 2048, {"pp": 8, "vpp": 4, "ep": 32}),
    (1024, 4096, {"tp": 2, "pp": 8, "vpp": 4, "ep": 64}),
)
RUNGS = (
    ("flat sharding, all kept", ()),
    ("discard `mla_up`", ("memory.retain.mla_up=discard",)),
    (
        "discard `activation`, `shared`, `dense`",
        tuple(f"memory.retain.{step}=discard" for step in ("activation", "shared", "dense")),
    ),
    (
        "discard norms",
        tuple(f"memory.retain.{step}=discard" for step in ("attention_norm", "latent_norm", "feed_norm")),
    ),
    ("bfloat16 moments", ("precision.moments=bfloat16", "precision.moments_rounding=stochastic")),
    ("`precision.master: remainder`", ("precision.master=remainder",)),
    ("`memory.optimizer: host`", ("memory.optimizer=host",)),
    ("offload `rows`", ("memory.retain.rows=offload",)),
    ("offload `core`", ("memory.retain.core=offload",)),
    ("discard `gate_up`", ("memory.retain.gate_up=discard",)),
)


def layout(number: int) -> Workload:
    world, batch, sizes = LAYOUTS[number]
    start = Workload(replace(recipe("deepseek_v3")), cluster_of("H100", world))
    return changed(
        start,
        parallel={"stages": None, "schedule": "interleaved", "sharding": "flat", **sizes},
        data={"global_batch": batch, "micro_batch": 1},
        precision={"compute": "bfloat16"},
    )


def ladder() -> list[str]:
    """Rows of the page's table."""
    rows, entries = [], frozenset[str]()
    for name, more in RUNGS:
        entries |= set(more)
        sizes = (predict_memory(saving(layout(number), entries)).total / 2**30 for number in range(len(LAYOUTS)))
        rows.append(f"| {name} | " + " | ".join(f"{size:.1f}" for size in sizes) + " |")
    return rows


def test_the_page_has_the_ladder() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [row for row in ladder() if row not in text]
    assert not missing, "write these rows into docs/memory.md:\n" + "\n".join(missing)


def test_each_rung_is_lower() -> None:
    columns = zip(*([float(cell) for cell in row.split("|")[2:-1]] for row in ladder()))
    for column in columns:
        assert list(column) == sorted(column, reverse=True)
