"""The search: candidates are legal exactly when runs are, and coarse-to-fine finds what trying everything finds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf, log2
from types import SimpleNamespace

import pytest
from tests.marks import slow_except

from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.errors import ConfigError
from moefold.hardware.cluster import Cluster, cluster_of
from moefold.plan.launch_command import beyond_moefold, changes_to_run
from moefold.plan.memory.peak import bytes_up_to, predict_memory
from moefold.plan.prediction import MemoryLine, MemoryPrediction, TimePrediction
from moefold.plan.search import cheapest_savings
from moefold.plan.search.candidates import choice_of_workload, described, why_illegal, workload_of_choice
from moefold.plan.search.enumeration import layouts, neighbours, worthwhile_stages
from moefold.plan.search.search import NothingFitsError, pareto, search, tighter
from moefold.plan.search.space import LayoutChoice, Space, limits_of, narrowed, usual_space
from moefold.plan.workload import Framework, FrameworkName, Workload, changed, workload_of_run
from moefold.recipes.catalog import recipe


def job_for(
    name: str, world: int, batch: int = 1024, framework: FrameworkName = "moefold"
) -> tuple[RunConfig, Workload]:
    run = recipe(name)
    run = override(run, {"data.global_batch": batch, "parallel.ep": 1, "parallel.pp": 1, "parallel.etp": 1})
    run = override(run, {"parallel.tp": 1, "precision.compute": "bfloat16"})
    workload = workload_of_run(run, cluster_of("H100", world))
    return run, replace(workload, framework=Framework(framework))


def drawn(grids: list[LayoutChoice], space: Space, draw: random.Random) -> LayoutChoice:
    """A coarse candidate with three choices changed."""
    names = draw.sample(LayoutChoice._fields, 3)
    return draw.choice(grids)._replace(**{name: draw.choice(getattr(space, name)) for name in names})


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_20b"])
def test_a_candidate_is_legal_exactly_when_its_run_has_no_problem(name: str) -> None:
    """The reference of `why_illegal`: the trainer's own checks. Rules of what is sensible go beyond what can start."""
    run, workload = job_for(name, 64)
    space, limits, draw = usual_space(workload), limits_of(workload), random.Random(name)
    # Three does not divide much; it makes the rules speak.
    space = replace(space, tp=(*space.tp, 3), ep=(*space.ep, 3), etp=(*space.etp, 3), sequences=(*space.sequences, 3))
    sensible = ("stages for", "only experts", "no dispatch", "domain", "virtual stages", "tokens do not", "no order")
    legal = illegal = 0
    grids = [choice for grid in layouts(limits, usual_space(workload)) for choice in grid]
    while legal < 100 or illegal < 100:
        choice = drawn(grids, space, draw)
        why = why_illegal(choice, limits, space)
        if why is not None and any(words in why for words in sensible):
            continue
        model, dp = choice.tp * choice.cp * choice.pp, 64 // (choice.tp * choice.cp * choice.pp)
        if 64 % model or limits.sequences % (choice.sequences * max(dp, 1)):
            assert why is not None
            continue
        candidate = workload_of_choice(choice, workload, limits, space)
        asked = override(run, changes_to_run(candidate, run))
        found = problems(asked, 64)
        assert bool(found) == (why is not None), (choice, why, found)
        legal, illegal = legal + (why is None), illegal + (why is not None)
        if why is None:
            assert beyond_moefold(candidate) == [] and choice_of_workload(candidate) == choice
            assert workload_of_run(asked, workload.cluster) == candidate


def test_virtual_stages_that_deepen_nothing_are_left_out() -> None:
    # 61 layers and one module over 8 ranks: 8, 4, 3, 2 and 1 layers per stage.
    assert worthwhile_stages(62, 8, tuple(range(1, 65))) == (1, 2, 3, 4, 8)
    assert worthwhile_stages(62, 1, tuple(range(1, 65))) == (1,)
    assert worthwhile_stages(62, 8, (5,)) == (5,), "a pinned value stays"


def test_pinned_choices_are_kept() -> None:
    _, workload = job_for("deepseek_v3", 1024, framework="megatron")
    space = narrowed(usual_space(workload), "tp=1, ep=32,64,recompute=none,mla_up+norms,ep_overlap=false")
    assert (space.tp, space.ep, space.ep_overlap) == ((1,), (32, 64), (False,))
    assert space.recompute == (frozenset(), frozenset({"mla_up", "norms"}))
    found = [choice for grid in layouts(limits_of(workload), space) for choice in grid]
    assert found and {choice.ep for choice in found} == {32, 64} and {choice.tp for choice in found} == {1}
    neighbouring = list(neighbours(found[0], limits_of(workload), space))
    assert neighbouring and {choice.tp for choice in neighbouring} == {1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tq=1", "did you mean 'tp'"),
        ("tp=0", "use a whole number from 1"),
        ("dispatcher=deepp", "did you mean 'deepep'"),
        ("format=bf16", "use bfloat16"),
        ("format=fp8_block", "fp8_block is called fp8_blockwise now"),
        ("sharding=zero3", "use fsdp"),
        ("recompute=mla+norms", "'mla'"),
        ("ep_overlap=perhaps", "choose true, false"),
        ("4", "no choice is called ''"),
    ],
)
def test_what_cannot_be_pinned_is_explained(text: str, expected: str) -> None:
    _, workload = job_for("deepseek_v3", 1024)
    with pytest.raises(ConfigError, match=expected):
        narrowed(usual_space(workload), text)


# ---- against trying everything, under a made-up model with the right tensions ----

NARROW = "tp=1,2,4,cp=1,pp=1,2,4,8,sequences=1,2,4,replicate=1,format=bfloat16,recompute=none,experts,attention+experts"
NARROW += ",savings=none,sharding=fsdp"


def pretend_memory(workload: Workload) -> MemoryPrediction:
    sizes, sequences = workload.parallel, workload.run.data.micro_batch
    weights = 100e9 / (sizes.pp * sizes.tp) / (sizes.ep if sizes.ep > 1 else 1) ** 0.7
    kept = 1.0 - 0.3 * len(workload.recompute)
    activations = 6e9 * sequences * kept * (1 + 0.2 * workload.ep_overlap) / sizes.tp
    lines = (MemoryLine("weights", "", weights), MemoryLine("activations", "", activations))
    return MemoryPrediction(lines, workload.cluster.gpu.memory_bytes / 4)


def pretend_time(workload: Workload) -> TimePrediction:
    sizes = workload.parallel
    work = 1 + 0.15 * len(workload.recompute) + 0.1 / workload.run.data.micro_batch
    exchange = 0.1 * log2(sizes.ep + 1) * (0.3 if workload.ep_overlap else 1) * (0.8 if sizes.ep <= 8 else 1.5)
    exchange *= 1.3 if workload.dispatcher == "all_gather" else 1
    bubble = (sizes.pp - 1) / (workload.microbatches * sizes.vpp) * (0.5 if workload.delay_wgrad else 1)
    seconds = (work + exchange + 0.2 * log2(sizes.tp) + 0.05 * log2(sizes.etp) + 0.01 * sizes.vpp) * (1 + bubble)
    return TimePrediction(seconds, seconds, seconds, ())


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cheapest_savings, "predict_memory", pretend_memory)
    monkeypatch.setattr(cheapest_savings, "bytes_up_to", lambda workload, limit: pretend_memory(workload).total)
    monkeypatch.setattr(cheapest_savings, "least_bytes", lambda workload: 0.0)
    monkeypatch.setattr(cheapest_savings, "usable_bytes", lambda workload: workload.cluster.gpu.memory_bytes / 4)
    pretend_step = lambda workload: SimpleNamespace(total=pretend_time(workload).step_seconds)  # noqa: E731
    monkeypatch.setattr(cheapest_savings, "step_time", pretend_step)


def everything(workload: Workload, space: Space) -> list[tuple[float, float, LayoutChoice]]:
    limits, found = limits_of(workload), []
    for values in product(*(getattr(space, name) for name in LayoutChoice._fields)):
        choice = LayoutChoice(*values)
        if why_illegal(choice, limits, space) is None:
            candidate = workload_of_choice(choice, workload, limits, space)
            memory = pretend_memory(candidate)
            if memory.fits:
                found.append((pretend_time(candidate).step_seconds, memory.total, choice))
    return sorted(found, key=lambda each: each[:2])


@pytest.mark.usefixtures("pretending")
@pytest.mark.parametrize(
    ("name", "world", "batch"),
    slow_except([("mixtral_8x7b", 32, 128), ("qwen3_30b_a3b", 64, 256)], ("mixtral_8x7b", 32, 128)),
)
def test_coarse_to_fine_finds_what_trying_everything_finds(name: str, world: int, batch: int) -> None:
    _, workload = job_for(name, world, batch)
    space = narrowed(usual_space(workload), NARROW + ",vpp=1,2,3,4,clones=0")
    # The made-up time knows no order of ranks, and trying them all takes ten times as long.
    space = replace(space, dense_order=space.dense_order[:1], expert_order=space.expert_order[:1])
    truth = everything(workload, space)
    result = search(workload, space)
    assert result.best.seconds == pytest.approx(truth[0][0]), (described(result.best.choice), described(truth[0][2]))
    assert result.num_time < len(truth) / 2, "it should not try everything"
    assert result.runner_up is not None and result.runner_up.choice[:6] != result.best.choice[:6]


@pytest.mark.usefixtures("pretending")
def test_the_pareto_set_is_beaten_by_nobody() -> None:
    _, workload = job_for("mixtral_8x7b", 32, 128)
    result = search(workload, narrowed(usual_space(workload), NARROW))
    assert result.pareto[0] == result.best and len(result.pareto) > 2
    for each in result.pareto:
        assert not any(other.seconds <= each.seconds and other.bytes < each.bytes * 0.999 for other in result.ranked), (
            described(each.choice)
        )
    assert pareto(result.pareto) == result.pareto


@pytest.mark.usefixtures("pretending")
def test_what_headroom_costs_is_a_faster_layout_that_fits_without_it() -> None:
    _, workload = job_for("mixtral_8x7b", 32, 128)
    space, capacity = narrowed(usual_space(workload), NARROW), workload.cluster.gpu.memory_bytes / 4
    roomy, full = search(workload, space, headroom=0.5), search(workload, space)
    assert max(each.bytes for each in roomy.ranked) <= 0.5 * capacity < full.best.bytes
    found = tighter(workload, space, roomy)
    assert found is not None and 0.5 * capacity < found.bytes <= capacity
    assert full.best.seconds <= found.seconds < roomy.best.seconds
    assert tighter(workload, space, full) is None, "nothing is faster than the fastest that fits at all"
    preferred = replace(full, memory=full.best.bytes)
    assert preferred.preferred.seconds > full.best.seconds, "one that is slower is preferred for its room"
    assert tighter(workload, space, preferred) is None, "what is faster than that one is no cost of headroom"


@pytest.mark.usefixtures("pretending")
def test_of_layouts_that_are_as_fast_one_that_leaves_a_tenth_is_preferred() -> None:
    _, workload = job_for("mixtral_8x7b", 32, 128)
    result = search(workload, narrowed(usual_space(workload), NARROW))
    near = [each for each in result.ranked if each.seconds <= 1.03 * result.best.seconds]
    fitting = [each for each in near if each.bytes <= 0.9 * result.memory]
    assert result.preferred == (fitting[0] if fitting else min(near, key=lambda each: each.bytes))
    # Where a tenth is more than any of them leaves, the roomiest.
    crowded = replace(result, memory=min(each.bytes for each in near))
    assert crowded.preferred == min(near, key=lambda each: each.bytes)


@pytest.mark.usefixtures("pretending")
def test_layouts_within_the_error_are_those_of_the_pareto_set_and_are_marked() -> None:
    _, workload = job_for("mixtral_8x7b", 32, 128)
    result = search(workload, narrowed(usual_space(workload), NARROW))
    assert result.alike(0.0) == result.pareto[:1] and result.alike(inf) == result.pareto
    seconds = sorted(each.seconds for each in result.pareto)
    between = (seconds[1] + seconds[2]) / 2 / result.best.seconds - 1
    assert [each.seconds for each in result.alike(between)] == seconds[:2]


@pytest.mark.usefixtures("pretending")
def test_the_answer_is_the_same_every_time_and_at_least_as_good_as_the_users() -> None:
    _, workload = job_for("mixtral_8x7b", 32, 128)
    workload = changed(workload, parallel={"pp": 8}, data={"global_batch": 4 * 32})
    said: list[tuple[str, int, int]] = []
    first = search(workload, narrowed(usual_space(workload), NARROW), lambda *words: said.append(words))
    again = search(workload, narrowed(usual_space(workload), NARROW))
    assert first.ranked == again.ranked and first.own is not None
    assert first.own.choice == choice_of_workload(workload) and first.best.seconds <= first.own.seconds
    assert {what for what, _, _ in said} == {"grids", "varying options", "climbing"}


@pytest.mark.usefixtures("pretending")
def test_when_nothing_fits_the_leanest_is_named_and_when_nothing_is_legal_the_rule() -> None:
    _, workload = job_for("mixtral_8x7b", 32, 128)
    small = replace(workload, cluster=replace(workload.cluster, gpu=replace(workload.cluster.gpu, memory_gb=1.0)))
    with pytest.raises(NothingFitsError, match=r"leanest needs .* GiB of .* MiB") as refused:
        search(small, narrowed(usual_space(small), NARROW))
    assert refused.value.lacks_memory
    with pytest.raises(NothingFitsError, match="no legal layout: 8 experts do not divide over ep"):
        search(workload, narrowed(usual_space(workload), "ep=3"))


# ---- memory is predicted no further than it takes to know that a candidate does not fit ----


@pytest.mark.parametrize(
    ("name", "world", "framework"),
    [("deepseek_v3", 1024, "moefold"), ("qwen3_30b_a3b", 64, "megatron"), ("gpt_oss_120b", 64, "fsdp2")],
)
def test_bytes_up_to_a_limit_are_the_whole_prediction_or_more_than_the_limit(
    name: str, world: int, framework: FrameworkName
) -> None:
    _, workload = job_for(name, world, framework=framework)
    limits, space = limits_of(workload), usual_space(workload)
    grids = [choice for grid in layouts(limits, space) for choice in grid]
    bounded = 0
    for choice in random.Random(1).sample(grids, min(60, len(grids))):
        made = workload_of_choice(choice, workload, limits, space)
        total = predict_memory(made).total
        for limit in (total, total * (1 + 1e-7), inf):
            assert bytes_up_to(made, limit) == total
        for limit in (total * (1 - 1e-7), total * 0.9, total * 0.5, 1e9):
            found = bytes_up_to(made, limit)
            assert limit < found <= total * (1 + 1e-9)
            bounded += found < total * 0.99
    assert bounded, "nothing was predicted in part"


@pytest.mark.parametrize(
    ("name", "world", "fixed"),
    [
        ("olmoe_1b_7b", 16, "tp=1,cp=1,pp=1,2"),
        ("deepseek_v3", 512, "tp=1,cp=1,pp=8,vpp=1,2,ep=32,64,etp=1"),
        ("qwen3_235b_a22b", 128, "tp=1,cp=1,pp=4,8,vpp=1,2,ep=16,32"),
        ("deepseek_v3", 32, "tp=1,cp=1,pp=1,2,ep=32,vpp=1"),
    ],
)
def test_partial_predictions_change_no_answer(
    name: str, world: int, fixed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference predicts every candidate's memory whole."""
    _, workload = job_for(name, world)
    space = narrowed(usual_space(workload), fixed)

    def answer() -> object:
        try:
            found = search(workload, space, headroom=0.05)
        except NothingFitsError as error:
            return str(error)
        return found.ranked, found.pareto, found.own, found.num_layouts, found.num_memory, found.num_time

    quick = answer()
    monkeypatch.setattr(cheapest_savings, "bytes_up_to", lambda workload, limit: predict_memory(workload).total)
    assert quick == answer()
    assert isinstance(quick, str) == (world == 32)


def test_tp_stays_inside_the_domain() -> None:
    _, workload = job_for("deepseek_v3", 1024)
    lone = replace(workload, cluster=Cluster(workload.cluster.gpu, 1024, domain=2, nic_gb_s=50))
    assert usual_space(lone).tp == (1, 2)


def test_recipes_are_searched_when_asked() -> None:
    """Those that the GPU has units for and the trainer has; otherwise the run's own stays."""
    _, workload = job_for("deepseek_v3", 1024)
    narrow = changed(workload, precision={"recipe": "fp8_tensor"})
    assert usual_space(workload).format == (workload.format,) and usual_space(narrow).format == ("fp8_tensor",)
    assert usual_space(workload, recipes=True).format == (workload.format, "fp8_tensor", "fp8_blockwise")
    on_gb300 = replace(workload, cluster=cluster_of("GB300", 1024))
    assert usual_space(on_gb300, recipes=True).format == (workload.format, "nvfp4", "mxfp8", "fp8_tensor")
    theirs = replace(on_gb300, framework=Framework("megatron"))
    assert "nvfp4" not in usual_space(theirs).format and "nvfp4" in usual_space(theirs, recipes=True).format


def test_a_searched_recipe_is_a_key_of_the_run() -> None:
    _, workload = job_for("deepseek_v3", 1024)
    limits, space = limits_of(workload), usual_space(workload, recipes=True)
    choice = choice_of_workload(workload)._replace(format="fp8_blockwise")
    precision = workload_of_choice(choice, workload, limits, space).run.precision
    assert (precision.compute, precision.recipe) == ("bfloat16", "fp8_blockwise")
    back = workload_of_choice(choice._replace(format="bfloat16"), workload, limits, space).run.precision
    assert (back.compute, back.recipe) == ("bfloat16", None)
