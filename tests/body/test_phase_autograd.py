"""Recorded phase by phase, run backwards phase by phase, or beside another microbatch: always the same numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tests.marks import slow_except
from tests.staged_runs import MODEL, Lengths, microbatches, share_on, staged_run
from torch import Tensor

from moefold.blueprint.stages import StageSpec
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.model.decoder import DecoderOutput, HiddenState
from moefold.nn.batch import Batch
from moefold.nn.phase import Phase, Stream
from moefold.nn.phase_autograd import backward_phase, iter_tensors, map_tensors, record
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.overlap import backward_recorded, run_overlapped, run_recorded
from moefold.pipeline.pipeline_state import add_sums, objective_of, zero_sums
from moefold.pipeline.runtime import run_schedule

# Without an MTP module, every parameter is used once per microbatch. One that is used twice gets both
# gradients in one sum from autograd, and one after the other from a tape: the same up to rounding.
ONCE = replace(MODEL, num_mtp=0)
MODELS = {
    "gqa": replace(ONCE, attention=GQAConfig(qk_norm="full", sinks=True)),
    "mla": replace(ONCE, attention=MLAConfig()),
    "ahead": replace(MODEL, attention=MLAConfig(), num_mtp=2),
}
RECOMPUTE = [(), ("attention", "feed_forward", "experts")]
# The first stage, one from the middle, the last, an empty one, and everything at once.
STAGES = {
    "first": StageSpec(0, True, range(1), (), False),
    "middle": StageSpec(0, False, range(2), (), False),
    "last": StageSpec(0, False, range(1, 2), (), True),
    "empty": StageSpec(0, False, range(0), (), False),
    "whole": StageSpec(0, True, range(2), (), True),
}
SHAPES: tuple[Lengths, Lengths] = ((5, 1, 4), (7,))


class Run(NamedTuple):
    """What a microbatch left: its output, and every gradient it asked for."""

    output: DecoderOutput
    given: HiddenState | None


def _share(model: ModelConfig, recompute: tuple[str, ...] = ()) -> LocalModel:
    return share_on(staged_run(model, recompute=recompute, schedule="1f1b_overlapped"))


def _stage(name: str, model: ModelConfig) -> StageSpec:
    stage = STAGES[name]
    return replace(stage, mtp=tuple(range(model.num_mtp))) if stage.loss else stage


def _given(local_model: LocalModel, stage: StageSpec, batch: Batch, seed: int) -> HiddenState | None:
    """Random leaves where the stage before would leave its stream."""
    if stage.embedding:
        return None
    generator = torch.Generator().manual_seed(seed)
    x_tD = torch.randn(batch.num_tokens, local_model.run.model.dim, dtype=torch.float64, generator=generator)
    return HiddenState(x_tD.requires_grad_())


def _asked(output: DecoderOutput, seed: int) -> tuple[Tensor, ...]:
    """Random gradients where the next stage would ask for some."""
    generator = torch.Generator().manual_seed(seed)
    streams = () if output.hidden is None else (output.hidden.x_tD, *output.hidden.ahead_tD)
    return tuple(torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in streams)


def _counts(local_model: LocalModel) -> Tensor:
    return zero_sums(local_model).counts_ME


def _plain(local_model: LocalModel, stage: StageSpec, batch: Batch, seed: int) -> Run:
    """The reference: the module's own forward, and one call of autograd."""
    given = _given(local_model, stage, batch, seed)
    output = local_model.model(batch, _counts(local_model), stage, given)
    objective, asked = objective_of(local_model, output, batch), _asked(output, seed)
    roots = [] if objective is None else [objective]
    if output.hidden is not None:
        roots += [output.hidden.x_tD, *output.hidden.ahead_tD]
    torch.autograd.backward(roots, [None] * (len(roots) - len(asked)) + list(asked))
    return Run(output, given)


def _taped(local_model: LocalModel, stage: StageSpec, batch: Batch, seed: int) -> Run:
    given = _given(local_model, stage, batch, seed)
    output, tape = run_recorded(local_model, batch, _counts(local_model), stage, given)
    backward_recorded(local_model, tape, _asked(output, seed), None)
    return Run(output, given)


def _values(run: Run) -> dict[str, Tensor]:
    found = {f"output {number}": value.detach() for number, value in enumerate(iter_tensors(run.output))}
    if run.given is not None:
        assert run.given.x_tD.grad is not None
        found["gradient of the stream"] = run.given.x_tD.grad
    return found


def _gradients(local_model: LocalModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in local_model.model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], *, to_the_bit: bool = True) -> None:
    assert got.keys() == want.keys()
    for name in want:
        if to_the_bit:
            assert torch.equal(got[name], want[name]), name
        else:
            torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12, msg=name)


# ---- the tape ----


class _Pair(NamedTuple):
    left: Tensor
    right: list[Any]


def test_a_recorded_phase_cuts_the_graph_on_both_sides() -> None:
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)
    still, count = torch.tensor([5.0]), torch.tensor([1])
    phase = Phase("p", Stream.COMM, lambda carry: _Pair(carry.left * carry.right[0] * still, [carry.right[1], count]))
    result, recorded = record(phase, _Pair(x * 1, [y * 1, still]))
    assert recorded.stream is Stream.COMM and isinstance(result, _Pair)
    # Only what asks for a gradient is on the tape.
    assert len(recorded.entries) == 2 and [made.node for made in recorded.outputs] == [result.left.grad_fn]
    gradients = backward_phase(recorded, [torch.tensor([10.0])])
    assert [gradient.item() for gradient in gradients if gradient is not None] == [150.0, 100.0]
    assert x.grad is None and y.grad is None


def test_what_nobody_asks_about_has_no_gradient() -> None:
    x, y = (torch.tensor([2.0], requires_grad=True) for _ in range(2))
    _, recorded = record(Phase("p", Stream.COMPUTE, lambda pair: (pair[0] * 3, pair[1] * 3)), (x, y))
    left, right = backward_phase(recorded, [torch.tensor([1.0]), None])
    assert left is not None and left.item() == 3.0 and right is None
    assert backward_phase(recorded, [None, None]) == [None, None]


def test_handing_on_what_was_given_is_a_phase_too() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    result, recorded = record(Phase("p", Stream.COMPUTE, lambda x: (x, x * 2)), x)
    assert torch.equal(result[0], x)
    (gradient,) = backward_phase(recorded, [torch.tensor([1.0]), torch.tensor([10.0])])
    assert gradient is not None and gradient.item() == 21.0


def test_any_structure_of_tensors_is_walked() -> None:
    value = _Pair(torch.tensor(1), [(torch.tensor(2), None), "word", 7, (torch.tensor(3),)])
    assert [tensor.item() for tensor in iter_tensors(value)] == [1, 2, 3]
    doubled = map_tensors(value, lambda tensor: tensor * 2)
    assert isinstance(doubled, _Pair) and isinstance(doubled.right, list)
    assert [tensor.item() for tensor in iter_tensors(doubled)] == [2, 4, 6]
    assert doubled.right[1:3] == ["word", 7] and doubled.right[0][1] is None


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=["kept", "recompute"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MODELS)
def test_a_tape_has_the_bits_of_autograd(model: str, stage: str, recompute: tuple[str, ...]) -> None:
    plain, taped = (_share(MODELS[model], recompute) for _ in range(2))
    spec = _stage(stage, MODELS[model])
    (batch,) = microbatches(plain.run, SHAPES[:1])
    want, got = _plain(plain, spec, batch, 1), _taped(taped, spec, batch, 1)
    assert_equal(_values(got), _values(want), to_the_bit=not spec.mtp)
    assert_equal(_gradients(taped), _gradients(plain), to_the_bit=not spec.mtp)


# ---- two at once ----


class Watched(NamedTuple):
    """A comm stream that logs what happens on it, and whose work takes as long as ``busy`` says."""

    inner: Any
    log: list[str]
    busy: Callable[[], bool]

    def submit(self, work: Callable[[], Any]) -> Any:
        self.log.append("exchange")
        return self.inner.submit(work)

    def wait(self, future: Any, meanwhile: Callable[[], bool]) -> Any:
        self.log.append("wait")
        while self.busy() and meanwhile():
            self.log.append("weight gradient")
        return self.inner.wait(future, lambda: False)


def _overlapped(local_model: LocalModel, ahead: StageSpec, back: StageSpec, defer_as: object | None) -> tuple[Run, Run]:
    """The first microbatch's backward beside the second's forward; then the second's backward."""
    first, second = microbatches(local_model.run, SHAPES)
    sums = zero_sums(local_model)
    given = _given(local_model, back, first, 1)
    output, tape = run_recorded(local_model, first, sums.counts_ME, back, given)
    sums = add_sums(sums, local_model, output, first)
    next_given = _given(local_model, ahead, second, 2)
    next_output, next_tape = run_overlapped(
        local_model, second, sums.counts_ME, ahead, next_given, tape, _asked(output, 1), defer_as
    )
    assert local_model.weight_grads is not None
    local_model.weight_grads.run_all()
    backward_recorded(local_model, next_tape, _asked(next_output, 2), None)
    return Run(output, given), Run(next_output, next_given)


def _in_turn(local_model: LocalModel, ahead: StageSpec, back: StageSpec) -> tuple[Run, Run]:
    """The reference: forward, backward, forward, backward, all on tapes."""
    first, second = microbatches(local_model.run, SHAPES)
    sums = zero_sums(local_model)
    runs = []
    for stage, batch, seed in ((back, first, 1), (ahead, second, 2)):
        given = _given(local_model, stage, batch, seed)
        output, tape = run_recorded(local_model, batch, sums.counts_ME, stage, given)
        sums = add_sums(sums, local_model, output, batch)
        backward_recorded(local_model, tape, _asked(output, seed), None)
        runs.append(Run(output, given))
    return runs[0], runs[1]


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=["kept", "recompute"])
@pytest.mark.parametrize("defer_as", [None, "later"])
@pytest.mark.parametrize(
    ("ahead", "back"), [("whole", "whole"), ("middle", "last"), ("first", "middle"), ("last", "empty")]
)
@pytest.mark.parametrize("model", slow_except(MODELS, "mla"))
def test_two_at_once_have_the_bits_of_one_after_the_other(
    model: str, ahead: str, back: str, defer_as: str | None, recompute: tuple[str, ...]
) -> None:
    together, in_turn = (_share(MODELS[model], recompute) for _ in range(2))
    stages = _stage(ahead, MODELS[model]), _stage(back, MODELS[model])
    got, want = _overlapped(together, *stages, defer_as), _in_turn(in_turn, *stages)
    for one, other in zip(got, want):
        assert_equal(_values(one), _values(other))
    assert_equal(_gradients(together), _gradients(in_turn))


def test_a_pair_leaves_no_weight_gradient_to_the_next() -> None:
    """Not even if no wait has time for one: each holds the input and the output's gradient of its matmul."""
    local_model = _share(MODELS["mla"])
    log: list[str] = []
    local_model = replace(local_model, comm_stream=Watched(local_model.comm_stream, log, lambda: False))
    assert local_model.weight_grads is not None
    first, second = microbatches(local_model.run, SHAPES)
    counts_ME, whole = zero_sums(local_model).counts_ME, _stage("whole", MODELS["mla"])
    output, tape = run_recorded(local_model, first, counts_ME, whole, None)
    run_overlapped(local_model, second, counts_ME, whole, None, tape, _asked(output, 1), None)
    assert "weight gradient" not in log and local_model.weight_grads.is_empty


@pytest.mark.parametrize("defer_as", [None, "later"])
def test_a_backward_alone_computes_weight_gradients_beside_its_exchanges(defer_as: str | None) -> None:
    alone, plain = (_share(MODELS["mla"]) for _ in range(2))
    log: list[str] = []
    alone = replace(alone, comm_stream=Watched(alone.comm_stream, log, lambda: True))
    assert alone.weight_grads is not None
    batch, whole = microbatches(alone.run, SHAPES)[0], _stage("whole", MODELS["mla"])
    output, tape = run_recorded(alone, batch, _counts(alone), whole, None)
    assert not log
    backward_recorded(alone, tape, _asked(output, 1), defer_as)
    assert log.count("wait") == log.count("exchange") > 0 and "weight gradient" in log
    # After the last wait there are more; the schedule that has deferred them computes them.
    assert alone.weight_grads.is_empty is (defer_as is None)
    alone.weight_grads.run_all()
    _plain(plain, whole, batch, 1)
    assert_equal(_gradients(alone), _gradients(plain))


OVERLAPPING = {"1f1b_overlapped": 1, "interleaved_overlapped": 2, "dualpipe_v": 2}


@pytest.mark.parametrize("model", slow_except(["mla", "ahead"], "mla"))
@pytest.mark.parametrize("schedule", OVERLAPPING)
def test_how_long_an_exchange_takes_changes_no_bit(schedule: str, model: str) -> None:
    """However many weight gradients fit into the waits, their sums have the same order."""
    dice = torch.Generator().manual_seed(7)
    waits: dict[str, Callable[[], bool]] = {
        "never": lambda: False,
        "always": lambda: True,
        "at times": lambda: bool(torch.rand(1, generator=dice) < 0.7),
    }
    run = staged_run(MODELS[model], schedule=schedule, vpp=OVERLAPPING[schedule])
    batches = microbatches(run, ((5, 1, 4), (7,), (1,), (2, 2), (8,)))
    found = {}
    for name, wait in waits.items():
        local_model = share_on(run)
        log: list[str] = []
        local_model = replace(local_model, comm_stream=Watched(local_model.comm_stream, log, wait))
        run_schedule(local_model, batches)
        assert "exchange" in log and ("weight gradient" in log) is (name != "never")
        found[name] = _gradients(local_model)
    for name in ("always", "at times"):
        assert_equal(found[name], found["never"])


def test_exchanges_of_both_are_under_way_together() -> None:
    """Each side gives the turn to the other when its tokens leave, and the walk is the same every time."""
    local_model = _share(MODELS["mla"])
    log: list[str] = []
    local_model = replace(local_model, comm_stream=Watched(local_model.comm_stream, log, lambda: False))
    whole = _stage("whole", MODELS["mla"])
    _overlapped(local_model, whole, whole, None)
    # Dispatch beside combine's backward, then combine beside dispatch's backward; counts are waited for at once. Then
    # the backward that has no partner, beside its own weight gradients.
    counts, alone = ["exchange", "wait"], ["exchange", "wait"] * 2
    assert log == ["exchange", *counts, "exchange", "wait", "exchange", "wait", "exchange", "wait", "wait", *alone]


def test_a_recorded_phase_holds_nothing_that_its_backward_does_not_read() -> None:
    x = torch.ones(4, requires_grad=True) * 2
    gone = weakref.ref(x.untyped_storage())
    result, recorded = record(Phase("p", Stream.COMPUTE, lambda x: x + 1), x)
    made = weakref.ref(result.untyped_storage())
    del x, result
    assert gone() is None and made() is None
    assert [gradient.tolist() for gradient in backward_phase(recorded, [torch.ones(4)])] == [[1.0] * 4]


def test_a_phase_that_is_done_holds_no_gradient() -> None:
    """All phases of a stage are recorded together, and live until the backward of the first."""
    _, recorded = record(Phase("p", Stream.COMPUTE, lambda x: x + 1), torch.ones(4, requires_grad=True) * 2)
    (gradient,) = backward_phase(recorded, [torch.ones(4)])
    assert gradient is not None
    gone = weakref.ref(gradient.untyped_storage())
    del gradient
    assert gone() is None
