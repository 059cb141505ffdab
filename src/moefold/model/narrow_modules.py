"""Give the modules of a model the casts of a precision recipe: each gets a matmul policy of its own.

Modules are built with one policy for all; `blueprint/narrow_matmuls.py` says which of them have narrow matmuls.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from moefold.blueprint.narrow_matmuls import (
    AMAX_SUFFIX,
    delayed_weights,
    keeps_narrow,
    matmuls,
    module_of,
    sharded_operands,
)
from moefold.blueprint.parameters import ParameterSpec, is_expert
from moefold.config.precision import NarrowGemmBackend, PrecisionConfig
from moefold.config.precision_recipes import DISPATCH_CASTS, PRECISION_RECIPES
from moefold.config.run import RunConfig
from moefold.moe.experts import Experts
from moefold.moe.grouped_experts import GroupedExperts, KernelPermutation, NarrowingPermutation
from moefold.nn.layers import FeedForward, Linear
from moefold.nn.matmul_policy import MatmulPolicy, ParameterMatmul
from moefold.nn.narrow_gemms import NarrowGemm, grouped_maker, linear_kernels
from moefold.nn.scaled_mm import SCALED_MM
from moefold.nn.te_narrow_gemm import TE_GEMM
from moefold.precision.amax import OWN_AMAXES, Amaxes, ReduceOver, SharedAmaxes
from moefold.precision.amax_history import AmaxHistory, DelayedAmaxes
from moefold.precision.both_directions import WaitingCopies, narrows_rows_alone, share_a_read
from moefold.precision.cast_backends import QUANTIZERS
from moefold.precision.code_operands import CodeOperands, CodeWeights
from moefold.precision.narrow_inputs import NarrowingActivation, NarrowInputs
from moefold.precision.operands import NarrowOperands, NarrowWeights

# None: operands are widened, and multiplied by the GEMMs of `kernels.linear` and `kernels.experts`.
NARROW_GEMMS: dict[NarrowGemmBackend, NarrowGemm | None] = {
    "emulated": None,
    "scaled_mm": SCALED_MM,
    "transformer_engine": TE_GEMM,
}


def narrow_modules(
    model: nn.Module, run: RunConfig, over: ReduceOver | None = None, experts: slice | None = None
) -> NarrowWeights | None:
    """Returns what is to be told when weights have changed; None where the run has no recipe. ``over``: how ranks that
    hold parts of an operand agree on its amax; ``experts``: the numbers of those on this rank."""
    if run.precision.recipe is None:
        return None
    recipe, inputs = PRECISION_RECIPES[run.precision.recipe], NarrowInputs()
    gemm = NARROW_GEMMS[run.kernels.narrow_gemm]
    weights, operands_of = (NarrowWeights(), NarrowOperands) if gemm is None else (CodeWeights(), CodeOperands)
    modules, delayed = dict(model.named_modules()), {weight.name for weight in delayed_weights(run)}
    for matmul in matmuls(run):
        name = matmul.weight.name
        module = modules.get(module_of(name))
        # A stage of a pipeline has some of them.
        if matmul.casts is None or module is None:
            continue
        kept = inputs if keeps_narrow(matmul, run) else None
        amaxes = amaxes_for(matmul.weight, over)
        if name in delayed:
            history = history_for(matmul.weight, run.precision, experts)
            module.add_module(name.rpartition(".")[2] + AMAX_SUFFIX, history)
            amaxes = DelayedAmaxes(history, amaxes)
        operands = operands_of(
            replace(recipe, casts=matmul.casts), weights, QUANTIZERS[run.kernels.casts], run.seed, kept, amaxes
        )
        owner = module.backend if isinstance(module, Experts) else module
        # `narrow_experts_have_a_backend` leaves those that have a policy.
        assert isinstance(owner, (GroupedExperts, Linear, FeedForward))
        if isinstance(owner, GroupedExperts) and run.kernels.row_padding == "permute":
            owner.multiple = recipe.align
        if name.endswith(".down"):
            assert not isinstance(owner, Linear)
            owner.down_matmul_policy = _with_operands(owner.down_matmul_policy, operands, gemm)
            if isinstance(owner, GroupedExperts):
                narrow_activation(owner, operands, run)
        else:
            owner.matmul_policy = _with_operands(owner.matmul_policy, operands, gemm)
            if isinstance(owner, GroupedExperts):
                narrow_permutation(owner, operands, run)
    return weights


def _with_operands(policy: MatmulPolicy, operands: NarrowOperands, gemm: NarrowGemm | None) -> MatmulPolicy:
    assert isinstance(policy, ParameterMatmul)
    policy = policy.with_operands(operands)
    return policy if gemm is None else policy.with_kernels(linear_kernels(gemm), grouped_maker(gemm))


def narrow_activation(owner: GroupedExperts, operands: NarrowOperands, run: RunConfig) -> None:
    """The experts' activation makes the copies of its output, where one read makes both."""
    row, column, fused = operands.casts.x_fprop, operands.casts.x_wgrad, operands.quantizers.activate_both
    if fused is None or not _reads_once(operands, run):
        return
    assert row is not None and column is not None and operands.inputs is not None and run.model.moe is not None
    casts, activation = (row, column), run.model.moe.activation
    owner.activation = NarrowingActivation(owner.activation, fused, activation, operands.inputs, casts)


def narrow_permutation(owner: GroupedExperts, operands: NarrowOperands, run: RunConfig) -> None:
    """The experts' permutation makes fprop's copy of the rows, by a kernel. Left alone where that copy comes with
    wgrad's from one read, where probs multiply the rows, and where the backward pass permutes once more.

    Rows that were sent by the same cast are its numbers: wgrad's copy then follows from the codes.
    """
    cast, plain, sent = operands.casts.x_fprop, owner.permutation, run.precision.dispatch
    if run.kernels.casts != "triton" or not isinstance(plain, KernelPermutation) or not narrows_rows_alone(cast):
        return
    assert cast is not None
    arrives_narrow = sent is not None and DISPATCH_CASTS[sent].forward == cast
    if owner.prob_at_input or run.memory.retained()["rows"] == "discard":
        return
    if arrives_narrow or not _reads_once(operands, run):
        operands.ahead, operands.arrives_narrow = WaitingCopies(), arrives_narrow
        owner.permutation = NarrowingPermutation(plain.kernels, cast, operands.ahead)


def _reads_once(operands: NarrowOperands, run: RunConfig) -> bool:
    """Whether both copies of experts' rows are made together: they are kept narrow, by scales of blocks that the padded
    rows of an expert fill."""
    row, column = operands.casts.x_fprop, operands.casts.x_wgrad
    if operands.inputs is None or run.kernels.row_padding == "wgrad" or not share_a_read(row, column):
        return False
    assert row is not None and row.block is not None
    return not row.scales_whole_matrix and operands.align % row.block[1] == 0


def amaxes_for(weight: ParameterSpec, over: ReduceOver | None) -> Amaxes:
    axis, operands = sharded_operands(weight)
    reduce = None if over is None else over(axis)
    return OWN_AMAXES if reduce is None else SharedAmaxes(dict.fromkeys(operands, reduce))


def history_for(weight: ParameterSpec, precision: PrecisionConfig, experts: slice | None) -> AmaxHistory:
    part = experts if is_expert(weight.name) else None
    return AmaxHistory(precision.amax_history_len, weight.shape[:-2], precision.amax_compute_algo, part)
