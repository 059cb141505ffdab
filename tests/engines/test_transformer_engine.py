"""The adapter of Transformer Engine's permutation against a fake of it, through experts: values and gradients."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from tests.engines.rank_threads import ContractError, require
from torch import Tensor, nn

from moefold.config.moe import MoEConfig
from moefold.errors import BackendError
from moefold.moe.dispatch.base import ExpertInput, Routing
from moefold.moe.experts import ExpertWeights
from moefold.moe.grouped_experts import GroupedExperts, TorchPermutation, TransformerEnginePermutation, torch_activation
from moefold.nn.matmul_kernels import sequential
from moefold.nn.matmul_policy import ParameterMatmul

ROWS, DIM, EXPERTS, CHOICES = 7, 4, 4, 3


def _positions(routing_map: Tensor, num_out_tokens: int) -> Tensor:
    """[R, 2e + 1], as the library's: the place of each row with each expert, -1 for none; the rest is its own."""
    require(routing_map.dtype == torch.int32 and routing_map.is_contiguous(), "the map must be contiguous int32")
    require(set(routing_map.unique().tolist()) <= {0, 1}, "the map must be of 0 and 1")
    require(num_out_tokens > 0, "num_out_tokens must be positive")
    require(num_out_tokens == int(routing_map.sum()), "num_out_tokens is not the number of ones")
    place = (routing_map.t().flatten().cumsum(0) - 1).view_as(routing_map.t()).t()
    place = place.where(routing_map > 0, -1).int()
    return torch.cat([place, torch.zeros(len(place), place.shape[1] + 1, dtype=torch.int32)], 1)


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    require(inp.dim() == 2 and inp.is_contiguous() and len(inp) == len(routing_map), "rows and map differ")
    require(probs.shape == routing_map.shape, "probs must have the shape of the map")
    expert, row = routing_map.t().nonzero(as_tuple=True)
    return inp[row], probs[row, expert], _positions(routing_map, num_out_tokens)


def moe_permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor]:
    rows, _, row_id_map = moe_permute_with_probs(inp, routing_map.float(), routing_map, num_out_tokens)
    return rows, row_id_map


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
) -> Tensor:
    require(inp.numel() > 0, "an empty input is returned as it is, in the wrong shape")
    assert restore_shape is not None
    place = row_id_map[:, : (row_id_map.shape[1] - 1) // 2].long()
    require(restore_shape == (len(place), inp.shape[1]), "the shape to restore is another")
    parts = inp[place.clamp(min=0)] * (place >= 0)[..., None]
    return (parts if merging_probs is None else parts * merging_probs[..., None]).sum(1).to(inp.dtype)


FAKE = ModuleType("transformer_engine.pytorch")
FAKE.__dict__.update(
    {"moe_permute": moe_permute, "moe_permute_with_probs": moe_permute_with_probs, "moe_unpermute": moe_unpermute}
)


def arrive(kept: str) -> ExpertInput:
    """Source rows with several experts here, some of other ranks (-1), and none for expert 2."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, DIM, dtype=torch.float64, generator=generator).requires_grad_()
    experts = torch.tensor([0, 1, 3])[torch.rand(ROWS, CHOICES, generator=generator).argsort(1)]
    probs = torch.rand(ROWS, CHOICES, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.rand(ROWS, CHOICES, generator=generator) > {"all": -1.0, "some": 0.4, "none": 2.0}[kept]
    experts = experts.where(mask, -1)
    counts = torch.bincount(experts[mask], minlength=EXPERTS)
    routing = Routing(experts, probs, None if kept == "all" else mask)
    return ExpertInput(rows, routing, counts, counts.tolist(), None, None)


@pytest.mark.parametrize("kept", ["all", "some", "none"])
@pytest.mark.parametrize("weight_at", ["activation", "output"])
def test_experts_equal_those_with_torch_permutation(weight_at: str, kept: str) -> None:
    moe = MoEConfig(num_experts=EXPERTS, top_k=CHOICES, weight_at=weight_at)  # type: ignore[arg-type]
    found = []
    for permutation in (TransformerEnginePermutation(FAKE), TorchPermutation()):
        torch.manual_seed(0)
        gate_up = nn.Parameter(torch.randn(EXPERTS, 2, 8, DIM, dtype=torch.float64))
        down = nn.Parameter(torch.randn(EXPERTS, DIM, 8, dtype=torch.float64))
        arrived = arrive(kept)
        experts = GroupedExperts(moe, ParameterMatmul(), sequential, permutation, torch_activation("swiglu"))
        out = experts(arrived, ExpertWeights(gate_up, down, None, None, 1.0))
        leaves = [arrived.rows_RL, arrived.assignments.probs, gate_up, down]
        found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_padded_capacities_are_refused() -> None:
    with pytest.raises(BackendError, match=r"does not pad capacities; use kernels.permute backend"):
        TransformerEnginePermutation(FAKE).permute(arrive("all")._replace(capacity=4), EXPERTS, True)


def test_the_library_would_refuse_an_empty_permutation() -> None:
    with pytest.raises(ContractError, match="num_out_tokens must be positive"):
        moe_permute(torch.ones(2, 4), torch.zeros(2, 3, dtype=torch.int32), 0)
