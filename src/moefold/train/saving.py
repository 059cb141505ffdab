"""The loop's side of checkpoints: what goes into one, who is told of it, and the last one of a run.

A save that fails is a warning on stderr and a call of `on_save_failed`, and training continues (see
`checkpoint/save_failures.py`), except for the last one, at the end or on a signal: if that cannot be written, the run
ends with an error. Before ranks are excluded the run does not end, so there it is a warning again: the others go on
from an older checkpoint.
"""

from __future__ import annotations

from moefold.checkpoint.save_failures import FailedSave
from moefold.checkpoint.state_dict import chunks_of, tensors_elsewhere
from moefold.checkpoint.tensor_spec import Chunk, TensorSpec
from moefold.comm.collectives import all_reduce_ints
from moefold.errors import CheckpointError
from moefold.train.callback import Callback
from moefold.train.fault_tolerance.signals import print_stderr
from moefold.train.state import TrainState
from moefold.train.train_context import TrainContext


def begin_save(context: TrainContext, state: TrainState) -> None:
    context.saver.begin(state.step, *_saved_state(context, state))


def copy_to_memory(context: TrainContext, state: TrainState) -> None:
    """Where due; a copy that fails is a warning, and older ones stay."""
    every = context.run.train.saving.memory_every
    if context.memory is None or state.step % every or state.step == context.run.train.steps:
        return
    context.heartbeat.enter("checkpoint", state.step)
    reason = context.memory.save(state.step, *_saved_state(context, state))
    if reason is not None and context.leads:
        print_stderr(f"warning: step {state.step} was not copied to memory: {reason}")


def _saved_state(
    context: TrainContext, state: TrainState
) -> tuple[list[Chunk], dict[str, object], dict[str, TensorSpec]]:
    """What this rank writes, the loop's position, and the tensors of which this rank has no part."""
    position: dict[str, object] = {"train": state.to_json(), "data": context.samples.fingerprint}
    return (
        chunks_of(context.local_model, context.optimizer),
        position,
        tensors_elsewhere(context.local_model, context.optimizer),
    )


def save_last(context: TrainContext, state: TrainState, hooks: Callback) -> None:
    """The step's checkpoint, or an error."""
    if (why := save_now(context, state, hooks)) is not None:
        raise CheckpointError(
            f"the last checkpoint, of step {state.step}, could not be written: {why}; "
            f"steps after the newest one in {context.saver.root} are lost"
        )


def save_before_exclusion(context: TrainContext, state: TrainState, hooks: Callback) -> None:
    """The step's checkpoint, from which the other ranks go on, if it can be written."""
    if (why := save_now(context, state, hooks)) is not None and context.leads:
        print_stderr(
            f"warning: before ranks are excluded, step {state.step} could not be saved: {why}; "
            f"the others go on from the newest checkpoint in {context.saver.root}"
        )


def save_now(context: TrainContext, state: TrainState, hooks: Callback) -> str | None:
    """Wait for a save in progress, then write this step if that save was of an earlier one, or failed.

    Returns why it could not be written, on all ranks the same. Raises if `train.saving` says that the run must end.
    """
    context.heartbeat.enter("checkpoint at the end", state.step)
    done = context.saver.finish(retry=context.saver.in_progress == state.step)
    report_committed(context, hooks, done)
    if done != state.step:
        begin_save(context, state)
        done = context.saver.finish()
        failed = report_committed(context, hooks, done)
        if done != state.step:
            return failed[-1].reason if failed else "the reason is not known"
    return None


def report_committed(context: TrainContext, hooks: Callback, step: int | None) -> list[FailedSave]:
    """Failed attempts first, which are returned."""
    failed = report_failures(context, hooks)
    if step is not None:
        context.heartbeat.enter("on save")
        hooks.on_save(step, context.saver.path_of(step))
    if context.uploads is not None:
        if step is not None:
            context.uploads.begin(context.saver.path_of(step))
        context.uploads.advance()
    return failed


def report_failures(context: TrainContext, hooks: Callback) -> list[FailedSave]:
    failed, warnings = context.saver.take_failures()
    for warning in (*map(str, failed), *warnings) if context.leads else ():
        print_stderr(f"warning: {warning}")
    for each in failed:
        hooks.on_save_failed(each.step, each.reason, each.retries_left)
    return failed


def is_saved(context: TrainContext, step: int) -> bool:
    """On the disk, as rank 0 sees it: a state that came from memory may be of a step that was never written."""
    own = context.leads and context.saver.path_of(step).exists()
    return all_reduce_ints((int(own),), context.groups["world"]) != [0]


def already_finished(context: TrainContext, state: TrainState) -> str:
    return (
        f"finished already: {context.saver.path_of(state.step)} has step {state.step} of {context.run.train.steps}; "
        f"a larger train.steps goes on from it"
    )
