"""The training loop: read data, step, call the callbacks, save and validate where due; resume exactly where it stopped.

Every decision is the same on every rank: sums and norms are reduced before they are used, and requests to save or stop
are summed over the ranks once per step. So no rank leaves the others waiting in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moefold.blueprint.param_counts import count_parameters
from moefold.comm.collectives import all_reduce_ints
from moefold.comm.spans import timed
from moefold.config.run import RunConfig
from moefold.errors import CorruptionError, DataError, ExclusionError
from moefold.moe.load_balancing import BalanceLosses
from moefold.optim.lr_schedule import lr_at
from moefold.pipeline.step import StepResult, StepSums, evaluate, run_step
from moefold.precision.loss_scaling import factor_of
from moefold.train.batches import LocalStep, read_step, step_batches
from moefold.train.callback import Callback, Callbacks, Control, Evaluation, RunInfo, StepRecord
from moefold.train.fault_tolerance.corruption import StateWatch, roll_back
from moefold.train.fault_tolerance.non_finite import where_not_finite
from moefold.train.fault_tolerance.signals import StopRequest, nothing_to_save, print_stderr, stop_on_signals
from moefold.train.fault_tolerance.stragglers import StragglerWatch
from moefold.train.host_switches import garbage_collection
from moefold.train.prefetch import Prefetcher
from moefold.train.profile.device_memory import memory_used, out_of_memory
from moefold.train.saving import (
    already_finished,
    begin_save,
    copy_to_memory,
    is_saved,
    report_committed,
    report_failures,
    save_before_exclusion,
    save_last,
)
from moefold.train.skipped_steps import (
    NotFinite,
    agreed_skip_reason,
    count_not_finite,
    explained,
    is_searching,
    loss_scale_after,
    ran_again,
)
from moefold.train.state import Outcome, TrainState, after_step, skip_reason
from moefold.train.train_context import TrainContext


def train(
    context: TrainContext, state: TrainState, callbacks: Sequence[Callback], stop: StopRequest | None = None
) -> Outcome:
    """Run to the last step, or until asked to stop.

    ``stop`` is set by this process's signal handlers; without one, handlers are installed while this runs. A stop that
    was requested before the first step leaves the run as it was. A run that is finished already stays as it is, unless
    its last checkpoint was never uploaded.
    """
    if stop is None:
        with stop_on_signals() as requested:
            return train(context, state, callbacks, requested)
    if state.step < context.run.train.steps and asked_to_stop(context, stop):
        if context.leads:
            print_stderr(nothing_to_save(state.step))
        return Outcome.INTERRUPTED
    if state.step >= context.run.train.steps > 0 and is_saved(context, state.step):
        if context.uploads is not None:
            context.uploads.finish()
        if context.leads:
            print_stderr(already_finished(context, state))
        return Outcome.FINISHED
    hooks = Hooks(callbacks, context)
    hooks.on_start(_info(context, state))
    reason = "failed"
    context.verifier.start(state.samples, context.run.data.global_batch)
    try:
        with (
            Prefetcher(partial(read_local_step, context), context.groups, context.device) as batches,
            garbage_collection(context.run.train.host) as collect_garbage,
        ):
            state, reason = _loop(context, state, hooks, stop, batches, collect_garbage)
        if context.profiler is not None:
            context.profiler.next_step(None)
        context.heartbeat.enter("checkpoint at the end", state.step)
        context.verifier.finish(state.samples, wait=reason == "finished")
        save_last(context, state, hooks)
        if context.uploads is not None:
            context.uploads.finish()
        if context.memory is not None:
            context.memory.discard()
        if reason == "finished":
            return Outcome.FINISHED
        return Outcome.INTERRUPTED if reason == "interrupted" else Outcome.STOPPED
    except BaseException as error:
        reason = "failed"
        report_failures(context, hooks)
        hooks.on_error(error)
        if (said := out_of_memory(context.groups.rank, context.heartbeat.pulse(), error)) is not None:
            raise MemoryError(said) from error
        raise
    finally:
        context.verifier.close()
        if context.profiler is not None:
            context.profiler.close()
        hooks.on_end(reason)


class LoopControl(Control):
    """The loop's side of a `Control`."""

    def begin_record(self) -> dict[str, float]:
        """Metrics that are logged from now on go into the mapping that is returned."""
        self.metrics = {}
        return self.metrics

    def take_change(self) -> bool:
        """Whether a callback has changed the model since the last time."""
        changed, self.changed_model = self.changed_model, False
        return changed

    def take_requests(self) -> tuple[bool, str | None]:
        """What was asked for since the last time: a checkpoint, and the reason to stop."""
        asked = self.save_requested, self.stop_requested
        self.save_requested, self.stop_requested = False, None
        return asked


class Hooks(Callbacks):
    """The callbacks as the loop calls them: every hook on rank 0, and two of them on every rank."""

    def __init__(self, callbacks: Sequence[Callback], context: TrainContext) -> None:
        super().__init__(callbacks if context.leads else ())
        self.on_this_rank = Callbacks(callbacks)
        self.control = LoopControl(
            context.groups.rank, context.groups["world"].size, context.local_model.model, context.optimizer
        )

    def before_step(self, step: int, control: Control) -> None:
        self.on_this_rank.before_step(step, control)

    def after_backward(self, gradients: Mapping[str, Tensor], control: Control) -> None:
        self.on_this_rank.after_backward(gradients, control)


def _loop(
    context: TrainContext,
    state: TrainState,
    hooks: Hooks,
    stop: StopRequest,
    batches: Prefetcher,
    collect_garbage: Callable[[int], None],
) -> tuple[TrainState, str]:
    """The last state and the reason to end. `after_step` comes before the save, so a resumed run does not repeat it."""
    steps = context.run.train.steps
    watch = StateWatch(context.local_model, context.optimizer, context.run.train.corruption.every, context.directory)
    if watch.every:
        watch.agrees(state.step)
    pace = StragglerWatch(context.run.train.stragglers, context.local_model)
    rolled_back: list[int] = []
    ended, saved = time.perf_counter(), 0.0
    while state.step < steps:
        if context.profiler is not None:
            context.profiler.next_step(state.step + 1)
        metrics = hooks.control.begin_record()
        context.verifier.advance(state.samples)
        context.heartbeat.enter("before step", state.step + 1)
        pace.begin()
        hooks.before_step(state.step + 1, hooks.control)
        try:
            state, record = take_step(context, state, time.perf_counter(), hooks, batches, watch, pace)
        except CorruptionError as found:
            state = roll_back(context, found, hooks, watch, rolled_back)
            continue
        context.heartbeat.enter("after step", state.step)
        collect_garbage(state.step)
        now = time.perf_counter()
        seconds = record.seconds | {"save": saved, "total": now - ended}
        hooks.after_step(replace(record, seconds=seconds, metrics=metrics), hooks.control)
        ended = now
        for change in pace.verdict(state.step):
            if context.leads:
                print_stderr(f"step {state.step}: {change}")
            hooks.on_straggler(state.step, change.rank, change.slow, change.seconds)
        due = _saves_after(context.run, state.step) and state.step < steps
        if due:
            context.heartbeat.enter("checkpoint", state.step)
            begin_save(context, state)
        copy_to_memory(context, state)
        context.heartbeat.enter("commit", state.step)
        report_committed(context, hooks, context.saver.advance())
        saved = time.perf_counter() - now
        if _time_to_validate(context, state.step):
            context.heartbeat.enter("validation", state.step)
            loss = validate(context)
            context.heartbeat.enter("on evaluate", state.step)
            hooks.on_evaluate(Evaluation(state.step, loss, hooks.control.begin_record()), hooks.control)
            ended = time.perf_counter() - saved
        context.heartbeat.enter("agreement", state.step)
        save, reason = agreed_requests(context, hooks.control, stop)
        excluding = exclusion(context.run, watch, pace) if state.step < steps else None
        if (save or reason is not None or excluding is not None) and watch.needs_comparison(state.step):
            try:
                watch.after_update(state.step)
            except CorruptionError as found:
                state = roll_back(context, found, hooks, watch, rolled_back)
        if reason is not None and state.step < steps:
            return state, reason
        if excluding is not None:
            # The others go on from here.
            save_before_exclusion(context, state, hooks)
            raise excluding
        if save and not due and state.step < steps:
            context.heartbeat.enter("checkpoint at the end", state.step)
            begin_save(context, state)
    return state, "finished"


def exclusion(run: RunConfig, watch: StateWatch, pace: StragglerWatch) -> ExclusionError | None:
    """The ranks that the run is to go on without, the same on all ranks; None if there are none."""
    wrong = watch.exclusion() if run.train.corruption.on_mismatch == "exclude" else None
    return wrong or (pace.exclusion() if run.train.stragglers.on_found == "exclude" else None)


def agreed_requests(context: TrainContext, control: LoopControl, stop: StopRequest) -> tuple[bool, str | None]:
    """Whether to save and why to stop: what any rank was asked for, the same on all ranks."""
    save, reason = control.take_requests()
    asked = (int(bool(stop)), int(reason is not None), int(save))
    signalled, stopped, save_count = all_reduce_ints(asked, context.groups["world"])
    if signalled:
        return bool(save_count), "interrupted"
    if stopped:
        return bool(save_count), f"stopped: {reason or 'asked by a callback on another rank'}"
    return bool(save_count), None


def read_local_step(context: TrainContext, first_sample: int) -> LocalStep:
    read = read_step(context.samples, first_sample, context.run, context.groups)
    return read if context.replayed is None else context.replayed.fill(read, first_sample)


def take_step(
    context: TrainContext,
    state: TrainState,
    began: float,
    hooks: Hooks,
    batches: Prefetcher,
    watch: StateWatch,
    pace: StragglerWatch,
) -> tuple[TrainState, StepRecord]:
    run, number = context.run, state.step + 1
    context.heartbeat.enter("data", number)
    ahead = min(run.data.prefetch, run.train.steps - number)
    data = batches.take(state.samples, (state.samples + (i + 1) * run.data.global_batch for i in range(ahead)))
    context.heartbeat.enter("step", number)
    read = time.perf_counter()
    with timed(context.local_model.spans, "host", "learning rate"):
        lr = lr_at(number, run.train.steps, run.optim)
        context.optimizer.set_lr(lr)
    with timed(context.local_model.spans, "compute", "reference of pairs"):
        pairs = None if context.preferences is None else context.preferences.prepare(data)
    world, scale = context.groups["world"], state.loss_scale
    found: list[NotFinite] = []  # of a step that is skipped

    def on_gradients(gradients: dict[str, Tensor]) -> None:
        pace.computed()
        context.heartbeat.enter("after backward", number)
        hooks.after_backward(gradients, hooks.control)
        context.heartbeat.enter("update", number)

    def reason_to_skip(sums: StepSums, grad_norm: Tensor) -> str | None:
        watch.before_update(number, hooks.control.take_change())
        balance = dict(zip(sums.balance._fields, torch.stack(sums.balance).tolist(), strict=True))
        loss = sums.loss if pairs is None else pairs.losses.loss
        local = skip_reason(state, float(loss), balance, float(grad_norm), run.train.health)
        reason = agreed_skip_reason(local, world)
        if reason is None:
            return None
        # The objective of pairs needs the reference's log-probs, so its forward pass is not run again.
        where = partial(where_not_finite, context.local_model, data.batches if pairs is None else None)
        found.append(count_not_finite(float(loss), balance, float(grad_norm), world))
        return explained(reason, found[0], scale, run.precision, where)

    if context.routing_writer is not None:
        context.routing_writer.begin(data)
    result = run_step(
        context.local_model,
        context.optimizer,
        data.batches if pairs is None else pairs.batches,
        on_gradients,
        reason_to_skip,
        loss_scale=factor_of(scale),
    )
    with timed(context.local_model.spans, "host", "record of the step"):
        pace.ended(result.sums.kept_ME, batches.blocked)
        if context.routing_writer is not None:
            context.routing_writer.end(state.samples, data)
        if (overflow := result.sums.overflow) is not None:
            hooks.control.log("overflow_rows", int(overflow))
            if int(overflow) and context.leads:
                print_stderr(ran_again(number, int(overflow), run))
        if pairs is not None:
            # The objective of the step has the gradient of this loss, and another value.
            result = result._replace(sums=result.sums._replace(loss=pairs.losses.loss))
            for name, value in pairs.losses.metrics.items():
                hooks.control.log(name, value)
        loss, grad_norm = float(result.sums.loss), float(result.grad_norm)
        searching = bool(found) and is_searching(found[0], scale, run.precision)
        state = after_step(state, loss, grad_norm, result.skipped, run.train.health, searching)
        if scale is not None:
            hooks.control.log("loss_scale", scale.scale)
            state = replace(state, loss_scale=loss_scale_after(scale, run.precision, found[0] if found else None))
        state = replace(
            state, step=number, samples=state.samples + run.data.global_batch, tokens=state.tokens + data.tokens
        )
        in_memory = context.memory is not None and number % run.train.saving.memory_every == 0
        due = watch.is_due(number, saves=in_memory or _saves_after(run, number), skipped=result.skipped is not None)
        state_hash = watch.after_update(number) if due else None
        seconds = {"data": read - began, "step": time.perf_counter() - read}
        record = _record(context, number, result, lr, data.tokens, seconds, data.ids)
        return state, replace(record, state_hash=state_hash)


def _saves_after(run: RunConfig, step: int) -> bool:
    """Whether a checkpoint is due after this step, the last one's among them."""
    every = run.train.saving.every
    return step == run.train.steps or (every > 0 and step % every == 0)


def _record(
    context: TrainContext, step: int, result: StepResult, lr: float, tokens: int, seconds: dict[str, float], ids: str
) -> StepRecord:
    moe, sums = context.run.model.moe, result.sums
    on = [] if moe is None else [name for name in BalanceLosses._fields if getattr(moe.balance, name)]
    by_kind = dict(zip(BalanceLosses._fields, sums.balance_M5.T.tolist(), strict=True))
    return StepRecord(
        step=step,
        steps=context.run.train.steps,
        loss=float(sums.loss),
        balance={name: float(getattr(sums.balance, name)) for name in on},
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
        layer_balance={name: by_kind[name] for name in on},
    )


def validate(context: TrainContext) -> float:
    """Mean loss per label over the first validation samples: the same ones every time, on any layout."""
    assert context.validation is not None
    run, total, labels = context.run, 0.0, 0
    for number in range(run.train.validate_batches):
        first = number * run.data.global_batch
        batches = step_batches(context.validation, first, run, context.groups, context.device).batches
        total += float(evaluate(context.local_model, batches)) * batches[0].step_labels
        labels += batches[0].step_labels
    if not labels:
        raise DataError(f"{run.data.validation}: its loss mask leaves no label in {run.train.validate_batches} batches")
    return total / labels


def _time_to_validate(context: TrainContext, step: int) -> bool:
    train = context.run.train
    if context.validation is None:
        return False
    return step == train.steps or (train.validate_every > 0 and step % train.validate_every == 0)


def asked_to_stop(context: TrainContext, stop: StopRequest) -> bool:
    """Whether a signal asked any rank to stop; the same on all ranks."""
    return all_reduce_ints((int(bool(stop)),), context.groups["world"]) != [0]


def _info(context: TrainContext, state: TrainState) -> RunInfo:
    return RunInfo(
        run=context.run,
        world=context.groups["world"].size,
        directory=context.directory,
        resumed_from=state.step or None,
        parameters=count_parameters(context.run.model),
        device=context.device.type,
        asked=context.asked,
    )
