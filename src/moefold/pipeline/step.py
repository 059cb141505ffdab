"""One optimizer step on one rank's shard: gradients of all microbatches, one grad norm, one clipped update.

With buffers of a fixed number of rows (`parallel.dispatcher: all_to_all_bounded`) the number of rows that did not fit
is summed over layers, microbatches and ranks, and read once, when the gradients are summed; with pages for rows that
are kept (`memory.retain.STEP: page`) also that of rows for which no page was left. If it is not zero, gradients are
discarded, as those of a skipped step are, and the microbatches run once more with exact counts. Nothing has been
updated by then: the step has one update, one set of counts and one set of outputs, those of its last run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from moefold.blueprint.model_shape import Attention, layer_shape
from moefold.blueprint.parameters import block_names
from moefold.comm.collectives import all_reduce_ints, all_reduce_no_grad
from moefold.comm.process_groups import Groups
from moefold.comm.spans import timed
from moefold.model.decoder import Decoder, DecoderOutput
from moefold.moe.load_balancing import update_expert_bias
from moefold.nn.batch import Batch
from moefold.optim.optimizer import ModelOptimizer, OptimizerInputs, build_optimizer, clip_gradients, grad_norm_of
from moefold.optim.qk_clip import clip_heads, gammas
from moefold.parallel.maxima_over_ranks import over_ranks as largest_over_ranks
from moefold.parallel.parallelize import LocalModel
from moefold.parallel.param_shards import ParamShard, finish_gradients
from moefold.pipeline.pipeline_state import OnOutput, StepSums
from moefold.pipeline.runtime import OnAction, run_forward_only, run_schedule
from moefold.precision.dtypes import TORCH_FORMATS


class StepResult(NamedTuple):
    """``skipped`` says why there was no update; then parameters and optimizer states are unchanged."""

    sums: StepSums
    grad_norm: Tensor
    skipped: str | None = None
    # [L, H]: the largest logit of every block and head, with `optim.qk_clip`.
    max_logits_LH: Tensor | None = None


# Called with the gradients by name, before they are clipped.
OnGradients = Callable[[dict[str, Tensor]], None]
# From the step's sums and grad norm, which are the same on all ranks: a reason to skip the update, or None.
SkipReason = Callable[[StepSums, Tensor], str | None]


def not_finite(sums: StepSums, grad_norm: Tensor) -> str | None:
    """A ``SkipReason``; the same on all ranks, as both numbers are."""
    if bool(torch.isfinite(sums.loss) & torch.isfinite(grad_norm)):
        return None
    return f"loss {float(sums.loss)}, grad_norm {float(grad_norm)}"


def make_optimizer(local_model: LocalModel) -> ModelOptimizer:
    """Of all that this rank updates, as the run's config says."""
    inputs = OptimizerInputs(local_model.run, local_model.device, local_model.groups)
    return build_optimizer(local_model.pieces(), inputs)


class StepGradients(NamedTuple):
    """A step before its update: the gradients of this rank's pieces, not clipped, and the norm of all ranks' ones."""

    sums: StepSums
    gradients: dict[str, Tensor]
    grad_norm: Tensor
    max_logits_LH: Tensor | None


def run_step(
    local_model: LocalModel,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    on_gradients: OnGradients | None = None,
    skip_reason: SkipReason | None = None,
    on_action: OnAction | None = None,
    on_output: OnOutput | None = None,
    loss_scale: float = 1.0,
) -> StepResult:
    """Forward and backward over ``batches``, then one clipped update of parameters and of the loss-free bias."""
    computed = compute_gradients(local_model, optimizer, batches, on_gradients, on_action, on_output, loss_scale)
    return update(local_model, optimizer, computed, skip_reason)


@torch.no_grad()
def unscale_gradients(gradients: Iterable[Tensor], scale: float) -> None:
    """In place; exact for powers of two, and what is not finite stays so."""
    if scale != 1.0 and (members := list(gradients)):
        torch._foreach_mul_(members, 1.0 / scale)


def compute_gradients(
    local_model: LocalModel,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    on_gradients: OnGradients | None = None,
    on_action: OnAction | None = None,
    on_output: OnOutput | None = None,
    loss_scale: float = 1.0,
) -> StepGradients:
    """Gradients of the losses; those of losses times ``loss_scale`` exist between backward and here only."""
    spans = local_model.spans
    if loss_scale != 1.0:
        batches = [replace(batch, loss_scale=loss_scale) for batch in batches]
    sums, gradients, max_logits_LH = _run_until_rows_fit(
        local_model, lambda passed_on: _run_once(local_model, optimizer, batches, on_action, passed_on), on_output
    )
    with timed(spans, "compute", "unscale gradients"):
        unscale_gradients(gradients.values(), loss_scale)
    if on_gradients is not None:
        on_gradients(gradients)
    with timed(spans, "compute", "gradient norm"):
        primary = primary_shards(gradients, local_model.param_shards)
        grad_norm = grad_norm_of(primary, local_model.groups["world"], local_model.device)
    return StepGradients(sums, gradients, grad_norm, max_logits_LH)


class _Summed(NamedTuple):
    """Of one run of all microbatches, summed over ranks; the gradients are scaled as the losses were."""

    sums: StepSums
    gradients: dict[str, Tensor]
    max_logits_LH: Tensor | None


def _run_until_rows_fit(
    local_model: LocalModel, run_once: Callable[[OnOutput | None], _Summed], on_output: OnOutput | None
) -> _Summed:
    """Once, or twice where rows did not fit; with exact counts all do."""
    if not local_model.has_row_bounds:
        return run_once(on_output)
    # Outputs are passed on when it is known that they count.
    outputs: list[tuple[int, DecoderOutput]] = []

    def hold(number: int, output: DecoderOutput) -> None:
        outputs.append((number, DecoderOutput(logprob_S=output.logprob_S, entropy_S=output.entropy_S)))

    held = None if on_output is None else hold
    found = run_once(held)
    overflow = found.sums.overflow
    assert overflow is not None
    if local_model.host.overflow(overflow):
        outputs.clear()
        with local_model.exact_rows():
            found = run_once(held)
        found = found._replace(sums=found.sums._replace(overflow=overflow))
    for number, output in outputs:
        assert on_output is not None
        on_output(number, output)
    return found


def _run_once(
    local_model: LocalModel,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    on_action: OnAction | None,
    on_output: OnOutput | None,
) -> _Summed:
    sharding, spans = local_model.sharding, local_model.spans
    with timed(spans, "host", "start of the step"):
        optimizer.zero_grad()
    with timed(spans, "compute", "gather weights"):
        sharding.start_step()
        local_model.start_amaxes()
    sums = run_schedule(local_model, batches, on_action, on_output)
    stash = None if local_model.retention is None else local_model.retention.stash
    if stash is not None and sums.overflow is not None:
        sums = sums._replace(overflow=sums.overflow + stash.take_overflow())
    with timed(spans, "host", "sums over ranks"):
        sums = over_ranks(sums, local_model.groups)
        max_logits_LH = largest_logits(local_model)
    with timed(spans, "compute", "reduce gradients"):
        gradients = sharding.reduce_gradients()
        finish_gradients(gradients, local_model.param_shards, local_model.groups["pp"], local_model.bucket_bytes)
    return _Summed(sums, gradients, max_logits_LH)


def update(
    local_model: LocalModel, optimizer: Optimizer, computed: StepGradients, skip_reason: SkipReason | None = None
) -> StepResult:
    sums, gradients, grad_norm, max_logits_LH = computed
    spans = local_model.spans
    with timed(spans, "host", "reasons to skip"):
        reason = None if skip_reason is None else skip_reason(sums, grad_norm)
    if reason is not None:
        return StepResult(sums, grad_norm, reason, max_logits_LH)
    with timed(spans, "compute", "optimizer"):
        clip_gradients(gradients.values(), grad_norm, local_model.run.optim.clip_norm)
        optimizer.step()
        if max_logits_LH is not None:
            clip_logits(local_model, max_logits_LH)
        local_model.push_amaxes()
        local_model.weights_changed(trained_only=True)
        move_expert_biases(local_model.model, sums.kept_ME)
    return StepResult(sums, grad_norm, None, max_logits_LH)


def largest_logits(local_model: LocalModel) -> Tensor | None:
    """Of the forwards since the last step, over all ranks; None without `optim.qk_clip`."""
    if local_model.maxima is None:
        return None
    model = local_model.run.model
    wide = torch.promote_types(TORCH_FORMATS[local_model.run.precision.compute], torch.float32)
    nothing = torch.empty(0, dtype=wide, device=local_model.device)
    observed, blocks = local_model.maxima.take(), model.num_layers + model.num_mtp
    return largest_over_ranks(observed, local_model.groups, blocks, model.attention.num_heads, nothing)


def clip_logits(local_model: LocalModel, max_logits_LH: Tensor) -> None:
    """QK-clip: scale the heads whose largest logit exceeds the bound, on every rank its own pieces."""
    model, bound = local_model.run.model, local_model.run.optim.qk_clip
    attention = layer_shape(model, 0).mixer
    assert bound is not None and isinstance(attention, Attention)
    gamma_LJ = gammas(max_logits_LH, bound, attention)
    clip_heads(local_model.pieces(), dict(zip(block_names(model), gamma_LJ.unbind(), strict=True)), attention)


def evaluate(local_model: LocalModel, batches: Sequence[Batch], on_output: OnOutput | None = None) -> Tensor:
    """The loss per label of these batches, on every rank; no gradients, no updates."""
    training = local_model.model.training
    local_model.model.eval()
    try:
        local_model.sharding.start_evaluation()
        sums = over_ranks(run_forward_only(local_model, batches, on_output), local_model.groups)
        local_model.sharding.end_evaluation()
    finally:
        local_model.model.train(training)
    return sums.loss


def primary_shards(gradients: dict[str, Tensor], param_shards: dict[str, ParamShard]) -> list[Tensor]:
    """The gradients of shards for which this rank is the primary replica; these enter its grad norm."""
    return [gradient for name, gradient in gradients.items() if param_shards[name].is_primary]


def over_ranks(sums: StepSums, groups: Groups) -> StepSums:
    """Sum over the world. The loss is replicated over tp, so it is summed over the other axes only; balance losses and
    counts are of the rank's own tokens.

    Each tp rank reduces its own copy of the loss, so that a loss that is wrong on one tp rank shows there.
    """
    world = groups["world"]
    losses = torch.stack((sums.loss, sums.mtp_loss))
    for axis in ("dp", "cp", "pp"):
        losses = all_reduce_no_grad(losses, groups[axis])
    loss, mtp_loss = losses
    balance_M5 = all_reduce_no_grad(sums.balance_M5, world)
    counts_3ME = torch.stack((sums.counts_ME, sums.kept_ME, sums.plain_ME))
    if sums.overflow is None:
        return StepSums(loss, mtp_loss, balance_M5, *all_reduce_no_grad(counts_3ME, world))
    # One message for all whole numbers.
    numbers = all_reduce_no_grad(torch.cat([counts_3ME.flatten(), sums.overflow[None]]), world)
    counts_ME, kept_ME, plain_ME = numbers[:-1].view_as(counts_3ME)
    return StepSums(loss, mtp_loss, balance_M5, counts_ME, kept_ME, plain_ME, numbers[-1:].sum())


@torch.no_grad()
def move_expert_biases(model: Decoder, kept_ME: Tensor) -> None:
    """Update the loss-free bias against the load of the whole step, identically on every rank."""
    for row, router in model.routers().items():
        if router.expert_bias is not None:
            router.expert_bias.copy_(update_expert_bias(router.expert_bias, kept_ME[row], router.bias_update_rate))


def count_step_labels(mine: int, groups: Groups) -> int:
    """The labels of the whole step: the divisor of the loss, counted before the first forward."""
    (labels,) = count_over_step((mine,), groups)
    return labels


def count_over_step(mine: Sequence[int], groups: Groups) -> tuple[int, ...]:
    """Counts of the whole step, summed over dp and cp in one call each."""
    return tuple(all_reduce_ints(all_reduce_ints(mine, groups["dp"]), groups["cp"]))
