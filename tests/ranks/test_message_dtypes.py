"""Formats of messages: parameters that are cast before their all-gather give the same step; narrower sums round."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.autograd_matmul import matmuls_by_autograd
from tests.support import on_ranks
from torch.distributed.fsdp import FSDPModule

import moefold
from moefold.comm.process_groups import Groups
from moefold.dryrun.dry_run import FullDocuments
from moefold.parallel.parallelize import build_local_model
from moefold.parallel.param_shards import local_part
from moefold.pipeline.step import evaluate, run_step
from moefold.train.batches import step_batches
from moefold.train.train_context import make_optimizer

CPU = torch.device("cpu")
SMALL = {
    "precision.compute": "bfloat16",
    "kernels.experts": "sequential",
    "model.num_layers": 2,
    "data.seq_len": 32,
    "data.global_batch": 4,
}


def one_step(run: moefold.RunConfig, groups: Groups) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and this rank's gradients, before they are clipped."""
    torch.manual_seed(0)
    local_model = build_local_model(run, groups, CPU)
    found: dict[str, torch.Tensor] = {}

    def keep(gradients: dict[str, torch.Tensor]) -> None:
        found.update({name: local_part(gradient).clone() for name, gradient in gradients.items()})

    class Documents(FullDocuments):
        def sample(self, index: int) -> Any:
            sample = super().sample(index)
            sample.tokens[:] = torch.randint(run.model.vocab_size, (len(sample.tokens),)).numpy() % 7 * 5 + index
            return sample

    batches = step_batches(Documents(run), 0, run, groups, CPU).batches
    sums = run_step(local_model, make_optimizer(local_model), batches, keep).sums
    return float(sums.loss), found


def compared(
    recipe: str, layout: dict[str, Any], one: dict[str, str], other: dict[str, str], world: int = 2
) -> list[tuple[Any, ...]]:
    """For each rank: both losses, and the largest difference of a gradient over its own size."""
    runs = [
        moefold.load_run(recipe, SMALL | {f"parallel.{name}": value for name, value in layout.items()} | changes)
        for changes in (one, other)
    ]

    def work(groups: Groups) -> tuple[float, float, float]:
        (loss, left), (other_loss, right) = (one_step(run, groups) for run in runs)
        assert left.keys() == right.keys()
        differences = [float((left[name] - right[name]).norm() / (1e-12 + right[name].norm())) for name in left]
        return loss, other_loss, max(differences)

    return on_ranks(work, world, **layout)


CASES = [
    ("deepseek_v3_proxy", {}),
    pytest.param("gpt_oss_20b_proxy", {"ep": 2}, marks=pytest.mark.slow),
    pytest.param("gpt_oss_20b_proxy", {}, marks=pytest.mark.slow),
    pytest.param("qwen3_30b_a3b_proxy", {"cp": 2}, marks=pytest.mark.slow),
    pytest.param("deepseek_v3_proxy", {"cp": 2, "schedule": "1f1b_overlapped"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_bfloat16_parameters_on_the_wire_change_no_value(recipe: str, layout: dict[str, Any]) -> None:
    """gpt-oss has biases and sinks, whose gradients are sums that are rounded once more; no other gradient changes."""
    for loss, other_loss, difference in compared(recipe, layout, {}, {"precision.gather": "float32"}):
        assert loss == other_loss
        assert difference <= (2**-8 if recipe.startswith("gpt_oss") else 0.0)


@pytest.mark.parametrize("gather", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", [[], pytest.param(["attention", "experts"], marks=pytest.mark.slow)])
def test_a_weight_that_fsdp_frees_is_cast_again_in_backward(gather: str, recompute: list[str]) -> None:
    """Layers are resharded after forward; their parameters are the same objects, gathered again, in backward."""
    # As the reference multiplies, on every CPU.
    changes = SMALL | {"precision.gather": gather, "memory.recompute": recompute, "kernels.cpu_matmul": "compute"}
    run = moefold.load_run("deepseek_v3_proxy", changes)

    def work(groups: Groups) -> bool:
        loss, found = one_step(run, groups)
        with matmuls_by_autograd():
            wanted_loss, wanted = one_step(run, groups)
        assert any(isinstance(module, FSDPModule) for module in build_local_model(run, groups, CPU).model.modules())
        return loss == wanted_loss and all(torch.equal(found[name], wanted[name]) for name in wanted)

    assert on_ranks(work, 2) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"schedule": "1f1b_overlapped"}])
def test_gradients_summed_in_bfloat16_are_rounded(layout: dict[str, Any]) -> None:
    for loss, other_loss, difference in compared("qwen3_30b_a3b_proxy", layout, {"precision.reduce": "bfloat16"}, {}):
        assert loss == other_loss
        assert 0 < difference < 2**-6


ROUNDED_ONCE = [
    {"sharding": "flat"},
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"schedule": "1f1b_overlapped"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", ROUNDED_ONCE)
def test_gradients_of_bfloat16_parts_are_summed_in_float32(layout: dict[str, Any]) -> None:
    """Each of two parts is rounded by at most 2**-9 of itself."""
    narrow = {"precision.reduce": "bfloat16_all_to_all"}
    for loss, other_loss, difference in compared("qwen3_30b_a3b_proxy", layout, narrow, {}):
        assert loss == other_loss
        assert 0 < difference < 2**-8


@pytest.mark.slow
def test_activations_summed_in_bfloat16_are_rounded() -> None:
    """On four ranks: the sum of two bfloat16 numbers rounds to the same bfloat16 number either way."""
    narrow = {"precision.tp_reduce": "bfloat16"}
    for loss, other_loss, difference in compared("deepseek_v3_proxy", {"tp": 4}, narrow, {}, world=4):
        assert loss != other_loss and abs(loss - other_loss) < 1e-3 * other_loss
        assert difference > 0


@pytest.mark.slow
def test_activations_summed_from_fp8_parts_are_rounded() -> None:
    narrow = {"precision.tp_reduce": "fp8_all_to_all"}
    for loss, other_loss, difference in compared("deepseek_v3_proxy", {"tp": 2}, narrow, {}):
        assert loss != other_loss and abs(loss - other_loss) < 1e-2 * other_loss
        assert 1e-3 < difference < 1


class SomeDocuments(FullDocuments):
    """Tokens depend on nothing but the sample."""

    def sample(self, index: int) -> Any:
        sample = super().sample(index)
        sample.tokens[:] = (np.arange(len(sample.tokens)) * (2 * index + 3)) % 97
        return sample


def steps_and_evaluations(run: moefold.RunConfig, groups: Groups) -> list[float]:
    """Train a step, evaluate, and again; all losses."""
    local_model = build_local_model(run, groups, CPU)
    optimizer, losses = make_optimizer(local_model), []
    for step in range(2):
        batches = [step_batches(SomeDocuments(run), number, run, groups, CPU).batches for number in (step, 7)]
        losses.append(float(run_step(local_model, optimizer, batches[0]).sums.loss))
        losses.append(float(evaluate(local_model, batches[1])))
    return losses


# FSDP wraps routers by themselves if only the other parameters are cast before their all-gather.
OVERLAPPED = [
    (2, {"schedule": "1f1b_overlapped"}),
    pytest.param(4, {"schedule": "dualpipe_v", "pp": 2, "vpp": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"schedule": "1f1b_overlapped", "pp": 2, "ep": 2}, marks=pytest.mark.slow),
    pytest.param(4, {"schedule": "zb_h1", "pp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "layout"), OVERLAPPED)
def test_steps_and_evaluations_in_turn_have_the_losses_of_one_process(world: int, layout: dict[str, Any]) -> None:
    vpp = layout.get("vpp", 1)
    changes = SMALL | {"model.num_layers": 2 * vpp, "data.seq_len": 16, "data.global_batch": 4 * vpp}
    alone = moefold.load_run("qwen3_30b_a3b_proxy", changes)
    run = moefold.load_run("qwen3_30b_a3b_proxy", changes | {f"parallel.{name}": v for name, v in layout.items()})
    (wanted,) = on_ranks(partial(steps_and_evaluations, alone), 1)
    for losses in on_ranks(partial(steps_and_evaluations, run), world, **layout):
        assert losses == pytest.approx(wanted, rel=1e-4)
