"""The product with a low-rank adapter, beside that with the weight: y = x W^T + scale * (x A^T) B^T (LoRA).

The two small matmuls go through the model's own matmul policy, so that schedules can defer their weight gradients and
flat sharding can add to them in place. Modules that can have adapters declare them as None; `attach_adapters` sets
those that the blueprint lists. `merged_reference` is the definition: the weight itself changed by scale * B A.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moefold.blueprint.lora_adapters import is_adapter
from moefold.blueprint.parameters import ParameterSpec
from moefold.nn.matmul_kernels import GroupedMatmul, sequential
from moefold.nn.matmul_policy import MatmulPolicy


def add_low_rank(
    y: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None, scale: float, matmul_policy: MatmulPolicy
) -> Tensor:
    """``y`` plus the adapter's product; A [r, X] and B [Y, r], or [2, r, X] and [2, F, r] of a gate and an up."""
    if a is None or b is None or scale == 0.0:
        return y
    low = matmul_policy.linear(x, a)
    if b.dim() == 2:
        return y + matmul_policy.linear(low, b) * scale
    stacked, rank = b.shape[0], b.shape[-1]
    tokens = x.shape[:-1].numel()
    # One matrix per half, applied to that half of the columns: a grouped matmul with as many rows for each.
    rows = low.reshape(tokens, stacked, rank).transpose(0, 1).reshape(-1, rank)
    counts = torch.full((stacked,), tokens, dtype=torch.int64, device=x.device)
    out = matmul_policy.grouped(sequential, rows, b, counts, [tokens] * stacked)
    # Sizes are written out: a rank without tokens has no size to infer.
    return y + out.view(stacked, tokens, b.shape[1]).transpose(0, 1).reshape(y.shape) * scale


def add_low_rank_grouped(
    y_PY: Tensor,
    rows_PX: Tensor,
    a_erX: Tensor | None,
    b_eYr: Tensor | None,
    scale: float,
    matmul_policy: MatmulPolicy,
    matmul: GroupedMatmul,
    counts: tuple[Tensor, list[int] | None],
) -> Tensor:
    """The same for rows sorted by expert, each with its own expert's adapter; ``counts``: rows of each expert."""
    if a_erX is None or b_eYr is None or scale == 0.0:
        return y_PY
    low_Pr = matmul_policy.grouped(matmul, rows_PX, a_erX, *counts)
    return y_PY + matmul_policy.grouped(matmul, low_Pr, b_eYr, *counts) * scale


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as if it had no adapters."""
    scales = {module: module.lora_scale for module in model.modules() if "lora_scale" in vars(module)}
    try:
        for module in scales:
            module.lora_scale = 0.0  # type: ignore[assignment]
        yield
    finally:
        for module, scale in scales.items():
            module.lora_scale = scale


def merged_reference(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale * B A. Stacked dims of A are those of the weight; B may have more rows than two dims say."""
    stacked = a.shape[:-2]
    delta = b.reshape(*stacked, -1, b.shape[-1]) @ a
    return weight + scale * delta.reshape(weight.shape)


def attach_adapters(model: nn.Module, specs: Iterable[ParameterSpec], scale: float) -> None:
    """Give modules of ``model`` their adapters, at their whole size and without values."""
    for spec in specs:
        if not is_adapter(spec.name):
            continue
        owner, _, leaf = spec.name.rpartition(".")
        module = model.get_submodule(owner)
        if not hasattr(module, leaf):
            raise TypeError(f"{type(module).__name__} cannot have the adapter {spec.name}")
        setattr(module, leaf, nn.Parameter(torch.empty(spec.shape)))
        module.lora_scale = scale  # type: ignore[assignment]
