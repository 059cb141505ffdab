"""Flat sharding in a whole step: weight gradients are added to the float32 buffers as they are computed, at once or
deferred, with the bits of autograd's accumulation and without a float32 copy of any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.staged_runs import MODEL, microbatches, share_on, staged_run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.config.precision import PrecisionConfig
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.runtime import run_schedule

# Of 7 and 11 tokens and 72 words, so that no activation and no vocabulary has the shape of another weight.
SHAPES = ((7,), (5, 1, 5), (7,), (5, 1, 5))
# Sizes in bfloat16 that torch's grouped GEMM takes.
assert MODEL.moe is not None
ALIGNED = replace(MODEL, vocab_size=72, moe=replace(MODEL.moe, latent_dim=24))


class WideCopies(TorchDispatchMode):
    """Counts casts to float32, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if op is torch.ops.aten._to_copy.default and result.dtype == torch.float32:
            self.shapes[tuple(result.shape)] += 1
        return result


def policies(local_model: LocalModel) -> list[ParameterMatmul]:
    owners = [owner for module in local_model.model.modules() for owner in (module, getattr(module, "backend", None))]
    found = [getattr(owner, "matmul_policy", None) for owner in owners]
    return [policy for policy in found if isinstance(policy, ParameterMatmul)]


def matrices(local_model: LocalModel) -> set[tuple[int, ...]]:
    """Shapes of weights that a policy multiplies: not of the vocabulary, whose gradients are float32 sums."""
    named = local_model.model.named_parameters()
    return {
        tuple(p.shape)
        for name, p in named
        if p.ndim > 1 and p.dtype == torch.bfloat16 and not name.startswith(("embedding", "head"))
    }


@pytest.mark.parametrize("experts", ["grouped", pytest.param("sequential", marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", pytest.param("1f1b_overlapped", marks=pytest.mark.slow)])
def test_flat_buffers_are_added_to_without_a_wide_copy(schedule: str, experts: str) -> None:
    precision, found = PrecisionConfig("float32", "bfloat16"), []
    for in_place in (True, False):
        local = share_on(staged_run(ALIGNED, precision, experts, schedule=schedule, sharding="flat"))
        assert policies(local) and all(policy.in_place for policy in policies(local))
        for policy in policies(local):
            policy.in_place = in_place
        local.sharding.start_step()
        with WideCopies() as copies:
            run_schedule(local, microbatches(local.run, SHAPES))
        wide = {shape: copies.shapes[shape] for shape in matrices(local) if copies.shapes[shape]}
        # Schedules that defer weight gradients write them where they are summed anyway.
        assert (not wide) == (in_place or schedule != "1f1b"), wide
        found.append(gradients(local))
    for name, gradient in found[0].items():
        assert gradient.dtype == torch.float32 and torch.equal(gradient, found[1][name]), name


def gradients(local_model: LocalModel) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in local_model.model.named_parameters()}
    assert all(gradient is not None and gradient.any() for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
