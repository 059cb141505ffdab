"""Whichever axis has neighbouring ranks (`parallel.rank_order`), ranks compute what one process computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.marks import slow_except

from moefold.config.data import DataConfig
from moefold.config.parallel import ParallelConfig, RankOrderConfig
from moefold.prove.cases import Case
from moefold.prove.mutant_cases import CASES
from moefold.prove.proof_report import case_report
from moefold.prove.random_cases import draw_cases
from moefold.prove.verdict import prove
from moefold.topology.folded_layout import DENSE_ORDERS, EXPERT_ORDERS

# Axes of more than one rank in both grids, and what communicates over them.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp and cp": {"tp": 2, "cp": 2, "ep": 2},
    "replicas": {"ep": 2, "dp_replicate": 2, "edp_replicate": 2, "tp": 2},
    "flat, split experts": {"tp": 2, "ep": 2, "etp": 2, "sharding": "flat", "dispatcher": "all_gather"},
    "pipeline": {"pp": 2, "tp": 2, "ep": 2, "schedule": "zb_h1", "dispatcher": "deduplicated"},
    "hosts": {"ep": 4, "tp": 2, "dispatcher": "two_level", "ep_inner": 2},
    "dynamic": {"cp": 2, "tp": 2, "ep": 2, "dynamic_cp": True},
}
ORDERS = {
    "usual": RankOrderConfig(),
    "data innermost": RankOrderConfig("dp-tp-cp-pp", "edp-ep-etp-pp"),
    "reversed": RankOrderConfig("dp-cp-tp-pp", "ep-edp-etp-pp"),
    "cp innermost": RankOrderConfig("cp-tp-dp-pp", "ep-etp-edp-pp"),
}
PAIRS = [(layout, order) for layout in LAYOUTS for order in ORDERS]
QUICK = (("tp and cp", "data innermost"), ("flat, split experts", "reversed"))


def case_of(layout: str, order: str) -> Case:
    run = CASES["folded"].run
    data = DataConfig(seq_len=8, global_batch=8, micro_batch=1)
    if layout == "dynamic":
        data = replace(data, packing="bin_packed")
        if order != "usual":
            order = "cp innermost"
    parallel = ParallelConfig(rank_order=ORDERS[order], **LAYOUTS[layout])
    return Case(replace(run, parallel=parallel, data=data), 8)


@pytest.mark.parametrize(("layout", "order"), slow_except(PAIRS, *QUICK), ids=str)
def test_every_order_of_ranks_computes_what_one_process_does(layout: str, order: str) -> None:
    verdict = prove(case_of(layout, order))
    assert verdict.holds, case_report(verdict)


def test_the_proof_draws_every_order() -> None:
    drawn = [case.run.parallel.rank_order for case in draw_cases(80, 8, 5)]
    assert {order.dense for order in drawn} == set(DENSE_ORDERS)
    assert {order.expert for order in drawn} == set(EXPERT_ORDERS)
    assert 20 < sum(order != RankOrderConfig() for order in drawn) < 60
