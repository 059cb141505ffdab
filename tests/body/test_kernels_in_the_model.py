"""A whole model on interpreted kernels has the loss and the gradients of the same model in torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.model_inputs import batch_of, fill

from moefold.attention.core import LocalCore
from moefold.attention.varlen import VarlenAttention
from moefold.attention.varlen_triton import TritonAttention
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels, triton_kernels
from moefold.moe.routing_policies import RoundRobinRouting
from moefold.ops.backends import JOBS
from moefold.ops.kernels.interpret import interpreting

MODEL = ModelConfig(
    vocab_size=50,
    dim=24,
    num_layers=2,
    num_dense_layers=1,
    dense_hidden_dim=40,
    attention=GQAConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm="head"),
    moe=MoEConfig(num_experts=6, top_k=2, expert_hidden_dim=16, router=RouterConfig(normalize=True)),
)
GROUPS = RouterConfig(
    score="sigmoid", normalize=True, scale=2.5, num_groups=3, top_groups=2, group_score="topk_sum", expert_bias=True
)
LATENT = replace(
    MODEL,
    attention=MLAConfig(num_heads=3, q_latent=10, kv_latent=7, nope_dim=6, rope_dim=4, value_dim=5),
    moe=MoEConfig(
        num_experts=6,
        top_k=3,
        expert_hidden_dim=16,
        router=GROUPS,
        balance=BalanceConfig(microbatch=0.1),
        shared_hidden_dim=8,
    ),
)
MODELS = {"grouped queries": MODEL, "latent attention": LATENT}


def loss_and_gradients(
    model: ModelConfig, kernels: MoEKernels, attention: VarlenAttention | None = None
) -> dict[str, Tensor]:
    interfaces = replace(local_interfaces("sequential", kernels), core=LocalCore(attention))
    decoder = build_decoder(model, torch.float32, interfaces)
    fill(decoder)
    output = decoder(batch_of(2, 7, 50), None)
    loss = output.loss_sum + sum(sum(report.losses) for _, report in output.reports)
    loss.backward()
    return {"loss": loss.detach(), **{name: value.grad for name, value in decoder.named_parameters()}}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_kernels_compute_what_torch_computes(model: ModelConfig) -> None:
    with interpreting():
        found = loss_and_gradients(model, triton_kernels(), TritonAttention())
    wanted = loss_and_gradients(model, MOE_IN_TORCH)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5, msg=lambda words, name=name: f"{name}: {words}"
        )


def test_every_kernel_is_called() -> None:
    called: set[str] = set()

    def noted(job: str) -> object:
        kernel = getattr(MOE_IN_TORCH, job)

        def note(*args: object, **kwargs: object) -> object:
            called.add(job)
            return kernel(*args, **kwargs)

        return note

    kernels = MoEKernels(**{job: noted(job) for job in JOBS})  # type: ignore[arg-type]
    for model in MODELS.values():
        loss_and_gradients(model, kernels)
    assert called == {*JOBS}


def test_recorded_choices_are_played_back_all_the_same() -> None:
    """A selector that is not the config's own decides, kernel or not."""
    interfaces = local_interfaces("sequential", triton_kernels())
    assert build_decoder(MODEL, torch.float32, interfaces).routers()[0].route is not None
    other = replace(interfaces, routing_policy=lambda moe: RoundRobinRouting(moe))
    assert build_decoder(MODEL, torch.float32, other).routers()[0].route is None
