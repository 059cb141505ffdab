"""DPO by its paper's equations (Rafailov et al. 2023, eq. 7): the loss of pairs, and every gradient of a step."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from math import exp, log
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moefold.blueprint.lora_adapters import is_adapter
from moefold.config.loading import override
from moefold.config.moe import BalanceConfig
from moefold.config.run import RunConfig
from moefold.data.samples import PairSamples
from moefold.data.token_writers import MegatronWriter
from moefold.nn.batch import IGNORED, whole_batch
from moefold.nn.low_rank import adapters_off
from moefold.parallel.parallelize import build_local_model, groups_of
from moefold.pipeline.step import make_optimizer, run_step
from moefold.prove.proof_inputs import proof_init
from moefold.recipes.catalog import RECIPES
from moefold.train.batches import next_tokens, step_batches
from moefold.train.dpo import Preferences, pair_losses

BETA = 0.3


def test_the_loss_of_pairs_is_the_papers() -> None:
    generator = torch.Generator().manual_seed(0)
    now, before = (torch.randn(10, generator=generator, dtype=torch.float64) * 5 for _ in range(2))
    found = pair_losses(now, before, BETA)
    total = 0.0
    for pair in range(5):
        chosen, rejected = 2 * pair, 2 * pair + 1
        inside = BETA * (now[chosen] - before[chosen]) - BETA * (now[rejected] - before[rejected])
        total += -log(1 / (1 + exp(-inside)))
    assert abs(float(found.loss) - total / 5) < 1e-12
    # The factors are the gradient of the sum by each log-prob.
    leaf = now.clone().requires_grad_()
    margin = BETA * ((leaf - before)[0::2] - (leaf - before)[1::2])
    (gradient,) = torch.autograd.grad(torch.log(1 + torch.exp(-margin)).sum(), leaf)
    torch.testing.assert_close(found.factor, gradient, rtol=1e-12, atol=1e-14)
    assert found.metrics["preferred"] == float((margin > 0).double().mean())


def pairs(folder: Path, count: int = 12) -> str:
    """Prompts that both answers share, and answers of other lengths, of which alone tokens count."""
    prefix, random = str(folder / "pairs"), np.random.default_rng(1)
    with MegatronWriter(prefix, "uint8", with_loss_mask=True) as writer:
        for _ in range(count):
            prompt = random.integers(0, 256, int(random.integers(2, 6)))
            for _ in range(2):
                answer = random.integers(0, 256, int(random.integers(1, 9)))
                mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
                writer.add(np.concatenate((prompt, answer)).astype(np.uint8), mask)
    return prefix


def small(folder: Path) -> RunConfig:
    exact = ["precision.params=float64", "precision.compute=float64", "kernels.experts=sequential"]
    data = ["data.packing=bin_packed", "data.seq_len=16", "data.global_batch=8", f"data.train={pairs(folder)}"]
    tuned = ["model.lora.rank=3", "optim.trained=adapters", f"train.dpo.beta={BETA}", "data.micro_batch=1"]
    run = override(RECIPES["debug_mla"](), [*exact, *data, *tuned])
    assert run.model.moe is not None
    # Balance losses would add gradients of their own.
    return replace(run, model=replace(run.model, moe=replace(run.model.moe, balance=BalanceConfig())))


def test_pairs_stay_together_and_each_comes_once(tmp_path: Path) -> None:
    samples = PairSamples(small(tmp_path).data, 256, seed=3)
    ids = [int(samples.sample(number).id.split(":")[2]) for number in range(24)]
    assert all(chosen % 2 == 0 and rejected == chosen + 1 for chosen, rejected in zip(ids[::2], ids[1::2], strict=True))
    assert sorted(ids) == list(range(24)) and ids != sorted(ids)


def test_gradients_of_a_step_are_those_of_the_equation(tmp_path: Path) -> None:
    run = small(tmp_path)
    local_model = build_local_model(run, groups_of(run, 1, 0, timedelta(seconds=60)), torch.device("cpu"), proof_init)
    samples = PairSamples(run.data, run.model.vocab_size, run.seed)
    model = local_model.model

    def logprob(number: int) -> Tensor:
        """Of the labels that count, from full logits, one answer at a time."""
        sample = samples.sample(number)
        tokens, labels = torch.from_numpy(sample.tokens[:-1].copy()), torch.from_numpy(next_tokens(sample).copy())
        batch = whole_batch(tokens, labels, (len(tokens),), step_labels=1, step_tokens=len(tokens))
        rows = model.logits(batch).log_softmax(-1)
        counts = labels != IGNORED
        assert counts.any() and not counts.all()
        return rows[counts].gather(1, labels[counts][:, None]).sum()

    losses = []
    for pair in range(4):
        now = [logprob(2 * pair), logprob(2 * pair + 1)]
        with torch.no_grad(), adapters_off(model):
            before = [logprob(2 * pair), logprob(2 * pair + 1)]
        inside = BETA * (now[0] - before[0]) - BETA * (now[1] - before[1])
        losses.append(-torch.log(torch.sigmoid(inside)))
    expected = torch.stack(losses).mean()
    adapters = {name: value for name, value in model.named_parameters() if is_adapter(name)}
    gradients = dict(zip(adapters, torch.autograd.grad(expected, list(adapters.values())), strict=True))

    optimizer = make_optimizer(local_model)
    data = step_batches(samples, 0, run, local_model.groups, torch.device("cpu"))
    assert len(data.batches) > 1
    assert run.train.dpo is not None
    prepared = Preferences(local_model, None, run.train.dpo).prepare(data)
    torch.testing.assert_close(prepared.losses.loss, expected.detach(), rtol=1e-11, atol=0)
    seen: dict[str, Tensor] = {}

    def keep(found: dict[str, Tensor]) -> None:
        seen.update({name: gradient.clone() for name, gradient in found.items()})

    run_step(local_model, optimizer, prepared.batches, keep)
    assert set(seen) == set(gradients)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(seen[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
