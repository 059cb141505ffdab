"""Every rule about pipelines and context has a run that keeps it and one that breaks it, at the expected path."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from moefold.checks import context, parallel
from moefold.config.attention import GatedDeltaNetConfig, GQAConfig, MLAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.parallel import ContextConfig, ParallelConfig, RankOrderConfig
from moefold.config.run import RunConfig
from moefold.errors import Problem
from moefold.topology.folded_layout import fold


def run_with(
    layers: int = 4, mtp: int = 0, attention: Any = None, data: DataConfig | None = None, **parallel: Any
) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_layers=layers, num_mtp=mtp, attention=attention or GQAConfig()),
        parallel=ParallelConfig(**parallel),
        data=data or DataConfig(),
    )


def in_mode(mode: Any, cp: int, inner: int = 1, **more: Any) -> RunConfig:
    return run_with(cp=cp, context=ContextConfig(full=mode, inner=inner), **more)


def hybrid(**parallel: Any) -> RunConfig:
    made = run_with(**parallel)
    return replace(made, model=replace(made.model, linear_attention=GatedDeltaNetConfig()))


PACKED = DataConfig(packing="bin_packed")
WINDOW = GQAConfig(num_heads=4, window=8, window_every=2)
STAGES, SCHEDULE, VPP, DYNAMIC = "parallel.stages", "parallel.schedule", "parallel.vpp", "parallel.dynamic_cp"
FULL, INNER = "parallel.context.full", "parallel.context.inner"

# rule, a run that keeps it, a run that breaks it, where the problem is reported
CASES = [
    (
        parallel.stages_hold_every_layer,
        run_with(pp=2, stages="Et*3|tL"),
        run_with(pp=2, stages="Et*2|tL"),
        STAGES,
    ),
    (parallel.stages_hold_every_layer, run_with(pp=8, vpp=4), run_with(pp=2, stages="EttttL"), STAGES),
    (parallel.stages_hold_every_layer, run_with(mtp=1, stages="Et*4mL"), run_with(mtp=1, stages="Et*4L"), STAGES),
    (parallel.stages_hold_every_layer, run_with(pp=8), run_with(pp=2**40), "parallel.pp"),
    (parallel.stages_hold_every_layer, run_with(mtp=3), run_with(mtp=2**40), "model.num_mtp"),
    (parallel.schedule_is_known, run_with(schedule="zb_h1"), run_with(schedule="zbh1"), SCHEDULE),
    (
        parallel.virtual_stages_fit_the_schedule,
        run_with(pp=2, vpp=3, schedule="interleaved"),
        run_with(pp=2, vpp=3, schedule="1f1b"),
        VPP,
    ),
    (
        parallel.virtual_stages_fit_the_schedule,
        run_with(pp=2, vpp=2, schedule="zb_v"),
        run_with(pp=2, vpp=1, schedule="zb_v"),
        VPP,
    ),
    (context.heads_divide_over_the_all_to_all, in_mode("all_to_all", 4), in_mode("all_to_all", 8), FULL),
    (context.heads_divide_over_the_all_to_all, in_mode("ring", 8), in_mode("all_to_all", 4, tp=2), FULL),
    (
        context.heads_divide_over_the_all_to_all,
        run_with(cp=8, context=ContextConfig(windowed="all_to_all")),
        run_with(cp=8, attention=WINDOW, context=ContextConfig(windowed="all_to_all")),
        "parallel.context.windowed",
    ),
    (
        context.heads_divide_over_the_all_to_all,
        in_mode("all_to_all", 8, attention=replace(WINDOW, window_every=1)),
        in_mode("all_to_all", 8, attention=WINDOW),
        FULL,
    ),
    (
        context.heads_divide_over_the_all_to_all,
        in_mode("hierarchical", 8, inner=4, attention=MLAConfig(num_heads=4)),
        in_mode("hierarchical", 16, inner=8, attention=MLAConfig(num_heads=4)),
        INNER,
    ),
    (context.inner_divides_cp, in_mode("hierarchical", 6, inner=3), in_mode("hierarchical", 6, inner=4), INNER),
    (context.linear_attention_has_whole_documents, hybrid(tp=2), hybrid(cp=2), "parallel.cp"),
    (context.linear_attention_has_whole_documents, hybrid(), hybrid(dynamic_cp=True), DYNAMIC),
    (context.inner_is_used, in_mode("hierarchical", 4, inner=2), in_mode("ring", 4, inner=2), INNER),
    (
        context.dynamic_cp_has_bin_packed_documents,
        run_with(dynamic_cp=True, data=PACKED),
        run_with(dynamic_cp=True),
        DYNAMIC,
    ),
    (
        context.dynamic_cp_has_neighbours,
        run_with(dynamic_cp=True, data=PACKED, rank_order=RankOrderConfig("cp-tp-dp-pp")),
        run_with(dynamic_cp=True, data=PACKED, rank_order=RankOrderConfig("tp-dp-cp-pp")),
        "parallel.rank_order.dense",
    ),
    (
        context.dynamic_cp_has_an_even_inner,
        in_mode("hierarchical", 4, inner=2, dynamic_cp=True, data=PACKED),
        in_mode("hierarchical", 3, inner=3, dynamic_cp=True, data=PACKED),
        INNER,
    ),
]

# rule, world, a run that keeps it there, a run that breaks it, where
CASES_WITH_LAYOUT = [
    (
        parallel.microbatches_fit_the_schedule,
        4,
        run_with(pp=4, vpp=2, schedule="dualpipe_v", data=DataConfig(global_batch=8)),
        run_with(pp=4, vpp=2, schedule="dualpipe_v", data=DataConfig(global_batch=4)),
        "data.global_batch",
    ),
    (
        parallel.microbatches_fit_the_schedule,
        8,
        run_with(pp=4, vpp=2, schedule="dualpipe_v", data=DataConfig(global_batch=1, packing="bin_packed")),
        run_with(pp=4, vpp=2, schedule="dualpipe_v", data=DataConfig(global_batch=8)),
        "data.global_batch",
    ),
    (
        context.heads_divide_over_every_all_to_all,
        8,
        in_mode("all_to_all", 2, dynamic_cp=True, attention=GQAConfig(num_heads=8), data=PACKED),
        in_mode("all_to_all", 2, dynamic_cp=True, data=PACKED),
        FULL,
    ),
    (
        context.dynamic_cp_halves_evenly,
        12,
        run_with(pp=3, cp=2, dynamic_cp=True, data=PACKED),
        run_with(cp=2, dynamic_cp=True, data=PACKED),
        DYNAMIC,
    ),
]


def as_list(found: Problem | list[Problem] | None) -> list[Problem]:
    return found if isinstance(found, list) else [] if found is None else [found]


@pytest.mark.parametrize(("rule", "good", "bad", "path"), CASES)
def test_rule(rule: Any, good: RunConfig, bad: RunConfig, path: str) -> None:
    assert as_list(rule(good)) == []
    found = as_list(rule(bad))
    assert found
    assert {problem.path for problem in found} == {path}
    assert all(problem.fix for problem in found)


@pytest.mark.parametrize(("rule", "world", "good", "bad", "path"), CASES_WITH_LAYOUT)
def test_rule_with_a_layout(rule: Any, world: int, good: RunConfig, bad: RunConfig, path: str) -> None:
    assert as_list(rule(good, fold(good.parallel, world))) == []
    found = as_list(rule(bad, fold(bad.parallel, world)))
    assert found
    assert {problem.path for problem in found} == {path}
    assert all(problem.fix for problem in found)


def test_every_rule_has_a_case() -> None:
    rules = {*parallel.PIPELINE_RULES, *context.RULES}
    with_layout = {*parallel.RULES_WITH_LAYOUT, *context.RULES_WITH_LAYOUT}
    assert rules == {rule for rule, *_ in CASES}
    assert with_layout == {rule for rule, *_ in CASES_WITH_LAYOUT}


@pytest.mark.parametrize("size", [-1, 0, 2**48])
@pytest.mark.parametrize("key", ["pp", "vpp", "cp", "tp", "inner", "num_layers", "num_mtp", "num_heads", "micro_batch"])
def test_absurd_sizes_are_another_rules_problem(key: str, size: int) -> None:
    """Rules run on anything that can be read, and answer at once; how many layers there are is bounded before."""
    size = min(size, 10_000) if key == "num_layers" else size
    degrees: dict[str, Any] = {key: size} if key in {"pp", "vpp", "cp", "tp"} else {}
    modes = ContextConfig(full="all_to_all", windowed="hierarchical", inner=size if key == "inner" else 1)
    model: dict[str, Any] = {key: size} if key in {"num_layers", "num_mtp"} else {}
    heads = GQAConfig(num_heads=size if key == "num_heads" else 4, window=8, window_every=2)
    data = DataConfig(**({key: size} if key == "micro_batch" else {}))
    for stages, schedule in ((None, "1f1b"), ("Et*4L", "dualpipe_v")):
        run = RunConfig(
            model=ModelConfig(attention=heads, **model),
            parallel=ParallelConfig(**degrees, stages=stages, schedule=schedule, context=modes, dynamic_cp=True),
            data=data,
        )
        started = time.process_time()
        for rule in (*parallel.PIPELINE_RULES, *context.RULES):
            as_list(rule(run))
        assert time.process_time() - started < 2
        layout = fold(ParallelConfig(), 1)
        for rule_with_layout in (*parallel.RULES_WITH_LAYOUT, *context.RULES_WITH_LAYOUT):
            as_list(rule_with_layout(run, layout))


def test_the_reader_is_told_what_would_work() -> None:
    found = parallel.schedule_is_known(run_with(schedule="interleave"))
    assert found is not None
    assert "did you mean 'interleaved'?" in str(found)
    (found,) = context.heads_divide_over_the_all_to_all(in_mode("all_to_all", 8, tp=2))
    assert str(found) == (
        "parallel.context.full: 2 heads of a tp rank do not divide over cp=8; use ring, or 1 or 2 ranks"
    )
