"""Give the modules of a model the casts of a precision recipe: each gets a matmul policy of its own.

Modules are built with one policy for all; `blueprint/narrow_matmuls.py` says which of them have narrow matmuls.
"""

from __future__ import annotations

from torch import nn

from moefold.blueprint.narrow_matmuls import matmuls, module_of
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.config.run import RunConfig
from moefold.moe.experts import Experts
from moefold.moe.grouped_experts import GroupedExperts
from moefold.nn.layers import FeedForward, Linear
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.precision.operands import NarrowOperands, NarrowWeights
from moefold.precision.quantize_native import QUANTIZERS


def narrow_modules(model: nn.Module, run: RunConfig) -> NarrowWeights | None:
    """Returns what is to be told when weights have changed; None where the run has no recipe."""
    if run.precision.recipe is None:
        return None
    recipe, weights = PRECISION_RECIPES[run.precision.recipe], NarrowWeights()
    names = {module_of(matmul.weight.name) for matmul in matmuls(run) if matmul.casts is not None}
    for name, module in model.named_modules():
        if name in names:
            owner = module.backend if isinstance(module, Experts) else module
            # `narrow_experts_have_a_backend` leaves those that have a policy.
            assert isinstance(owner, (GroupedExperts, Linear, FeedForward))
            policy = owner.matmul_policy
            assert isinstance(policy, ParameterMatmul)
            operands = NarrowOperands(recipe, weights, QUANTIZERS[run.kernels.casts], run.seed)
            owner.matmul_policy = policy.with_operands(operands)
    return weights
