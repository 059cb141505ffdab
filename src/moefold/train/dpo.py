"""DPO (Rafailov et al. 2023): learn from pairs of answers which one is preferred, against a reference model.

With log pi(y) the sum of log-probs of an answer's tokens, the loss of a pair is (their eq. 7)

    -log sigmoid(beta * (log pi(chosen) - log ref(chosen) - log pi(rejected) + log ref(rejected))),

and a step's loss is the mean over its pairs. The answers of a pair may be in different microbatches, on different ranks
and cut over context ranks, so no rank has the loss of a pair in one backward. But its gradient is linear in those of
the log-probs, with factors that are numbers:

    d loss = -w d log pi(chosen) + w d log pi(rejected),    w = beta * sigmoid(-beta * margin) / pairs.

So a step computes log-probs of both models without gradients, one number per answer; sums them over the ranks; and runs
the trainer's own step with every token's log-prob times its answer's factor. This costs one more forward of the policy
and needs nothing of layouts, schedules or packing.

The reference is the model without its adapters, or a frozen copy in the format in which weights are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from moefold.checkpoint.load import load_into
from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.process_groups import Groups
from moefold.config.run import RunConfig
from moefold.config.train import DpoConfig
from moefold.model.decoder import DecoderOutput
from moefold.nn.batch import Batch, TokenObjective
from moefold.nn.low_rank import adapters_off
from moefold.parallel.parallelize import LocalModel, build_local_model
from moefold.pipeline.runtime import run_forward_only
from moefold.train.batches import StepData


@dataclass(frozen=True)
class PairLosses:
    """Of all pairs of a step, N of them: the mean loss, the factor of every answer's log-prob, and what is logged."""

    loss: Tensor
    # [2 N]: of the chosen and the rejected answer of each pair, one after the other.
    factor: Tensor
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class PreparedStep:
    """Batches whose objective has the gradient of the loss, and the loss itself."""

    batches: list[Batch]
    losses: PairLosses


class Preferences:
    """What a run with `train.dpo` needs beside the policy."""

    def __init__(self, policy: LocalModel, reference: LocalModel | None, config: DpoConfig) -> None:
        """``reference``: None is the policy without its adapters."""
        self.policy, self.reference, self.config = policy, reference, config

    def prepare(self, data: StepData) -> PreparedStep:
        number = self.policy.run.data.global_batch
        now = answer_logprobs(self.policy, data, number)
        off = adapters_off(self.policy.model) if self.reference is None else nullcontext()
        with off:
            before = answer_logprobs(self.reference or self.policy, data, number)
        losses = pair_losses(now, before, self.config.beta)
        return PreparedStep(list(_weighted(data, losses.factor)), losses)


def pair_losses(now: Tensor, before: Tensor, beta: float) -> PairLosses:
    """From log-probs of answers under policy and reference, [2 N] each."""
    chosen, rejected = (beta * (now - before)).unflatten(0, (-1, 2)).unbind(1)
    margin, pairs = chosen - rejected, chosen.shape[0]
    weight = beta * torch.sigmoid(-margin)
    metrics = {
        "reward_chosen": float(chosen.mean()),
        "reward_rejected": float(rejected.mean()),
        "reward_margin": float(margin.mean()),
        "preferred": float((margin > 0).double().mean()),
    }
    return PairLosses(-logsigmoid(margin).sum() / pairs, torch.stack((-weight, weight), 1).flatten(), metrics)


def answer_logprobs(local_model: LocalModel, data: StepData, number: int) -> Tensor:
    """[number], on every rank: the sum of each answer's log-probs over the labels that count."""
    objective = TokenObjective(_no_loss, {})
    batches = [replace(batch, objective=objective) for batch in data.batches]
    found = torch.zeros(number, dtype=torch.float64, device=local_model.device)

    def on_output(microbatch: int, output: DecoderOutput) -> None:
        if output.logprob_S is not None:
            found.index_add_(0, answer_of_token(data, microbatch), output.logprob_S.double())

    local_model.sharding.start_evaluation()
    run_forward_only(local_model, batches, on_output)
    local_model.sharding.end_evaluation()
    return over_ranks(found, local_model.groups)


def over_ranks(found: Tensor, groups: Groups) -> Tensor:
    """Tensor-parallel ranks have the same tokens; over the other axes each is on one rank."""
    for axis in ("dp", "cp", "pp"):
        found = all_reduce_no_grad(found, groups[axis])
    return found


def answer_of_token(data: StepData, microbatch: int) -> Tensor:
    """[S]: of each token here, the number of its sample in the step."""
    batch = data.batches[microbatch]
    device = batch.tokens_S.device
    members = torch.tensor(data.members[microbatch], dtype=torch.int64, device=device)
    answer_T = members.repeat_interleave(torch.tensor(batch.lengths, dtype=torch.int64, device=device))
    return answer_T if batch.place_S is None else answer_T[batch.place_S]


def _weighted(data: StepData, factor: Tensor) -> Iterator[Batch]:
    for number, batch in enumerate(data.batches):
        inputs = {"factor": factor[answer_of_token(data, number)]}
        # The step divides by what is called labels: here pairs.
        yield replace(batch, objective=TokenObjective(_linear, inputs), step_labels=factor.shape[0] // 2)


def _no_loss(logprob_S: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return logprob_S.new_zeros(())


def _linear(logprob_S: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (inputs["factor"].to(logprob_S.dtype) * logprob_S).sum()


# ---- the reference model ----


def reference_run(run: RunConfig) -> RunConfig:
    """The run of a frozen copy: no adapters, and no parameter that is trained."""
    return replace(run, model=replace(run.model, lora=None), optim=replace(run.optim, trained="all", frozen=("*",)))


def load_preferences(run: RunConfig, policy: LocalModel) -> Preferences | None:
    """None for a run without `train.dpo`; else with its reference, read on every rank as the policy is."""
    config = run.train.dpo
    if config is None:
        return None
    if config.reference is None:
        return Preferences(policy, None, config)
    reference = build_local_model(reference_run(run), policy.groups, policy.device)
    load_into(Path(config.reference), reference, None)
    return Preferences(policy, reference, config)
