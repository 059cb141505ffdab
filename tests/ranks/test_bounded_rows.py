"""Dropless dispatch without a host read: the bits of exact counts, one trace for every routing, one rerun where rows do
not fit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kill import digest
from tests.marks import slow_except
from tests.support import on_ranks
from tests.sync_free import HostSyncError, shapes_of, sync_free
from torch import Tensor

import moefold
import moefold.pipeline.step
from moefold.blueprint.row_bounds import RowBounds, row_bounds
from moefold.comm.process_groups import Groups
from moefold.comm.spawn import spawn_ranks
from moefold.config.moe import BalanceConfig, MoEConfig
from moefold.config.run import RunConfig
from moefold.moe.dispatch.all_to_all import AllToAllDispatcher
from moefold.moe.dispatch.all_to_all_bounded import (
    BoundedAllToAllDispatcher,
    lifted,
    places_of,
    places_reference,
    slots_of,
)
from moefold.moe.dispatch.base import Dispatcher, Routing
from moefold.moe.expert_backends import grouped_experts
from moefold.moe.experts import Experts
from moefold.moe.layer import MoELayer
from moefold.moe.router import Router
from moefold.nn import matmul_kernels
from moefold.nn.batch import whole_batch
from moefold.nn.matmul_kernels import GROUPED_MATMULS, GroupedKernels
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.nn.parallel_interfaces import LocalTokens
from moefold.train.batches import step_batches
from moefold.train.callbacks.jsonl import JsonLines
from moefold.train.train_context import build_train_context, run_directory
from moefold.train.train_loop import train

# ---- sizes and indices ----


def test_bounds_of_a_layout() -> None:
    """16 tokens with 2 of 8 experts each on 4 ranks: 8 rows a pair and 32 rows a rank on average."""
    run = moefold.load_run("debug_tiny", {"parallel.ep": 4, "parallel.dispatcher": "all_to_all_bounded"})
    moe = replace(run.model.moe, num_experts=8, top_k=2)
    run = replace(run, model=replace(run.model, moe=moe))
    assert row_bounds(run, 16) == RowBounds(pair=12 + 1, rank=40)
    # No pair can have more than every token with both of its experts there, and no rank more than all pairs.
    wide = replace(run, parallel=replace(run.parallel, row_bound=50.0, pair_bound=100.0))
    assert row_bounds(wide, 16) == RowBounds(pair=32 + 1, rank=128)


@pytest.mark.parametrize("seed", range(40))
def test_places_are_those_counted_one_by_one(seed: int) -> None:
    drawn = random.Random(seed)
    sources, experts, pair = drawn.randint(1, 5), drawn.randint(1, 4), drawn.randint(2, 9)
    rows = [[drawn.choice((0, 0, 1, 2, 5)) for _ in range(experts)] for _ in range(sources)]
    rank = drawn.randint(1, sources * (pair - 1))
    found, (slots, counts) = places_of(torch.tensor(rows), pair, rank), places_reference(rows, pair, rank)
    assert found.slot_R.tolist() == slots
    assert found.rows_per_expert_e.tolist() == counts
    fits = sum(min(sum(each), pair - 1) for each in rows)
    assert int(found.overflow) == max(0, fits - rank)
    # The way back: every slot that has a place, and no other.
    back = {slot: place for place, slot in enumerate(slots[: sum(counts)])}
    for slot in range(sources * pair):
        assert bool(found.is_empty_Y[slot]) == (slot not in back)
        assert slot not in back or int(found.place_Y[slot]) == back[slot]


@pytest.mark.parametrize("seed", range(20))
def test_slots_have_each_assignment_once_in_the_order_of_experts(seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    experts = torch.rand(7, 8, generator=drawn).argsort(1)[:, :3]
    kept = torch.rand(7, 3, generator=drawn) < 0.7 if seed % 2 else None
    pair, number = 4 + seed % 5, 7 * 3
    slots = slots_of(Routing(experts, torch.ones(7, 3), kept), 8, 4, pair)
    for rank in range(4):
        mine = [
            (int(experts.flatten()[n]), n)
            for n in range(number)
            if int(experts.flatten()[n]) // 2 == rank and (kept is None or bool(kept.flatten()[n]))
        ]
        wanted = [n for _, n in sorted(mine)][: pair - 1]
        part = slots.assignment_X[rank * pair : (rank + 1) * pair].tolist()
        assert part == wanted + [number] * (pair - len(wanted))
        assert slots.slot_N[wanted].tolist() == list(range(rank * pair, rank * pair + len(wanted)))
    sent = set(slots.assignment_X.tolist())
    assert all(int(slots.slot_N[n]) == 4 * pair - 1 for n in range(number) if n not in sent)


# ---- one layer on ranks ----

TOKENS, DIM = 24, 16
BALANCE = BalanceConfig(microbatch=0.1, sequence=0.1, global_batch=0.1, device=0.1, device_groups=4, z=0.1)
MOE = MoEConfig(num_experts=16, top_k=3, expert_hidden_dim=16, balance=BALANCE, expert_mlp_bias=True)
ENOUGH = RowBounds(pair=TOKENS * 3 + 1, rank=TOKENS * 3 * 4)


class Layer:
    """Router, dispatcher and the experts of this rank; `grouped` GEMMs in float32, biases included."""

    def __init__(self, groups: Groups, dispatcher: Dispatcher) -> None:
        torch.manual_seed(0)
        router = Router(MOE, DIM, LocalTokens())
        experts = Experts(MOE, DIM, grouped_experts(MOE, ParameterMatmul(), GROUPED_MATMULS["grouped"]))
        for parameter in (*router.parameters(), *experts.parameters()):
            torch.nn.init.normal_(parameter, std=0.3)
        ep, etp = groups["ep"], groups["etp"]
        each = MOE.num_experts // ep.size
        mine = slice(ep.index * each, (ep.index + 1) * each)
        hidden = MOE.expert_hidden_dim // etp.size
        part = slice(etp.index * hidden, (etp.index + 1) * hidden)
        experts.gate_up = torch.nn.Parameter(experts.gate_up.detach()[mine, :, part].clone())
        experts.down = torch.nn.Parameter(experts.down.detach()[mine, :, part].clone())
        experts.gate_up_bias = torch.nn.Parameter(experts.gate_up_bias.detach()[mine, :, part].clone())
        experts.down_bias = torch.nn.Parameter(experts.down_bias.detach()[mine].clone())
        experts.bias_scale = float(etp.index == 0)
        self.layer = MoELayer(router, dispatcher, experts)
        token = torch.arange(TOKENS)
        divisors = {"step_labels": TOKENS, "step_tokens": TOKENS, "step_sequences": 2}
        self.batch = whole_batch(token, token, (TOKENS // 2,) * 2, tensor_size=1, **divisors)
        # Written to the device once per batch, and read by all layers.
        assert self.batch.shards and self.batch.microbatches and self.batch.documents
        self.earlier_E = torch.ones(MOE.num_experts, dtype=torch.int64)

    def run(self, x_tD: Tensor) -> tuple[Tensor, Tensor | None]:
        y_tD, report = self.layer(x_tD, self.batch, self.earlier_E)
        (y_tD.square().sum() + sum(report.losses)).backward()
        return y_tD, report.overflow

    def found(self, x_tD: Tensor) -> list[Tensor]:
        """Output and all gradients of a fresh backward."""
        self.layer.zero_grad()
        y_tD, _ = self.run(x_tD)
        return [y_tD.detach(), x_tD.grad.clone(), *(parameter.grad for parameter in self.layer.parameters())]


def tokens(seed: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    # Skewed, so that counts differ from rank to rank and from seed to seed.
    x_tD = torch.randn(TOKENS, DIM, generator=generator) + 0.5 * torch.randn(DIM, generator=generator)
    return x_tD.requires_grad_()


def exact(groups: Groups) -> AllToAllDispatcher:
    return AllToAllDispatcher(MOE.num_experts, groups["ep"], groups["etp"])


def bounded(groups: Groups, bounds: RowBounds = ENOUGH) -> BoundedAllToAllDispatcher:
    return BoundedAllToAllDispatcher(exact(groups), bounds)


@pytest.mark.parametrize(("world", "ep", "etp"), slow_except([(2, 2, 1), (4, 4, 1), (4, 2, 2), (8, 8, 1)], (4, 2, 2)))
def test_a_bounded_layer_has_the_bits_of_the_exact_one(world: int, ep: int, etp: int) -> None:
    def work(groups: Groups) -> None:
        wanted = Layer(groups, exact(groups)).found(tokens(1, groups.rank))
        found = Layer(groups, bounded(groups)).found(tokens(1, groups.rank))
        assert len(found) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

    on_ranks(work, world, ep=ep, etp=etp)


ROUTINGS = 50


@pytest.mark.parametrize(("world", "ep", "etp"), slow_except([(2, 2, 1), (4, 4, 1), (4, 2, 2), (8, 8, 1)], (2, 2, 1)))
def test_no_host_read_and_one_trace_for_every_routing(world: int, ep: int, etp: int) -> None:
    """Forward and backward of the whole layer, router and balance losses included; some routings overflow."""

    def work(groups: Groups) -> int:
        rows = TOKENS * MOE.top_k
        layer = Layer(groups, bounded(groups, RowBounds(int(1.5 * rows / ep) + 1, int(1.25 * rows * etp))))
        layer.run(tokens(0, groups.rank))  # creates the gradients that others are added to
        traces, overflows, loads = set(), 0, set()
        for seed in range(1, ROUTINGS + 1):
            x_tD, seen = tokens(seed, groups.rank), []

            def once(x_tD: Tensor = x_tD, seen: list[Any] = seen) -> None:
                with sync_free():
                    seen.append(layer.run(x_tD)[1])

            traces.add(tuple(shapes_of(once)))
            overflows += bool(seen[0])
            with torch.no_grad():
                loads.add(tuple(layer.layer.router(x_tD, layer.batch, None)[1].counts_E.tolist()))
        assert len(traces) == 1
        assert len(loads) == ROUTINGS
        return overflows

    # Not all of them fit.
    assert sum(on_ranks(work, world, ep=ep, etp=etp))


def test_the_exact_dispatcher_is_caught() -> None:
    def work(groups: Groups) -> None:
        with pytest.raises(HostSyncError, match=r"base\.py"), sync_free():
            Layer(groups, exact(groups)).run(tokens(1, groups.rank))

    on_ranks(work, 2, ep=2)


@pytest.mark.parametrize("garbage", [1e4, -3.0, float("nan")])
def test_what_is_past_the_last_expert_changes_nothing(garbage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEMMs leave those rows undefined, in both directions; biases sum over rows."""
    make = matmul_kernels.grouped_kernels

    def spoiled(matmul: Any, rows_per_expert_e: Tensor, host: list[int] | None) -> GroupedKernels:
        kernels = make(matmul, rows_per_expert_e, host)

        def spoil(gemm: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def with_garbage(*operands: Tensor) -> Tensor:
                out = gemm(*operands)
                assert len(out) > int(rows_per_expert_e.sum())
                out[int(rows_per_expert_e.sum()) :] = garbage
                return out

            return with_garbage

        return kernels._replace(forward=spoil(kernels.forward), input_grad=spoil(kernels.input_grad))

    def work(groups: Groups) -> None:
        wanted = Layer(groups, exact(groups)).found(tokens(1, groups.rank))
        layer = Layer(groups, bounded(groups))
        layer.layer.experts.backend.matmul_policy.grouped_kernels = spoiled
        layer.layer.experts.backend.down_matmul_policy.grouped_kernels = spoiled
        found = layer.found(tokens(1, groups.rank))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

    on_ranks(work, 4, ep=2, etp=2)


def test_rows_past_the_last_expert_are_zeros_and_no_assignments() -> None:
    def work(groups: Groups) -> None:
        layer, x_tD = Layer(groups, bounded(groups)), tokens(1, groups.rank)
        routing, _ = layer.layer.router(x_tD, layer.batch, None)
        arrived = bounded(groups).dispatch(x_tD, routing)
        rows = int(arrived.rows_per_expert_e.sum())
        assert 0 < rows < len(arrived.rows_RL) and arrived.rows_per_expert is None
        assert not arrived.rows_RL[rows:].any() and not arrived.assignments.probs[rows:].any()
        assert arrived.assignments.kept.flatten().tolist() == [row < rows for row in range(len(arrived.rows_RL))]
        assert arrived.rows_RL[:rows].abs().sum(1).min() > 0

    on_ranks(work, 2, ep=2)


def test_what_does_not_fit_is_counted_on_the_rank_where_it_does_not() -> None:
    """All tokens want the experts of rank 0: its peers' parts overflow, or its own buffer does."""

    def work(groups: Groups) -> None:
        experts = torch.tensor([[0, 1, 2]]).expand(TOKENS, 3)
        routing = Routing(experts, torch.full((TOKENS, 3), 0.5), None)
        x_tD = torch.randn(TOKENS, DIM)

        def overflow(pair: int, rank: int) -> int:
            return int(bounded(groups, RowBounds(pair + 1, rank)).dispatch(x_tD, routing).overflow)

        assert overflow(72, 144) == 0
        assert overflow(70, 144) == 2
        assert overflow(72, 140) == (4 if groups.rank == 0 else 0)
        assert overflow(70, 100) == (2 + 40 if groups.rank == 0 else 2)
        dispatcher = bounded(groups, RowBounds(2, 1))
        with lifted([dispatcher]):
            arrived = dispatcher.dispatch(x_tD, routing)
            assert int(arrived.overflow) == 0 and arrived.rows_per_expert is not None
            assert dispatcher.combine(arrived.rows_RL, arrived.ticket).shape == x_tD.shape
        assert not dispatcher.is_lifted

    on_ranks(work, 2, ep=2)


# ---- steps ----

SETTINGS: dict[str, object] = {
    "model.num_layers": 2,
    "model.num_mtp": 1,
    "model.moe.router.expert_bias": True,
    "model.moe.balance.sequence": 0.1,
    "model.moe.balance.global_batch": 0.1,
    "data.seq_len": 16,
    "data.global_batch": 8,
    "data.micro_batch": 1,
    "data.validation": None,
    "optim.lr_schedule.warmup": 0,
    "train.steps": 3,
    "train.log_every": 1,
    "train.saving.every": 0,
    "parallel.dispatcher": "all_to_all_bounded",
}
# Every step overflows, at least once in a layer; and none can.
TIGHT: dict[str, object] = {"parallel.row_bound": 1.0, "parallel.pair_bound": 1.0}
WIDE: dict[str, object] = {"parallel.row_bound": 50.0, "parallel.pair_bound": 100.0}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ep": (2, {"parallel.ep": 2}),
    "split": (4, {"parallel.ep": 2, "parallel.etp": 2}),
    "flat, recomputed": (
        2,
        {"parallel.ep": 2, "parallel.sharding": "flat", "memory.recompute": ["experts", "attention"]},
    ),
    "sequence shards": (4, {"parallel.tp": 2, "parallel.ep": 4}),
    "pipeline, overlapped": (4, {"parallel.pp": 2, "parallel.ep": 2, "parallel.schedule": "1f1b_overlapped"}),
    "deferred weight gradients": (4, {"parallel.pp": 2, "parallel.ep": 2, "parallel.schedule": "zb_h1"}),
    "QK-clip": (2, {"parallel.ep": 2, "optim.qk_clip": 0.5}),
}


def trained(folder: Path, changes: dict[str, object], world: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """Of every rank: a digest of weights and moments, expert biases, how often a schedule and an update ran; and the
    lines of all steps."""
    run = moefold.load_run("debug_tiny", SETTINGS | {"train.directory": str(folder)} | changes)
    assert moefold.check(run, world) == []

    def work(rank: int) -> list[Any]:
        context, state = build_train_context(run, rank, world, torch.device("cpu"), 60.0)
        calls, inner, update = (
            {"schedules": 0, "updates": 0},
            moefold.pipeline.step.run_schedule,
            context.optimizer.step,
        )

        def counted(*args: Any) -> Any:
            calls["schedules"] += 1
            return inner(*args)

        def updated(*args: Any) -> Any:
            calls["updates"] += 1
            return update(*args)

        moefold.pipeline.step.run_schedule, context.optimizer.step = counted, updated
        train(context, state, [JsonLines()] if rank == 0 else [])
        biases = [router.expert_bias.tolist() for router in context.local_model.model.routers().values()]
        return [digest(context), biases, calls["schedules"], calls["updates"]]

    ranks = spawn_ranks(work, world, seconds=300)
    lines = map(json.loads, (run_directory(run) / "metrics.jsonl").read_text().splitlines())
    return ranks, [line for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "ep", "pipeline, overlapped"))
def test_a_step_that_overflows_runs_once_more_and_has_the_same_bits(
    layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world, changes = LAYOUTS[layout]
    wide, wide_lines = trained(tmp_path / "wide", WIDE | changes, world)
    tight, tight_lines = trained(tmp_path / "tight", TIGHT | changes, world)
    said = capfd.readouterr().err
    plain, plain_lines = trained(tmp_path / "plain", changes | {"parallel.dispatcher": "all_to_all"}, world)
    reruns = sum(line["metrics"]["overflow_rows"] > 0 for line in tight_lines)
    assert 0 < reruns <= 3
    for (wide_digest, *wide_numbers), (tight_digest, *tight_numbers), (plain_digest, *plain_numbers) in zip(
        wide, tight, plain, strict=True
    ):
        assert wide_digest == tight_digest == plain_digest
        assert wide_numbers == plain_numbers == [wide_numbers[0], 3, 3]
        assert tight_numbers == [wide_numbers[0], 3 + reruns, 3]
    numbers = [
        [(line["loss"], line["grad_norm"], line["balance"]) for line in lines]
        for lines in (wide_lines, tight_lines, plain_lines)
    ]
    assert numbers[0] == numbers[1] == numbers[2]
    assert all(line["metrics"]["overflow_rows"] == 0 for line in wide_lines)
    assert "overflow_rows" not in plain_lines[0].get("metrics", {})
    assert said.count("the step was run again with exact counts") == reruns
    assert "parallel.row_bound 1 and pair_bound 1" in said


PAGES: dict[str, object] = {f"memory.retain.{step}": "page" for step in ("rows", "gate_up", "activation")}


@pytest.mark.parametrize("layout", slow_except(sorted(LAYOUTS.keys() - {"flat, recomputed"}), "ep"))
def test_rows_in_pages_have_the_bits_of_those_that_are_kept(
    layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With pages enough, some of them in the host's memory; and with so few that steps run once more."""
    world, changes = LAYOUTS[layout]
    changes = changes | {"kernels.experts": "grouped"}
    kept, kept_lines = trained(tmp_path / "kept", WIDE | changes, world)
    enough = PAGES | {"memory.page_bound": 4.0, "memory.page_spill": 0.4, "memory.page_rows": 8}
    paged, paged_lines = trained(tmp_path / "paged", WIDE | changes | enough, world)
    few = PAGES | {"memory.page_bound": 1.0, "memory.page_rows": 1}
    again, again_lines = trained(tmp_path / "again", WIDE | changes | few, world)
    reruns = sum(line["metrics"]["overflow_rows"] > 0 for line in again_lines)
    assert 0 < reruns <= 3 and all(line["metrics"]["overflow_rows"] == 0 for line in paged_lines)
    assert kept == paged
    for (kept_digest, kept_biases, *_), (again_digest, again_biases, *runs) in zip(kept, again, strict=True):
        assert kept_digest == again_digest and kept_biases == again_biases and runs == [3 + reruns, 3]
    losses = [[line["loss"] for line in lines] for lines in (kept_lines, paged_lines, again_lines)]
    assert losses[0] == losses[1] == losses[2]
    assert "pages of memory.page_bound 1;" in capfd.readouterr().err


def test_overflow_on_one_rank_reruns_all(tmp_path: Path) -> None:
    """The count is summed over ranks: a rank without overflow must not wait for one that runs again."""

    def one_sided(rank: int) -> list[int]:
        run: RunConfig = moefold.load_run("debug_tiny", SETTINGS | WIDE | {"parallel.ep": 2, "train.steps": 1})
        run = replace(run, train=replace(run.train, directory=str(tmp_path)))
        context, state = build_train_context(run, rank, 2, torch.device("cpu"), 60.0)
        runs = []
        inner = moefold.pipeline.step.run_schedule

        def flagged(local_model: Any, *args: Any) -> Any:
            sums = inner(local_model, *args)
            runs.append(1)
            return sums._replace(overflow=sums.overflow + int(rank == 1 and len(runs) == 1))

        moefold.pipeline.step.run_schedule = flagged
        train(context, state, [])
        return [len(runs)]

    assert spawn_ranks(one_sided, 2, seconds=120) == [[2], [2]]


def test_evaluation_is_exact_and_runs_once(tmp_path: Path) -> None:
    def losses(rank: int) -> list[float]:
        found = []
        for bounds in (TIGHT, WIDE):
            run: RunConfig = moefold.load_run("debug_tiny", SETTINGS | bounds | {"parallel.ep": 2})
            run = replace(run, name=f"run {len(found)}", train=replace(run.train, directory=str(tmp_path)))
            context, _ = build_train_context(run, rank, 2, torch.device("cpu"), 60.0)
            data = step_batches(context.samples, 0, run, context.groups, context.device)
            found.append(float(moefold.pipeline.step.evaluate(context.local_model, data.batches)))
        return found

    for tight, wide in spawn_ranks(losses, 2, seconds=120):
        assert tight == wide
