"""Stages on several ranks compute what one process computes, whatever the shapes, the stages and the order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from tests.marks import slow_except
from tests.staged_runs import MODEL, Lengths, microbatches, on_shares, share_on, staged_run
from torch import Tensor

import moefold.pipeline.runtime
from moefold.config.model import ModelConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.nn.batch import Batch
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import local_part
from moefold.pipeline.pipeline_state import PipelineState
from moefold.pipeline.runtime import run_forward_only, run_schedule
from moefold.pipeline.step import evaluate, make_optimizer, run_step

# Two steps of the same processes: documents of any lengths, another number of microbatches, a microbatch of one token.
STEPS: tuple[tuple[Lengths, ...], ...] = (
    ((5,), (3, 4, 1), (2,), (6, 2), (1, 1), (9,), (2, 3), (4,)),
    ((8,), (1,), (2, 2, 2, 2), (3,), (7, 1), (2,), (3, 3), (5,), (4, 2), (1, 6)),
)
AHEAD = replace(MODEL, num_layers=3, num_mtp=2)
TIED = replace(MODEL, tied_embeddings=True)


class Step(NamedTuple):
    """What one process computes in a step, before its update."""

    loss: Tensor
    ahead: Tensor
    grad_norm: Tensor
    counts_ME: Tensor
    gradients: dict[str, Tensor]


def run_steps(local_model: LocalModel, steps: Sequence[Sequence[Batch]]) -> list[Step]:
    """Train; every gradient is copied as it was before clipping."""
    optimizer, done = make_optimizer(local_model), []
    for batches in steps:
        seen: dict[str, Tensor] = {}
        result = run_step(
            local_model,
            optimizer,
            batches,
            lambda found, seen=seen: seen.update((n, g.clone()) for n, g in found.items()),
        )
        sums = result.sums
        done.append(Step(sums.loss, sums.mtp_loss, result.grad_norm, sums.counts_ME, seen))
    return done


@cache
def alone(model: ModelConfig, shapes: tuple[tuple[Lengths, ...], ...] = STEPS) -> list[Step]:
    run = staged_run(model)
    return run_steps(share_on(run), [microbatches(run, lengths, seed=n) for n, lengths in enumerate(shapes)])


def batches_of(local_model: LocalModel, shapes: Sequence[Lengths], seed: int) -> list[Batch]:
    """Every dp-th microbatch, the first of them being this rank's index."""
    dp = local_model.groups["dp"]
    return microbatches(local_model.run, shapes, seed=seed)[dp.index :: dp.size]


def assert_like_one_process(run: RunConfig, world: int, shapes: tuple[tuple[Lengths, ...], ...] = STEPS) -> None:
    expected = alone(run.model, shapes)

    def work(local_model: LocalModel) -> list[str]:
        found = run_steps(local_model, [batches_of(local_model, lengths, n) for n, lengths in enumerate(shapes)])
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got.counts_ME, want.counts_ME)
            for value, reference in zip(got[:3], want[:3]):
                torch.testing.assert_close(value, reference, rtol=1e-11, atol=1e-12)
            for name, gradient in got.gradients.items():
                whole = want.gradients[name]
                part, scale = whole[local_model.param_shards[name].box], whole.abs().max().item()
                torch.testing.assert_close(gradient, part, rtol=0, atol=1e-10 * scale, msg=f"{name}")
        return list(found[0].gradients)

    held = on_shares(run, world, work)
    assert set().union(*held) == set(expected[0].gradients)


# ---- orders ----

# (virtual stages, stages): MTP modules come before the loss, so that one, two and three tensors cross.
ORDERS: dict[str, tuple[int, str]] = {
    "gpipe": (1, "Ettt|mmL"),
    "1f1b": (1, "Etttmm|L"),
    "1f1b_overlapped": (1, "Etttm|mL"),
    "interleaved": (2, "Et|ttm|m|L"),
    "interleaved_overlapped": (2, "Et|tt|m|mL"),
    "zb_h1": (1, "Ettt|mmL"),
    "zb_v": (2, "Et|tt|mm|L"),
    "dualpipe_v": (2, "Ett|tm|m|L"),
}


@pytest.mark.parametrize("schedule", slow_except(ORDERS, "1f1b", "zb_v", "dualpipe_v"))
def test_microbatches_of_any_shape_and_number_with_several_tensors_across(schedule: str) -> None:
    vpp, stages = ORDERS[schedule]
    run = staged_run(AHEAD, pp=2, vpp=vpp, stages=stages, schedule=schedule)
    assert_like_one_process(run, 2)


@pytest.mark.parametrize("schedule", slow_except(["1f1b", "zb_h1", "1f1b_overlapped"], "zb_h1"))
def test_fewer_microbatches_than_stages(schedule: str) -> None:
    """Then more, then fewer again, in the same processes."""
    shapes = (STEPS[0][:1], STEPS[0][:5], STEPS[1][:2])
    run = staged_run(replace(MODEL, num_layers=3), pp=3, stages="Et|t|tmL", schedule=schedule)
    assert_like_one_process(run, 3, shapes)


def test_recomputed_phases_across_stages() -> None:
    run = staged_run(
        AHEAD,
        recompute=("attention", "feed_forward", "experts"),
        pp=2,
        vpp=2,
        stages="Et|tt|mm|L",
        schedule="zb_v",
    )
    assert_like_one_process(run, 2)


# ---- stages ----


@pytest.mark.parametrize(
    ("schedule", "vpp", "stages"),
    slow_except(
        [
            ("interleaved", 3, "Et||t|||mL"),
            ("zb_v", 2, "Ett|||mL"),
            ("dualpipe_v", 2, "E||ttm|L"),
            ("interleaved_overlapped", 2, "Ettm|||L"),
        ],
        ("interleaved", 3, "Et||t|||mL"),
    ),
)
def test_empty_stages_hand_on_what_they_receive(schedule: str, vpp: int, stages: str) -> None:
    assert_like_one_process(staged_run(pp=2, vpp=vpp, stages=stages, schedule=schedule), 2)


@pytest.mark.parametrize("schedule", slow_except(["1f1b", "zb_h1", "1f1b_overlapped"], "1f1b"))
def test_a_rank_whose_stages_are_all_empty_takes_part(schedule: str) -> None:
    run = staged_run(pp=3, stages="Ett||mL", schedule=schedule)
    assert_like_one_process(run, 3)

    def work(local_model: LocalModel) -> int:
        return sum(parameter.numel() for parameter in local_model.model.parameters())

    sizes = on_shares(run, 3, work)
    assert sizes[1] == 0 and sizes[0] > 0 and sizes[2] > 0


# ---- weights that several stages share ----


def _bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _shared(local_model: LocalModel) -> dict[str, list[Any]]:
    """The digest and the place of everything that more than one stage holds."""
    return {
        name: [_bits(local_part(parameter)), str(local_model.param_shards[name].box)]
        for name, parameter in local_model.model.named_parameters()
        if len(local_model.param_shards[name].pp_ranks) > 1
    }


SHARED: list[tuple[int, ModelConfig, dict[str, Any]]] = [
    (2, TIED, {"pp": 2, "stages": "Ett|mL"}),
    (2, replace(TIED, num_mtp=0), {"pp": 2, "schedule": "zb_h1"}),
    (2, TIED, {"pp": 2, "vpp": 2, "schedule": "dualpipe_v", "stages": "Et|t|m|L"}),
    # The embedding on three ranks: for tokens, for the MTP module, and as the head.
    (3, TIED, {"pp": 3, "stages": "Ett|m|L"}),
    (4, TIED, {"pp": 2, "stages": "Ett|mL", "schedule": "1f1b_overlapped", "ep": 2}),
    # Not tied, and yet on two ranks: the embedding, and the norm before the head.
    (3, MODEL, {"pp": 3, "stages": "Ett|m|L"}),
]


@pytest.mark.parametrize(
    ("world", "model", "layout"),
    slow_except(SHARED, SHARED[0], SHARED[-1]),
    ids=["tied", "tied, split", "tied, in a V", "tied on three", "tied, sharded", "untied"],
)
def test_every_replica_of_a_shared_weight_stays_the_same_to_the_bit(
    world: int, model: ModelConfig, layout: dict[str, Any]
) -> None:
    run = staged_run(model, **layout)
    assert_like_one_process(run, world)

    def work(local_model: LocalModel) -> dict[str, list[Any]]:
        before = _shared(local_model)
        run_steps(local_model, [batches_of(local_model, STEPS[n % 2], n) for n in range(3)])
        after = _shared(local_model)
        assert all(after[name][0] != before[name][0] for name in before)
        return after

    found = on_shares(run, world, work)
    copies: dict[tuple[str, str], list[str]] = {}
    for rank in found:
        for name, (bits, place) in rank.items():
            copies.setdefault((name, place), []).append(bits)
    assert any(name == "embedding.weight" for name, _ in copies)
    assert all(len(bits) > 1 and len(set(bits)) == 1 for bits in copies.values())


# ---- sharded data parallelism ----


SHARDED: list[tuple[int, dict[str, Any]]] = [
    (4, {"pp": 2, "stages": "Ett|mL"}),
    (4, {"pp": 2, "stages": "Ett|mL", "schedule": "zb_h1", "dp_replicate": 2}),
    (4, {"pp": 2, "vpp": 2, "stages": "Et|t|m|L", "schedule": "interleaved_overlapped", "ep": 2}),
    (6, {"pp": 2, "stages": "Ett|mL", "schedule": "zb_h1"}),
    (2, {"schedule": "1f1b_overlapped"}),
    (2, {"schedule": "zb_h1", "ep": 2}),
]


@pytest.mark.parametrize(
    ("world", "layout"),
    slow_except(SHARDED, SHARDED[0], SHARDED[-1]),
    ids=["sharded", "copies", "overlapped experts", "three shards", "overlap without a pipeline", "split without one"],
)
def test_gradients_add_up_over_microbatches_and_shards(world: int, layout: dict[str, Any]) -> None:
    """Parameters are gathered once per step, and reduced once, however many microbatches there are."""
    shapes = STEPS if world < 6 else (STEPS[0][:6], STEPS[1][:9])
    assert_like_one_process(staged_run(**layout), world, shapes)


# ---- validation ----


@pytest.mark.parametrize("schedule", slow_except(ORDERS, "dualpipe_v"))
def test_validation_equals_one_process_and_leaves_nothing_behind(schedule: str) -> None:
    vpp, stages = ORDERS[schedule]
    run = staged_run(AHEAD, pp=2, vpp=vpp, stages=stages, schedule=schedule)
    single = replace(run, parallel=ParallelConfig())
    expected = evaluate(share_on(single), microbatches(single, STEPS[0])).item()
    wanted = alone(AHEAD, STEPS[1:])

    def work(local_model: LocalModel) -> None:
        state = {name: _bits(local_part(p)) for name, p in local_model.model.named_parameters()}
        for _ in range(2):
            assert evaluate(local_model, batches_of(local_model, STEPS[0], 0)).item() == pytest.approx(
                expected, rel=1e-12
            )
        assert state == {name: _bits(local_part(p)) for name, p in local_model.model.named_parameters()}
        assert all(parameter.grad is None for parameter in local_model.model.parameters())
        # A step after it is the step it would have been.
        (step,) = run_steps(local_model, [batches_of(local_model, STEPS[1], 0)])
        torch.testing.assert_close(step.grad_norm, wanted[0].grad_norm, rtol=1e-11, atol=0)

    on_shares(run, 4 if schedule in ("1f1b", "dualpipe_v") else 2, work)


@pytest.mark.parametrize("schedule", ORDERS)
def test_a_step_and_a_validation_keep_nothing(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was on its way has arrived, and nothing that a microbatch left is held on to."""
    flights: list[PipelineState] = []
    init_state = moefold.pipeline.runtime.init_state

    def watched(*given: Any) -> PipelineState:
        flights.append(init_state(*given))
        return flights[-1]

    monkeypatch.setattr(moefold.pipeline.runtime, "init_state", watched)
    local_model = share_on(staged_run(vpp=ORDERS[schedule][0], schedule=schedule))
    batches = microbatches(local_model.run, STEPS[0])
    run_schedule(local_model, batches)
    run_forward_only(local_model, batches)
    for flight in flights:
        assert not (flight.inputs or flight.forwards or flight.pending_sends or flight.gradients)
    assert len(flights) == 2 and (local_model.weight_grads is None or local_model.weight_grads.is_empty)
