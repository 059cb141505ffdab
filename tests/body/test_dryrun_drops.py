"""Which assignments the dry run counts as kept, against the balanced router under the same capacity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moefold.config.model import ModelConfig
from moefold.config.moe import CapacityConfig, MoEConfig, RouterConfig
from moefold.config.run import RunConfig
from moefold.dryrun.balanced_splits import BalancedSplitSizes
from moefold.moe.router import Router
from moefold.nn.batch import whole_batch
from moefold.nn.parallel_interfaces import LocalTokens
from moefold.topology.folded_layout import fold


@pytest.mark.parametrize("scope", ["full", "local"])
@pytest.mark.parametrize("capacity", [{}, {"per": "device", "device_groups": 4}], ids=["per expert", "per device"])
def test_rows_that_a_capacity_leaves(capacity: dict[str, Any], scope: Any) -> None:
    rule = CapacityConfig(factor=0.7, drop="position", scope=scope, **capacity)
    moe = MoEConfig(num_experts=8, top_k=3, router=RouterConfig(kind="balanced"), capacity=rule)
    run = RunConfig(model=ModelConfig(moe=moe))
    token = torch.arange(37)
    batch = whole_batch(token, token, (37,), step_labels=37, step_tokens=37)
    routing, report = Router(moe, 4, LocalTokens())(torch.randn(37, 4), batch, None)
    counts = BalancedSplitSizes(run, fold(run.parallel, 1), 0, (37,), 1)
    assert counts._rows_of(0) == report.kept_E.tolist()
    expected = np.flatnonzero(routing.kept.flatten().numpy())
    assert counts._assignments_of(0).tolist() == expected.tolist()
    assert 0 < len(expected) < 111
