"""What a rank holds: exactly its boxes, together everything once, and no more groups than it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support import on_ranks

from moefold.comm.process_groups import Groups
from moefold.config.parallel import ParallelConfig
from moefold.parallel.parallelize import build_local_model
from moefold.parallel.param_shards import local_part
from moefold.recipes.catalog import RECIPES

LAYOUTS = ({"tp": 2, "ep": 4}, {"ep": 2, "etp": 2}, {"ep": 2, "dp_replicate": 2, "edp_replicate": 2}, {"tp": 4})


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_boxes_are_what_ranks_hold_and_primary_replicas_cover_each_parameter_once(degrees: dict[str, int]) -> None:
    run = replace(RECIPES["qwen3_30b_a3b_proxy"](), parallel=ParallelConfig(**degrees))

    def work(groups: Groups) -> dict[str, list[int]]:
        local_model = build_local_model(run, groups, torch.device("cpu"))
        sizes: dict[str, list[int]] = {}
        for name, parameter in local_model.model.named_parameters():
            held = local_model.param_shards[name]
            part = local_part(parameter)
            assert list(part.shape) == [box.stop - box.start for box in held.box], name
            sizes[name] = [part.numel() if held.is_primary else 0, torch.Size(held.shape).numel()]
        return sizes

    answers = on_ranks(work, 4, **degrees)
    for name, (_, whole) in answers[0].items():
        assert sum(answer[name][0] for answer in answers) == whole, name
