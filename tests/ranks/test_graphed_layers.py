"""Whole layers as graphs between their exchanges, and pipelines whose stages have slots, on several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.graphed_runs import (
    ATTENTION_ROUTER,
    LAYER,
    differences,
    expected_bytes,
    expected_graphs,
    graphed_run,
    static_bytes_of,
    steps,
    without_graphs,
)
from tests.staged_runs import on_shares

from moefold.checks.run_all import problems
from moefold.parallel.parallelize import LocalModel, build_local_model
from moefold.prove.proof_inputs import proof_init

BOUNDED = {"ep": 2, "dispatcher": "all_to_all_bounded", "row_bound": 2.0, "pair_bound": 2.0}
LAYOUTS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "layer": (LAYER, 2, BOUNDED),
    # Rows do not fit, and steps run once more, without graphs.
    "layer, steps run twice": (LAYER, 2, BOUNDED | {"row_bound": 1.0, "pair_bound": 1.0}),
    "pipeline": (ATTENTION_ROUTER, 2, {"pp": 2}),
    "interleaved pipeline": (ATTENTION_ROUTER, 2, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
    "experts on two ranks": (ATTENTION_ROUTER, 2, {"ep": 2}),
}


def compared(local: LocalModel) -> dict[str, Any]:
    """A few steps with graphs and without, in the same processes."""
    found = steps(local)
    plain = build_local_model(without_graphs(local.run), local.groups, torch.device("cpu"), proof_init)
    assert local.graphs is not None and plain.graphs is None
    return {
        "differ": differences(found, steps(plain)),
        "graphs": (local.graphs.num_graphs, expected_graphs(local)),
        "bytes": (static_bytes_of(local), expected_bytes(local)),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_graphs_compute_the_same_bits(name: str) -> None:
    scope, world, parallel = LAYOUTS[name]
    run = graphed_run(scope, **parallel)
    assert not problems(run, world)
    for found in on_shares(run, world, compared):
        assert found["differ"] == []
        count, expected = found["graphs"]
        assert count == expected
        measured, formula = found["bytes"]
        # Beside it a gradient of four bytes per balance loss and region, and counts of rows.
        assert formula <= measured <= formula + 400 * count, (measured, formula)
