"""What latent attention keeps for backward: q, k, v, output and a number per query and head, with no padding.

Heads have DeepSeek-V3's sizes. Values are a view of the up projection, whose other part went into the keys: a view that
is saved would keep all of it.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import pytest
import torch
from tests.support import on_ranks
from torch import Tensor

from moefold.attention.core import AttentionCore, LocalCore
from moefold.attention.varlen import VarlenAttention
from moefold.attention.varlen_reference import ReferenceAttention
from moefold.attention.varlen_sdpa import SdpaAttention
from moefold.comm.process_groups import Groups
from moefold.nn.batch import Batch
from moefold.parallel.context_parallel import ContextParallelCore, ring_groups, ulysses_groups
from moefold.recipes.catalog import recipe

CONFIG = recipe("deepseek_v3").model.attention
NOPE, VALUE = CONFIG.nope_dim, CONFIG.value_dim
DIM = NOPE + CONFIG.rope_dim
HEADS, DOCUMENTS = 4, (24, 16)
ATTENTION: dict[str, VarlenAttention] = {"sdpa": SdpaAttention(), "reference": ReferenceAttention()}


class Lengths(NamedTuple):
    """The part of a batch that an attention core reads."""

    lengths: tuple[int, ...]
    context_size: int


def kept_by(core: AttentionCore, tokens: int, size: int, dtype: torch.dtype) -> int:
    """Bytes of every storage that autograd keeps; those of row indices left out."""
    q, k = (torch.randn(tokens, HEADS, DIM, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.randn(tokens, HEADS, NOPE + VALUE, dtype=dtype, requires_grad=True)[..., NOPE:]
    kept: dict[int, int] = {}
    alive = []

    def keep(x: Tensor) -> Tensor:
        if x.is_floating_point():
            kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        core(q, k, v, cast(Batch, Lengths(DOCUMENTS, size)), scale=0.1, window=None, sinks_H=None)
    return sum(kept.values())


def formula(tokens: int, dtype: torch.dtype) -> int:
    return tokens * HEADS * (dtype.itemsize * (2 * DIM + 2 * VALUE) + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ATTENTION)
def test_on_one_rank(name: str, dtype: torch.dtype) -> None:
    """bfloat16 on a CPU has a backward of its own for short documents."""
    assert (DIM, VALUE) == (192, 128)
    assert kept_by(LocalCore(ATTENTION[name]), sum(DOCUMENTS), 1, dtype) == formula(sum(DOCUMENTS), dtype)


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_over_ranks(kind: str) -> None:
    groups_of = {"ring": ring_groups, "all_to_all": ulysses_groups}[kind]

    def work(groups: Groups) -> None:
        for attention in ATTENTION.values():
            core = ContextParallelCore(groups_of(groups.contexts), attention)
            for dtype in (torch.float32, torch.bfloat16):
                tokens = sum(DOCUMENTS) // 2
                assert kept_by(core, tokens, 2, dtype) == formula(tokens, dtype), (attention.name, dtype)

    on_ranks(work, 2, cp=2)
