from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from tests.engines.fake_deepgemm import fake_deep_gemm
from tests.engines.test_transformer_engine import FAKE as te_fake
from torch import Tensor

from moefold.config.moe import MoEConfig
from moefold.moe import expert_backends
from moefold.moe.dispatch.base import ExpertInput, Routing
from moefold.moe.expert_backends import expert_backend
from moefold.moe.experts import Experts
from moefold.moe.grouped_experts import GroupedExperts, KernelPermutation, kernel_activation
from moefold.moe.moe_kernels import MOE_IN_TORCH
from moefold.nn import grouped_deepgemm
from moefold.nn.matmul_kernels import grouped
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.ops.activations import ACTIVATIONS

CONFIG = MoEConfig(num_experts=4, expert_hidden_dim=8)
WIDTH = 16


def build(
    config: MoEConfig, dtype: torch.dtype = torch.float64, backend: str = "sequential", bias_scale: float = 1.0
) -> Experts:
    torch.manual_seed(0)
    experts = Experts(config, WIDTH, expert_backend(backend, ParameterMatmul())(config), bias_scale).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts


def arrive(counts: list[int], dtype: torch.dtype = torch.float64, weights: torch.dtype = torch.float64) -> ExpertInput:
    """Rows with one choice each, in a mixed order."""
    torch.manual_seed(1)
    rows = torch.randn(sum(counts), WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.rand(sum(counts), 1, dtype=weights, requires_grad=True)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[torch.randperm(sum(counts)), None]
    return ExpertInput(rows, Routing(expert, weight), torch.tensor(counts), counts, None, None)


def row_by_row(experts: Experts, arrived: ExpertInput, config: MoEConfig) -> Tensor:
    out = [arrived.rows_RL.new_zeros(0, WIDTH)]
    expert_S, weight_S = arrived.assignments.experts[:, 0].tolist(), arrived.assignments.probs[:, 0]
    for row, weight, e in zip(arrived.rows_RL, weight_S, expert_S, strict=True):
        gate, up = experts.gate_up[e] @ row
        if experts.gate_up_bias is not None:
            gate, up = gate + experts.gate_up_bias[e, 0], up + experts.gate_up_bias[e, 1]
        answer = experts.down[e] @ ACTIVATIONS[config.activation](gate, up)
        if experts.down_bias is not None:
            answer = answer + experts.down_bias[e]
        out.append((weight * answer)[None])
    return torch.cat(out)


@pytest.mark.parametrize("engine", ["sequential", "fused"])
@pytest.mark.parametrize("counts", [[3, 0, 4, 2], [0, 0, 0, 1]])
@pytest.mark.parametrize(
    ("weight_at", "bias", "activation"),
    list(product(("activation", "output"), (False, True), ("swiglu", "clamped_swiglu"))),
)
def test_experts_equal_one_row_at_a_time(
    counts: list[int], weight_at: str, bias: bool, activation: str, engine: str
) -> None:
    config = replace(CONFIG, weight_at=weight_at, expert_mlp_bias=bias, activation=activation)
    experts, arrived = build(config, backend=engine), arrive(counts)
    out, expected = experts(arrived), row_by_row(experts, arrived, config)
    torch.testing.assert_close(out, expected)
    inputs = (arrived.rows_RL, arrived.assignments.probs, *experts.parameters())
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad(out, inputs, upstream)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, inputs, upstream))


@pytest.mark.parametrize("engine", ["sequential", "fused"])
@pytest.mark.parametrize("weight_at", ["activation", "output"])
def test_a_rank_without_rows_takes_part_in_backward(weight_at: str, engine: str) -> None:
    experts = build(replace(CONFIG, expert_mlp_bias=True, weight_at=weight_at), backend=engine, bias_scale=0.0)
    experts(arrive([0, 0, 0, 0])).sum().backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in experts.parameters())


@pytest.mark.parametrize("weight_at", ["activation", "output"])
def test_split_experts_add_up_to_whole_ones(weight_at: str) -> None:
    config = replace(CONFIG, expert_mlp_bias=True, weight_at=weight_at)
    whole, arrived = build(config), arrive([3, 0, 4, 2])
    parts = []
    for index, bias_scale in enumerate((1.0, 0.0)):
        part = build(config, bias_scale=bias_scale)
        cut = slice(4 * index, 4 * index + 4)
        part.gate_up.data, part.down.data = whole.gate_up.data[:, :, cut], whole.down.data[:, :, cut]
        assert part.gate_up_bias is not None and whole.gate_up_bias is not None
        part.gate_up_bias.data = whole.gate_up_bias.data[:, :, cut]
        parts.append(part(arrived))
    torch.testing.assert_close(parts[0] + parts[1], whole(arrived))


def test_a_share_of_the_experts_runs_with_the_same_code() -> None:
    whole, part = build(CONFIG), build(CONFIG)
    part.gate_up.data, part.down.data = whole.gate_up.data[2:], whole.down.data[2:]
    rows = arrive([0, 0, 4, 2])
    choices = rows.assignments._replace(experts=rows.assignments.experts - 2)
    here = rows._replace(assignments=choices, rows_per_expert_e=torch.tensor([4, 2]), rows_per_expert=[4, 2])
    torch.testing.assert_close(part(here), whole(rows))


@pytest.mark.parametrize("engine", ["grouped", "fused"])
def test_narrow_rows_and_wide_weights(engine: str) -> None:
    config = replace(CONFIG, expert_mlp_bias=True)
    arrived = arrive([8, 0, 4, 3], torch.bfloat16, torch.float32)
    experts = build(config, torch.float32, engine)
    out = experts(arrived)
    assert out.dtype == torch.bfloat16
    reference = build(config)
    reference.load_state_dict(experts.state_dict())
    choices = arrived.assignments._replace(probs=arrived.assignments.probs.double())
    exact = reference(arrived._replace(rows_RL=arrived.rows_RL.double(), assignments=choices))
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.1)
    out.backward(torch.ones_like(out))
    assert arrived.assignments.probs.grad is not None and arrived.assignments.probs.grad.dtype == torch.float32


# Mixtral's ratios: hidden rows are 3.5 times as wide as the model's.
MIXTRAL = MoEConfig(num_experts=4, top_k=2, expert_hidden_dim=56)
BACKENDS = {
    "sequential": partial(expert_backend, "sequential"),
    "grouped": partial(expert_backend, "grouped"),
    "deepgemm": partial(expert_backend, "deepgemm"),
    "fused": partial(expert_backend, "fused"),
    "grouped, kernels' permutation": lambda policy: (
        lambda moe: GroupedExperts(
            moe, policy, grouped, KernelPermutation(MOE_IN_TORCH), kernel_activation(MOE_IN_TORCH, moe.activation)
        )
    ),
    "grouped, Transformer Engine's permutation": partial(expert_backend, "grouped", permute="transformer_engine"),
}


def bytes_saved(name: str, config: MoEConfig) -> int:
    """Bytes kept for backward beside parameters and the rows and probs that have arrived."""
    torch.manual_seed(1)
    experts = Experts(config, WIDTH, BACKENDS[name](ParameterMatmul())(config))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    arrived = arrive([32, 0, 64, 32], torch.bfloat16, torch.float32)
    given = (arrived.rows_RL, arrived.assignments.probs, *experts.parameters())
    known = {t.untyped_storage().data_ptr() for t in given}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(arrived)
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_prob_at_the_activation_saves_only_what_the_second_matmul_reads(
    name: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probs at the output keep the output as well, at every shape."""
    monkeypatch.setattr(grouped_deepgemm, "load_engine", lambda name: fake_deep_gemm())
    monkeypatch.setattr(expert_backends, "load_engine", lambda name: te_fake)
    config = replace(MIXTRAL, activation=activation)
    inside = bytes_saved(name, config)
    sorted_rows, gate_up, hidden, probs = 128 * WIDTH * 2, 128 * 112 * 2, 128 * 56 * 2, 128 * 4
    if name == "fused":
        assert inside == gate_up
        return
    assert sorted_rows + gate_up + hidden <= inside <= sorted_rows + gate_up + hidden + probs
    outside = bytes_saved(name, replace(config, weight_at="output"))
    assert outside >= inside + 128 * WIDTH * 2 - probs
