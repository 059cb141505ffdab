"""Captured phases compute what plain ones compute, to the bit: values, gradients, and the same memory in every replay.

On a CPU a graph is a tape (`nn/graph_tape.py`): recorded operations on fixed memory, without a line of the model's own
Python. What is wrong with a graph is wrong with a tape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.body.model_inputs import batch_of
from tests.graphed_runs import (
    ATTENTION_ROUTER,
    SHAPES,
    differences,
    expected_bytes,
    expected_graphs,
    graphed_run,
    static_bytes_of,
    steps,
    without_graphs,
)
from tests.staged_runs import microbatches, share_on
from torch import Tensor, nn

from moefold.checks.run_all import problems
from moefold.errors import BackendError, MoefoldError
from moefold.model.block import Block
from moefold.nn.graph_tape import TapeEngine
from moefold.nn.phase import Phase, Stream
from moefold.nn.phase_graphs import PhaseGraphs, Place, Region, Slot, aliased, place_of
from moefold.pipeline.step import evaluate

SCHEDULES: dict[str, dict[str, Any]] = {
    "one slot": {},
    "five slots": {"schedule": "gpipe"},
    "two stages": {"vpp": 2, "schedule": "interleaved"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_graphs_compute_the_same_bits(name: str) -> None:
    run = graphed_run(ATTENTION_ROUTER, **SCHEDULES[name])
    assert not problems(run)
    local = share_on(run)
    found = steps(local)
    assert differences(found, steps(share_on(without_graphs(run)))) == []
    assert local.graphs is not None and local.graphs.num_graphs == expected_graphs(local)
    measured, formula = static_bytes_of(local), expected_bytes(local)
    # Beside it a gradient of four bytes per balance loss.
    assert formula <= measured <= formula + 20 * local.graphs.num_graphs


def places(local: Any) -> list[Place | None]:
    regions = [region for slot in local.graphs.slots.values() for region in slot.regions.values()]
    tensors = [x for r in regions for x in (*r.static_in, *r.static_out, *r.static_grad, *r.grad_in)]
    return [None if tensor is None else place_of(tensor) for tensor in tensors]


def test_replays_use_the_same_memory_and_none_of_the_models_python(monkeypatch: pytest.MonkeyPatch) -> None:
    local = share_on(graphed_run(ATTENTION_ROUTER))
    steps(local, 1)
    before, calls = places(local), []
    attention = Block._attention
    monkeypatch.setattr(Block, "_attention", lambda *given: calls.append(1) or attention(*given))
    steps(local, 1)
    assert places(local) == before and not calls
    # Validation has no gradients, and runs as it is.
    evaluate(local, microbatches(local.run, SHAPES[:1]))
    assert calls


def test_the_trace_does_not_depend_on_data() -> None:
    """Every slot captures the same operations on the same shapes, whatever its microbatch's tokens and routing are."""
    local = share_on(graphed_run(ATTENTION_ROUTER, schedule="gpipe"))
    steps(local, 1)
    assert local.graphs is not None and len(local.graphs.slots) == len(SHAPES)
    for way in ("forward", "backward"):
        traces = [[getattr(r, way).trace for r in slot.regions.values()] for slot in local.graphs.slots.values()]
        assert all(trace == traces[0] for trace in traces)
        assert all(len(trace) > 10 for trace in traces[0])


def test_microbatches_of_another_shape_are_refused() -> None:
    slot = Slot(TapeEngine(), None, True)
    slot.enter(batch_of(2, 7, 11))
    slot.enter(batch_of(2, 7, 11, seed=3))
    with pytest.raises(MoefoldError, match=r"lengths \(8, 8\), and graphs were captured with \(7, 7\).*graphs none"):
        slot.enter(batch_of(2, 8, 11))
    with pytest.raises(MoefoldError, match="step_tokens 15"):
        slot.enter(replace(batch_of(2, 7, 11), step_tokens=15))
    # Labels count in the loss alone.
    assert slot.enter(replace(batch_of(2, 7, 11), step_labels=3)).step_labels == 3


# ---- what cannot be captured ----


def _item(x: Tensor) -> Tensor:
    return x * x.sum().item()


def _rows(x: Tensor) -> Tensor:
    return x[x > 0]


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a host read": (_item, "item.*reads values on the host"),
    "a shape that depends on data": (_rows, "boolean mask"),
    "random numbers": (lambda x: x * torch.rand_like(x), "draws random numbers"),
    "dropout": (lambda x: nn.functional.dropout(x, 0.5), "draws random numbers"),
    "a count on the host": (lambda x: x * torch.bincount(x.long().flatten()).sum(), "reads data on the host"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_the_host_knows_is_refused(name: str) -> None:
    work, words = REFUSED[name]
    with pytest.raises(BackendError, match=rf"kernels\.graphs: .*{words}.*graph_scope"):
        TapeEngine().capture(lambda: work(torch.ones(3, 2)), None)


def test_attention_without_dropout_is_captured() -> None:
    heads = torch.randn(1, 2, 5, 8)
    out, tape = TapeEngine().capture(lambda: nn.functional.scaled_dot_product_attention(heads, heads, heads), None)
    with torch.no_grad():
        heads.mul_(2)
    tape.replay()
    assert torch.equal(out, nn.functional.scaled_dot_product_attention(heads, heads, heads))


# ---- one region by itself ----


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.weight.grad = torch.zeros(2)


def graphs_of(module: nn.Module, run: Callable[[Tensor], Tensor]) -> tuple[PhaseGraphs, Phase]:
    graphs = PhaseGraphs(frozenset({"attention"}), TapeEngine())
    (phase,) = graphs.in_regions(module, (Phase("attention", Stream.COMPUTE, run),))
    return graphs, phase


@pytest.mark.parametrize(("slots", "right"), [((0, 1), True), ((0, 0), False)])
def test_two_microbatches_in_flight_need_two_slots(slots: tuple[int, int], right: bool) -> None:
    """In one slot the second microbatch writes over what the first has saved."""
    module = _Scaled()
    graphs, phase = graphs_of(module, lambda x: (x * module.weight).square())
    graphs.start_step({(0, 0): slots[0], (0, 1): slots[1]})
    for number in (0, 1):
        graphs.start_forward((0, number), batch_of(1, 1, 3))
        phase.run(torch.ones(1, 2).requires_grad_()).sum().backward()
    assert module.weight.grad is not None
    module.weight.grad.zero_()
    inputs = [torch.tensor([[1.0, 2.0]]).requires_grad_(), torch.tensor([[5.0, 7.0]]).requires_grad_()]
    outputs = []
    for number, x in enumerate(inputs):
        graphs.start_forward((0, number), batch_of(1, 1, 3))
        outputs.append(phase.run(x))
    for out in outputs:
        out.sum().backward()
    weight = torch.tensor([2.0, 3.0]).requires_grad_()
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    for x in copies:
        (x * weight).square().sum().backward()
    assert weight.grad is not None and torch.equal(module.weight.grad, weight.grad) == right
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(inputs, copies)) == right  # type: ignore[arg-type]


def test_a_slot_that_is_taken_cannot_be_captured() -> None:
    """Until its backward is captured, autograd itself notices that what was saved is another microbatch's."""
    module = _Scaled()
    graphs, phase = graphs_of(module, lambda x: (x * module.weight).square())
    graphs.start_step({(0, 0): 0, (0, 1): 0})
    outputs = []
    for number in (0, 1):
        graphs.start_forward((0, number), batch_of(1, 1, 3))
        outputs.append(phase.run(torch.ones(1, 2).requires_grad_()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()


def test_gradients_that_leave_a_stage_have_memory_of_their_own() -> None:
    module = _Scaled()
    graphs, phase = graphs_of(module, lambda x: x * module.weight)
    graphs.start_step({(0, 0): 0})
    graphs.start_forward((0, 0), batch_of(1, 1, 3))
    x = torch.ones(1, 2).requires_grad_()
    phase.run(x).sum().backward()
    (region,) = graphs.slots[0, 0].regions.values()
    assert isinstance(region, Region) and region.grad_in[0] is not None and x.grad is not None
    assert x.grad.data_ptr() == region.grad_in[0].data_ptr()
    (leaving,) = graphs.leaving((x.grad,))
    assert leaving.data_ptr() != x.grad.data_ptr() and torch.equal(leaving, x.grad)


def test_aliases_are_the_same_memory_and_go_away() -> None:
    module = _Scaled()
    before = module.weight
    with aliased(module) as (alias,):
        assert module.weight is alias and alias is not before
        assert alias.data_ptr() == before.data_ptr() and alias.grad is before.grad
    assert module.weight is before
