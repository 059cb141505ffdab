"""The loop: read, step, judge, tell, save; stop when asked; go on exactly where it stopped.

Everything that decides is the same on every rank: sums and norms are reduced before they are looked at, and requests to
stop are added up once per step. So no rank ever leaves the others waiting in a collective.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moefold.blueprint.param_counts import count_parameters
from moefold.checkpoint.state_dict import chunks_of, tensors_elsewhere
from moefold.comm.collectives import sum_plain
from moefold.comm.process_groups import Group
from moefold.optim.lr_schedule import rate_at
from moefold.pipeline.step import StepResult, StepSums, evaluate, run_step
from moefold.train.batches import step_batches
from moefold.train.callback import Callback, Callbacks, RunInfo, StepRecord
from moefold.train.signals import INTERRUPTED, StopRequest, nothing_to_save, say, stop_on_signals
from moefold.train.state import TrainState, after_step, objection
from moefold.train.train_context import Workshop

FINISHED = 0


def train(workshop: Workshop, state: TrainState, callbacks: Sequence[Callback], stop: StopRequest | None = None) -> int:
    """Run to the last step, or until asked to stop; returns the process's exit code.

    ``stop`` is set by whoever hears signals in this process; without one, they are heard while this lasts. A stop that
    was asked for before the first step leaves the run as it was.
    """
    if stop is None:
        with stop_on_signals() as heard:
            return train(workshop, state, callbacks, heard)
    if state.step < workshop.run.train.steps and asked_to_stop(workshop, stop):
        if workshop.leads:
            say(nothing_to_save(state.step))
        return INTERRUPTED
    told = Callbacks(callbacks if workshop.leads else ())
    told.on_start(_info(workshop, state))
    reason = "failed"
    try:
        state, interrupted = _loop(workshop, state, told, stop)
        _save_last(workshop, state, told)
        reason = "interrupted" if interrupted else "finished"
        return INTERRUPTED if interrupted else FINISHED
    finally:
        told.on_stop(reason)


def _loop(workshop: Workshop, state: TrainState, told: Callback, request: StopRequest) -> tuple[TrainState, bool]:
    """A step is told before it can be saved: a run that goes on after it will not tell it again."""
    steps, saving = workshop.run.train.steps, workshop.run.train.saving
    ended, saved = time.perf_counter(), 0.0
    while state.step < steps:
        state, record = _step(workshop, state, time.perf_counter())
        now = time.perf_counter()
        told.on_step(replace(record, seconds=record.seconds | {"save": saved, "total": now - ended}))
        ended = now
        if saving.every and state.step % saving.every == 0 and state.step < steps:
            begin_save(workshop, state)
        _tell_committed(workshop, told, workshop.saver.advance())
        saved = time.perf_counter() - now
        if _time_to_validate(workshop, state.step):
            told.on_validation(state.step, validate(workshop))
            ended = time.perf_counter() - saved
        if asked_to_stop(workshop, request):
            return state, state.step < steps
    return state, False


def _step(workshop: Workshop, state: TrainState, began: float) -> tuple[TrainState, StepRecord]:
    run, number = workshop.run, state.step + 1
    data = step_batches(workshop.samples, state.samples, run, workshop.groups, workshop.device)
    read = time.perf_counter()
    rate = rate_at(number, run.train.steps, run.optim)
    for group in workshop.optimizer.param_groups:
        group["lr"] = rate

    def judge(sums: StepSums, norm: Tensor) -> str | None:
        balance = dict(zip(sums.balance._fields, torch.stack(sums.balance).tolist(), strict=True))
        mine = objection(state, float(sums.loss), balance, float(norm), run.train.health)
        return agreed_objection(mine, workshop.groups["world"])

    result = run_step(workshop.share, workshop.optimizer, data.batches, objection=judge)
    loss, norm = float(result.sums.loss), float(result.norm)
    state = after_step(state, loss, norm, result.skipped, run.train.health)
    state = replace(
        state, step=number, samples=state.samples + run.data.global_batch, tokens=state.tokens + data.tokens
    )
    seconds = {"data": read - began, "step": time.perf_counter() - read}
    return state, _record(workshop, number, result, rate, data.tokens, seconds, data.ids)


def agreed_objection(mine: str | None, world: Group) -> str | None:
    """One rank's objection is everyone's: a number that only one rank sees must not part it from the others."""
    objecting = int(sum_plain(torch.tensor(int(mine is not None)), world))
    return mine if mine is not None or not objecting else f"{objecting} other rank(s) objected"


def _record(
    workshop: Workshop, step: int, result: StepResult, rate: float, tokens: int, seconds: dict[str, float], ids: str
) -> StepRecord:
    moe, sums = workshop.run.model.moe, result.sums
    on = (
        {}
        if moe is None
        else {name: value for name, value in sums.balance._asdict().items() if getattr(moe.balance, name)}
    )
    return StepRecord(
        step=step,
        steps=workshop.run.train.steps,
        loss=float(sums.loss),
        balance={name: float(value) for name, value in on.items()},
        norm=float(result.norm),
        rate=rate,
        tokens=tokens,
        seconds=seconds,
        counts=sums.counts_ME.tolist() if workshop.leads and moe is not None else None,
        dropped=int(sums.dropped),
        skipped=result.skipped,
        memory_bytes=memory_used(workshop.device),
        world=workshop.groups["world"].size,
        sample_ids_digest=ids,
    )


def memory_used(device: torch.device) -> int:
    """The most this process has held so far: of the GPU's memory, or of the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def validate(workshop: Workshop) -> float:
    """Mean loss per label over the first validation samples: the same ones every time, on any layout."""
    assert workshop.validation is not None
    run, total, labels = workshop.run, 0.0, 0
    for number in range(run.train.validate_batches):
        first = number * run.data.global_batch
        batches = step_batches(workshop.validation, first, run, workshop.groups, workshop.device).batches
        total += float(evaluate(workshop.share, batches)) * batches[0].step_labels
        labels += batches[0].step_labels
    return total / labels


def _time_to_validate(workshop: Workshop, step: int) -> bool:
    train = workshop.run.train
    if workshop.validation is None:
        return False
    return step == train.steps or (train.validate_every > 0 and step % train.validate_every == 0)


def begin_save(workshop: Workshop, state: TrainState) -> None:
    chunks = chunks_of(workshop.share, workshop.optimizer)
    elsewhere = tensors_elsewhere(workshop.share, workshop.optimizer)
    told = {"train": state.to_json(), "data": workshop.samples.fingerprint}
    workshop.saver.begin(state.step, chunks, told, elsewhere)


def _save_last(workshop: Workshop, state: TrainState, told: Callback) -> None:
    """Leave nothing unsaved: wait for a save under way, then write this step if it is not the one."""
    done = workshop.saver.finish()
    _tell_committed(workshop, told, done)
    if done != state.step:
        begin_save(workshop, state)
        _tell_committed(workshop, told, workshop.saver.finish())


def _tell_committed(workshop: Workshop, told: Callback, step: int | None) -> None:
    if step is not None:
        told.on_save(step, workshop.saver.path_of(step))


def asked_to_stop(workshop: Workshop, request: StopRequest) -> bool:
    """Whether any rank was asked; all ranks get the same answer."""
    return int(sum_plain(torch.tensor(int(bool(request))), workshop.groups["world"])) > 0


def _info(workshop: Workshop, state: TrainState) -> RunInfo:
    return RunInfo(
        run=workshop.run,
        world=workshop.groups["world"].size,
        directory=workshop.directory,
        resumed_from=state.step or None,
        parameters=count_parameters(workshop.run.model),
    )
