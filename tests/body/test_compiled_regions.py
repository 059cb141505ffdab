"""Compiled regions of an MoE layer: the values and gradients of the plain functions, and not one graph break."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from tests.compiled_launches import compiled_counted
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.precision import KernelsConfig
from moefold.config.run import RunConfig
from moefold.errors import BackendError
from moefold.model.build import build_decoder, local_interfaces
from moefold.moe.dedup_permute import send_order
from moefold.moe.load_balancing import balance_term
from moefold.moe.moe_kernels import (
    MOE_IN_TORCH,
    MoEKernels,
    Region,
    compile_regions,
    kernels_for,
    region,
    require_compiler,
)
from moefold.ops.activations import weighted_activation, weighted_activation_reference
from moefold.ops.host_probe import probe_host

SIGMOID = RouterConfig(
    score="sigmoid", normalize=True, scale=2.5, num_groups=4, top_groups=2, group_score="topk_sum", expert_bias=True
)
MODEL = ModelConfig(
    vocab_size=50,
    dim=16,
    num_layers=2,
    num_dense_layers=1,
    dense_hidden_dim=24,
    attention=GQAConfig(num_heads=2, num_kv_heads=1, head_dim=8),
    moe=MoEConfig(
        num_experts=8,
        top_k=2,
        expert_hidden_dim=8,
        shared_hidden_dim=8,
        router=RouterConfig(normalize=True),
        balance=BalanceConfig(microbatch=0.1, sequence=0.2, z=0.01),
    ),
)


def loss_and_gradients(model: ModelConfig, kernels: MoEKernels, num_sequences: int) -> dict[str, Tensor]:
    decoder = build_decoder(model, torch.float64, local_interfaces("sequential", kernels)).double()
    fill(decoder)
    output = decoder(batch_of(num_sequences, 7, 50), None)
    loss = output.loss_sum + sum(sum(report.losses) for _, report in output.reports)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.slow
@pytest.mark.parametrize("router", [RouterConfig(normalize=True), SIGMOID], ids=["softmax", "sigmoid"])
def test_a_model_with_compiled_regions_has_the_gradients_of_the_plain_one(router: RouterConfig) -> None:
    """Graphs as torch's compiler cuts them, run operation by operation; also with other numbers of rows."""
    assert MODEL.moe is not None
    model = replace(MODEL, moe=replace(MODEL.moe, router=router))
    counters.clear()
    for num_sequences in (2, 3, 5):
        with compiled_counted() as compiled:
            ours = loss_and_gradients(model, compiled, num_sequences)
        theirs = loss_and_gradients(model, MOE_IN_TORCH, num_sequences)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]


@pytest.mark.slow
def test_compiled_code_has_the_values_and_gradients_of_the_plain_functions() -> None:
    """By inductor and the C++ compiler, with numbers of rows that change, 0 and 1 among them."""
    if probe_host().compiler is None:
        pytest.skip("needs a compiler")
    compiled, generator = compile_regions(MOE_IN_TORCH), torch.Generator().manual_seed(0)
    for num_rows in (50, 37, 1, 0):
        gate_up = torch.randn(num_rows, 32, generator=generator).bfloat16().requires_grad_()
        weight = torch.rand(num_rows, generator=generator).requires_grad_()
        found = []
        for activation in (compiled.weighted_activation, weighted_activation):
            out = activation(gate_up, weight, "swiglu")
            found.append((out, *torch.autograd.grad(out, (gate_up, weight), torch.ones_like(out))))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
        experts = torch.randint(8, (num_rows, 2), generator=generator)
        ours_order, their_order = region(send_order)(experts, 8), send_order(experts, 8)
        assert torch.equal(ours_order.assignment_N, their_order.assignment_N)
        assert all(map(torch.equal, ours_order.sent, their_order.sent))
    logits = torch.randn(40, 8, generator=generator).requires_grad_()
    for router in (RouterConfig(normalize=True), replace(SIGMOID, expert_bias=False)):
        results = [route(logits, None, router, 2) for route in (compiled.route, MOE_IN_TORCH.route)]
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1])
        torch.testing.assert_close(*(torch.autograd.grad(p.square().sum(), logits)[0] for _, p in results))
    assert compiled.balance_term is not None
    terms = [term(logits, torch.arange(8), "softmax", None) for term in (compiled.balance_term, balance_term)]
    torch.testing.assert_close(*terms)
    torch.testing.assert_close(*(torch.autograd.grad(term, logits)[0] for term in terms))


def test_a_graph_break_is_an_error() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(Unsupported):
        Region(broken, backend="eager")(torch.ones(3))


def test_fake_tensors_take_the_plain_function() -> None:
    called: list[str] = []

    def plain(x: Tensor) -> Tensor:
        called.append("plain")
        return x + 1

    made = Region(plain, backend="eager")
    made.compiled = lambda x: pytest.fail("compiled")
    with FakeTensorMode():
        assert made(torch.ones(3)).shape == (3,) and called == ["plain"]


def test_the_config_names_it_and_a_machine_without_a_compiler_refuses() -> None:
    host = probe_host()
    with pytest.raises(BackendError, match=r"kernels\.compile: regions needs a C\+\+ compiler"):
        require_compiler("cpu", replace(host, compiler=None))
    with pytest.raises(BackendError, match="needs triton"):
        require_compiler("cuda", replace(host, packages={}))
    plain, compiled = (
        kernels_for(RunConfig(model=MODEL, kernels=KernelsConfig("sequential", compile=choice)), "cpu")
        for choice in ("none", "regions")
    )
    assert plain.weighted_activation is MOE_IN_TORCH.weighted_activation and plain.balance_term is None
    assert isinstance(compiled.route, Region) and compiled.weighted_activation.plain is weighted_activation_reference
