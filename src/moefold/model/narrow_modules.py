"""Give the modules of a model the casts of a precision recipe: each gets a matmul policy of its own.

Modules are built with one policy for all; `blueprint/narrow_matmuls.py` says which of them have narrow matmuls.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from moefold.blueprint.narrow_matmuls import keeps_narrow, matmuls, module_of
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.config.run import RunConfig
from moefold.moe.experts import Experts
from moefold.moe.grouped_experts import GroupedExperts
from moefold.nn.layers import FeedForward, Linear
from moefold.nn.matmul_policy import MatmulPolicy, ParameterMatmul
from moefold.precision.narrow_inputs import NarrowInputs
from moefold.precision.operands import NarrowOperands, NarrowWeights
from moefold.precision.quantize_native import QUANTIZERS


def narrow_modules(model: nn.Module, run: RunConfig) -> NarrowWeights | None:
    """Returns what is to be told when weights have changed; None where the run has no recipe."""
    if run.precision.recipe is None:
        return None
    recipe, weights, inputs = PRECISION_RECIPES[run.precision.recipe], NarrowWeights(), NarrowInputs()
    modules = dict(model.named_modules())
    for matmul in matmuls(run):
        name = matmul.weight.name
        module = modules.get(module_of(name))
        # A stage of a pipeline has some of them.
        if matmul.casts is None or module is None:
            continue
        kept = inputs if keeps_narrow(matmul, run) else None
        operands = NarrowOperands(
            replace(recipe, casts=matmul.casts), weights, QUANTIZERS[run.kernels.casts], run.seed, kept
        )
        owner = module.backend if isinstance(module, Experts) else module
        # `narrow_experts_have_a_backend` leaves those that have a policy.
        assert isinstance(owner, (GroupedExperts, Linear, FeedForward))
        if isinstance(owner, GroupedExperts) and run.kernels.row_padding == "permute":
            owner.multiple = recipe.align
        if name.endswith(".down"):
            assert not isinstance(owner, Linear)
            owner.down_matmul_policy = _with_operands(owner.down_matmul_policy, operands)
        else:
            owner.matmul_policy = _with_operands(owner.matmul_policy, operands)
    return weights


def _with_operands(policy: MatmulPolicy, operands: NarrowOperands) -> MatmulPolicy:
    assert isinstance(policy, ParameterMatmul)
    return policy.with_operands(operands)
