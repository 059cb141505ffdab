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
from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.process_groups import Group
from moefold.optim.lr_schedule import lr_at
from moefold.pipeline.step import StepResult, StepSums, evaluate, run_step
from moefold.train.batches import step_batches
from moefold.train.callback import Callback, Callbacks, RunInfo, StepRecord
from moefold.train.signals import INTERRUPTED, StopRequest, nothing_to_save, say, stop_on_signals
from moefold.train.state import TrainState, after_step, skip_reason
from moefold.train.train_context import TrainContext

FINISHED = 0


def train(
    context: TrainContext, state: TrainState, callbacks: Sequence[Callback], stop: StopRequest | None = None
) -> int:
    """Run to the last step, or until asked to stop; returns the process's exit code.

    ``stop`` is set by whoever hears signals in this process; without one, they are heard while this lasts. A stop that
    was asked for before the first step leaves the run as it was.
    """
    if stop is None:
        with stop_on_signals() as heard:
            return train(context, state, callbacks, heard)
    if state.step < context.run.train.steps and asked_to_stop(context, stop):
        if context.leads:
            say(nothing_to_save(state.step))
        return INTERRUPTED
    told = Callbacks(callbacks if context.leads else ())
    told.on_start(_info(context, state))
    reason = "failed"
    try:
        state, interrupted = _loop(context, state, told, stop)
        _save_last(context, state, told)
        reason = "interrupted" if interrupted else "finished"
        return INTERRUPTED if interrupted else FINISHED
    finally:
        told.on_stop(reason)


def _loop(context: TrainContext, state: TrainState, told: Callback, request: StopRequest) -> tuple[TrainState, bool]:
    """A step is told before it can be saved: a run that goes on after it will not tell it again."""
    steps, saving = context.run.train.steps, context.run.train.saving
    ended, saved = time.perf_counter(), 0.0
    while state.step < steps:
        state, record = _step(context, state, time.perf_counter())
        now = time.perf_counter()
        told.on_step(replace(record, seconds=record.seconds | {"save": saved, "total": now - ended}))
        ended = now
        if saving.every and state.step % saving.every == 0 and state.step < steps:
            begin_save(context, state)
        _tell_committed(context, told, context.saver.advance())
        saved = time.perf_counter() - now
        if _time_to_validate(context, state.step):
            told.on_validation(state.step, validate(context))
            ended = time.perf_counter() - saved
        if asked_to_stop(context, request):
            return state, state.step < steps
    return state, False


def _step(context: TrainContext, state: TrainState, began: float) -> tuple[TrainState, StepRecord]:
    run, number = context.run, state.step + 1
    data = step_batches(context.samples, state.samples, run, context.groups, context.device)
    read = time.perf_counter()
    lr = lr_at(number, run.train.steps, run.optim)
    for group in context.optimizer.param_groups:
        group["lr"] = lr

    def judge(sums: StepSums, grad_norm: Tensor) -> str | None:
        balance = dict(zip(sums.balance._fields, torch.stack(sums.balance).tolist(), strict=True))
        mine = skip_reason(state, float(sums.loss), balance, float(grad_norm), run.train.health)
        return agreed_skip_reason(mine, context.groups["world"])

    result = run_step(context.local_model, context.optimizer, data.batches, skip_reason=judge)
    loss, grad_norm = float(result.sums.loss), float(result.grad_norm)
    state = after_step(state, loss, grad_norm, result.skipped, run.train.health)
    state = replace(
        state, step=number, samples=state.samples + run.data.global_batch, tokens=state.tokens + data.tokens
    )
    seconds = {"data": read - began, "step": time.perf_counter() - read}
    return state, _record(context, number, result, lr, data.tokens, seconds, data.ids)


def agreed_skip_reason(mine: str | None, world: Group) -> str | None:
    """One rank's objection is everyone's: a number that only one rank sees must not part it from the others."""
    objecting = int(all_reduce_no_grad(torch.tensor(int(mine is not None)), world))
    return mine if mine is not None or not objecting else f"{objecting} other rank(s) objected"


def _record(
    context: TrainContext, step: int, result: StepResult, lr: float, tokens: int, seconds: dict[str, float], ids: str
) -> StepRecord:
    moe, sums = context.run.model.moe, result.sums
    on = (
        {}
        if moe is None
        else {name: value for name, value in sums.balance._asdict().items() if getattr(moe.balance, name)}
    )
    return StepRecord(
        step=step,
        steps=context.run.train.steps,
        loss=float(sums.loss),
        balance={name: float(value) for name, value in on.items()},
        grad_norm=float(result.grad_norm),
        lr=lr,
        tokens=tokens,
        seconds=seconds,
        counts=sums.counts_ME.tolist() if context.leads and moe is not None else None,
        dropped=int(sums.dropped),
        skipped=result.skipped,
        memory_bytes=memory_used(context.device),
        world=context.groups["world"].size,
        sample_ids_digest=ids,
    )


def memory_used(device: torch.device) -> int:
    """The most this process has held so far: of the GPU's memory, or of the host's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def validate(context: TrainContext) -> float:
    """Mean loss per label over the first validation samples: the same ones every time, on any layout."""
    assert context.validation is not None
    run, total, labels = context.run, 0.0, 0
    for number in range(run.train.validate_batches):
        first = number * run.data.global_batch
        batches = step_batches(context.validation, first, run, context.groups, context.device).batches
        total += float(evaluate(context.local_model, batches)) * batches[0].step_labels
        labels += batches[0].step_labels
    return total / labels


def _time_to_validate(context: TrainContext, step: int) -> bool:
    train = context.run.train
    if context.validation is None:
        return False
    return step == train.steps or (train.validate_every > 0 and step % train.validate_every == 0)


def begin_save(context: TrainContext, state: TrainState) -> None:
    chunks = chunks_of(context.local_model, context.optimizer)
    elsewhere = tensors_elsewhere(context.local_model, context.optimizer)
    told = {"train": state.to_json(), "data": context.samples.fingerprint}
    context.saver.begin(state.step, chunks, told, elsewhere)


def _save_last(context: TrainContext, state: TrainState, told: Callback) -> None:
    """Leave nothing unsaved: wait for a save under way, then write this step if it is not the one."""
    done = context.saver.finish()
    _tell_committed(context, told, done)
    if done != state.step:
        begin_save(context, state)
        _tell_committed(context, told, context.saver.finish())


def _tell_committed(context: TrainContext, told: Callback, step: int | None) -> None:
    if step is not None:
        told.on_save(step, context.saver.path_of(step))


def asked_to_stop(context: TrainContext, request: StopRequest) -> bool:
    """Whether any rank was asked; all ranks get the same answer."""
    return int(all_reduce_no_grad(torch.tensor(int(bool(request))), context.groups["world"])) > 0


def _info(context: TrainContext, state: TrainState) -> RunInfo:
    return RunInfo(
        run=context.run,
        world=context.groups["world"].size,
        directory=context.directory,
        resumed_from=state.step or None,
        parameters=count_parameters(context.run.model),
    )
