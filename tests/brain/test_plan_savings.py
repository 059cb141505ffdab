"""Savings of our own framework: the cheapest set that fits, what each frees and costs, and that launches can start; and
those of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.hardware.cluster import cluster_of
from moefold.plan.memory import saving_steps
from moefold.plan.memory.peak import predict_memory
from moefold.plan.memory.saving_steps import (
    DEFAULTS,
    NONE,
    STEPS,
    conflicts,
    offered,
    saving,
    savings_of,
    why_no_savings,
)
from moefold.plan.search.cheapest_savings import by_price, cheapest_fit, first_that_fits, ladder, trimmed
from moefold.plan.search.explain import switched_on
from moefold.plan.search.proposal import Question, propose, with_framework
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload, changed, workload_of_run
from moefold.recipes.catalog import recipe

GIB = 2**30


@pytest.fixture(autouse=True)
def all_are_trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is tested here is the search, whichever savings the trainer has today."""
    monkeypatch.setattr(saving_steps, "_TRAINED", {})
    yield


def deepseek(world: int, batch: int, **layout: object) -> Workload:
    return changed(
        Workload(recipe("deepseek_v3"), cluster_of("H100", world)),
        parallel={"stages": None, "schedule": "interleaved", "sharding": "flat", **layout},
        data={"global_batch": batch, "micro_batch": 1},
        precision={"compute": "bfloat16"},
    )


FLAT = deepseek(256, 4096, pp=4, vpp=4, ep=64)


def test_entries_are_keys_of_a_run() -> None:
    everything = saving(FLAT, frozenset({entry for step in STEPS for entry in step.entries if "offload" not in entry}))
    assert savings_of(FLAT.run) == NONE and saving(everything, NONE).run == FLAT.run
    assert {path for path, default in DEFAULTS.items() if default not in (None, "keep", "device", "nearest")} == set()
    assert conflicts(frozenset({"memory.retain.core=discard", "memory.retain.core=offload"}))


def test_each_saving_frees_memory_and_none_costs_nothing_for_certain() -> None:
    steps = by_price(
        offered(FLAT),
        NONE,
        lambda some: predict_memory(saving(FLAT, some)).total,
        lambda some: predict_time(saving(FLAT, some)).step_seconds,
    )
    assert {step.name for step in steps} >= {"mla_up", "activation", "norms", "gate_up", "rows_away", "remainder"}
    # What changes numbers is the last resort.
    assert [step.exact for step in steps] == sorted((step.exact for step in steps), reverse=True)
    assert steps[-1].name == "moments_bf16"


@pytest.mark.parametrize("size", [170, 120, 80])
def test_the_cheapest_set_fits_and_nothing_in_it_is_spare(size: int) -> None:
    found = cheapest_fit(FLAT, size * GIB)
    assert found is not None and predict_memory(found).total <= size * GIB
    for one in switched_on(found, NONE):
        without = saving(found, savings_of(found.run) - one.entries)
        assert predict_memory(without).total > size * GIB
        assert one.bytes == pytest.approx(predict_memory(without).total - predict_memory(found).total)


def test_what_does_not_fit_at_all_is_said() -> None:
    assert cheapest_fit(FLAT, 20 * GIB) is None


def test_the_first_set_that_fits_is_found_from_any_guess() -> None:
    steps = offered(FLAT)
    sets = ladder(steps, NONE)
    assert sets[0] == NONE and all(before < after for before, after in pairwise(sets))
    for needed in range(len(sets)):
        for guess in range(len(sets) + 1):
            assert first_that_fits(sets, lambda some, n=needed: len(some) >= len(sets[n]), guess) == needed
    assert first_that_fits(sets, lambda some: False, 3) is None
    assert trimmed(sets[-1], NONE, steps, lambda some: "memory.retain.mla_up=discard" in some) == frozenset(
        {"memory.retain.mla_up=discard"}
    )


def test_a_proposal_says_what_was_switched_on_and_leaves_room() -> None:
    run = replace(recipe("deepseek_v3"), data=replace(recipe("deepseek_v3").data, global_batch=4096))
    pins = "tp=2,cp=1,pp=8,vpp=4,ep=64,etp=1,sequences=1,replicate=1,ep_overlap=false,delay_wgrad=false"
    found = propose(Question(run, "deepseek_v3", cluster_of("H100", 1024), fixed=pins))
    assert found.chosen.memory.total <= 0.95 * found.chosen.memory.capacity
    assert found.switched_on and all(one.bytes > 0 for one in found.switched_on)
    words = " ".join(found.reasons)
    assert "Switched on so that it fits" in words and "Data parallelism is flat sharding" in words
    assert "FSDP2 would hold" in words


def test_a_layout_that_does_not_fit_is_told_what_would_help() -> None:
    found = propose(Question(FLAT.run, "deepseek_v3", cluster_of("H200", 256), searching=False))
    assert any("It would fit with memory." in words for words in found.reasons), found.reasons


def test_what_the_trainer_lacks_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_steps, "_TRAINED", {"memory.optimizer": ("device",), "memory.retain.core": ("keep",)})
    names = {step.name for step in offered(FLAT)}
    assert "optimizer_host" not in names and not {"core", "core_away"} & names and "mla_up" in names


@pytest.mark.parametrize(
    "name, gpu, gpus", [("deepseek_v3", "H100", 1024), ("deepseek_v3", "GB200", 256), ("qwen3_30b_a3b", "H100", 8)]
)
@pytest.mark.nightly
def test_the_printed_launch_starts_and_has_five_percent_to_spare(
    monkeypatch: pytest.MonkeyPatch, name: str, gpu: str, gpus: int
) -> None:
    monkeypatch.undo()
    found = propose(Question(recipe(name), name, cluster_of(gpu, gpus)))
    assert found.chosen.memory.total <= 0.95 * found.chosen.memory.capacity
    assert found.beyond == () and problems(found.chosen.workload.run, gpus) == []


def test_rows_that_probs_multiply_are_not_offloaded() -> None:
    run = recipe("mixtral_8x7b_proxy")
    assert run.model.moe is not None
    scaled = replace(run, model=replace(run.model, moe=replace(run.model.moe, weight_at="input")))
    names = [{step.name for step in offered(workload_of_run(each, cluster_of("H100", 1)))} for each in (run, scaled)]
    assert names[0] - names[1] == {"rows_away"}


# ---- Megatron-LM's ----


def megatron(gpus: int, **sections: dict[str, object]) -> Workload:
    run = override(recipe("qwen3_30b_a3b"), {"parallel.ep": 4})
    return changed(with_framework(workload_of_run(run, cluster_of("H100", gpus)), "megatron"), **sections)


def asked(gpus: int) -> Question:
    run = recipe("qwen3_30b_a3b")
    return Question(run, run.name, cluster_of("H100", gpus), framework="megatron", fixed="ep=4,pp=1,tp=1,cp=1")


def test_megatron_saves_optimizer_states_where_nothing_fits_without() -> None:
    found = propose(asked(4))
    assert found.switched_on and found.chosen.workload.run.memory.optimizer == "cpu"
    assert found.chosen.memory.fits and not predict_memory(saving(found.chosen.workload, NONE)).fits
    roomy = propose(asked(16))
    assert roomy.chosen.memory.fits and not roomy.switched_on


def test_savings_of_megatron_leave_the_rest_of_the_run_alone() -> None:
    lean = megatron(4, precision={"gradients": "bfloat16", "moments": "bfloat16"})
    assert savings_of(lean.run, ours=False) == {"precision.moments=bfloat16"}
    wide = saving(lean, frozenset({"memory.optimizer=cpu"}))
    assert (wide.run.precision.moments, wide.run.precision.gradients) == ("float32", "bfloat16")
    assert wide.run.precision.master == lean.run.precision.master and wide.run.memory.optimizer == "cpu"
    assert savings_of(saving(wide, NONE).run, ours=False) == NONE
    assert [step.name for step in offered(lean)] == ["optimizer_cpu"]


def test_updates_on_the_cpu_take_what_a_sweep_measured() -> None:
    """25 to 100 % of the states of Qwen3-30B: 3.8, 7.6, 11.6 and 15.2 GB for 0.875, 1.488, 2.191 and 3.193 s."""
    workload = megatron(8)
    away = changed(workload, memory={"optimizer": "cpu"})
    freed = predict_memory(workload).of("optimizer") - predict_memory(away).of("optimizer")
    slower = predict_time(away).step_seconds - predict_time(workload).step_seconds
    # Bytes of the sweep are of the busiest rank, as these are; the update on the device is left out of both.
    assert 0.16 < slower / (freed / 1e9) < 0.26


def test_only_the_distributed_optimizer_of_megatron_saves_states() -> None:
    away = frozenset({"memory.optimizer=cpu"})
    assert why_no_savings(away, "fsdp", frozenset(), 1, ours=False)
    assert why_no_savings(away, "zero1", frozenset(), 1, ours=False) is None
    assert why_no_savings(away, "fsdp", frozenset(), 1) is None
