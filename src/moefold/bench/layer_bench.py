"""`moefold bench layer`: one MoE layer, forward and backward, beside dense matmuls of the same FLOPs.

N rows, D model dim, F expert hidden dim.

A layer cannot be faster than its matmuls. The lower bound sends all T*K rows through one expert: the same FLOPs in as
few and as large GEMMs as possible, into buffers that are allocated before, without an activation, a router, a permute
or autograd. Layer and lower bound take turns, round after round, and their ratio is taken per round, because a
machine's speed drifts.
"""

from __future__ import annotations

from math import inf
from typing import Literal

import torch
from torch import Tensor

from moefold.bench.clock import Progress, Timing, alternate
from moefold.bench.layer_workload import (
    DTYPES,
    LayerShape,
    Weights,
    draw_input,
    draw_output_grad,
    draw_weights,
)
from moefold.blueprint.stage_modules import Parts
from moefold.checks.kernels import experts_in_use
from moefold.config.loading import override
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.config.run import RunConfig
from moefold.model.build import ParallelInterfaces, build_decoder, local_interfaces
from moefold.moe.layer import MoELayer
from moefold.moe.moe_kernels import kernels_named
from moefold.nn.batch import Batch, whole_batch
from moefold.nn.float32_matmul import cpu_matmul_here

# The first layer of a model and nothing else of it.
_FIRST_LAYER = Parts(embedding=False, layers=(0,), mtp=(), final_norm=False, mtp_norms=(), loss=False)
LAYER, DENSE = "moefold", "dense matmuls"


class DenseMatmuls:
    """Gate, up and down of one expert over ``rows`` rows, forward and backward: nine matmuls."""

    def __init__(self, rows: int, shape: LayerShape, dtype: torch.dtype, device: str = "cpu") -> None:
        def draw(*sizes: int) -> Tensor:
            return (torch.randn(*sizes) / sizes[-1] ** 0.5).to(device, dtype)

        D, hidden = shape.dim, shape.hidden
        self.x_ND, self.dy_ND = draw(rows, D), draw(rows, D)
        self.gate_DF, self.up_DF, self.down_FD = draw(D, hidden), draw(D, hidden), draw(hidden, D)
        self.h_gate_NF, self.h_up_NF, self.d_hidden_NF = draw(rows, hidden), draw(rows, hidden), draw(rows, hidden)
        self.y_ND, self.dx_ND = draw(rows, D), draw(rows, D)
        self.d_gate_DF, self.d_up_DF, self.d_down_FD = draw(D, hidden), draw(D, hidden), draw(hidden, D)

    @classmethod
    def of_layer(cls, shape: LayerShape, dtype: torch.dtype, device: str = "cpu") -> DenseMatmuls:
        """All rows of the routed experts; the shared expert counts as further rows."""
        return cls(shape.rows + shape.tokens * shape.shared // shape.hidden, shape, dtype, device)

    def run(self) -> None:
        torch.mm(self.x_ND, self.gate_DF, out=self.h_gate_NF)
        torch.mm(self.x_ND, self.up_DF, out=self.h_up_NF)
        torch.mm(self.h_gate_NF, self.down_FD, out=self.y_ND)
        torch.mm(self.dy_ND, self.down_FD.t(), out=self.d_hidden_NF)
        torch.mm(self.h_gate_NF.t(), self.dy_ND, out=self.d_down_FD)
        torch.mm(self.d_hidden_NF, self.gate_DF.t(), out=self.dx_ND)
        torch.mm(self.d_hidden_NF, self.up_DF.t(), out=self.dx_ND)
        torch.mm(self.x_ND.t(), self.d_hidden_NF, out=self.d_gate_DF)
        torch.mm(self.x_ND.t(), self.d_hidden_NF, out=self.d_up_DF)


def bench_layer(
    shape: LayerShape,
    dtype: str,
    rounds: int,
    warm: int,
    progress: Progress | None = None,
    device: str = "cpu",
    budget: float = inf,
) -> dict[str, Timing]:
    """Every round has new tokens, so that the routing changes as in training."""
    torch_dtype = DTYPES[dtype]
    dense = DenseMatmuls.of_layer(shape, multiplied_dtype(dtype, device), device)
    weights = draw_weights(shape, torch_dtype)
    layer = filled_layer(shape, weights, interfaces_for(dtype, device)).to(device)
    batch, dy_TD = batch_of(shape.tokens, device), draw_output_grad(shape, torch_dtype).to(device)

    def prepare(seed: int) -> Tensor:
        layer.zero_grad()
        return draw_input(shape, torch_dtype, seed).to(device).requires_grad_()

    trials = {
        LAYER: (prepare, lambda x_TD: layer(x_TD, batch, None)[0].backward(dy_TD)),
        DENSE: (lambda seed: None, lambda nothing: dense.run()),
    }
    return alternate(trials, rounds, warm, "rounds", progress, device, budget)


def cpu_matmul_of(dtype: str, device: str) -> Literal["compute", "float32"]:
    """How matmuls of this format are computed here in training (``kernels.cpu_matmul: auto``)."""
    run: RunConfig = override(RunConfig(), {"precision.compute": dtype})
    return cpu_matmul_here(run, device)


def multiplied_dtype(dtype: str, device: str) -> torch.dtype:
    return torch.float32 if cpu_matmul_of(dtype, device) == "float32" else DTYPES[dtype]


def interfaces_for(dtype: str, device: str) -> ParallelInterfaces:
    """The fastest kernels of a CPU; on a GPU torch's, and the experts that `auto` stands for."""
    if device == "cpu":
        return local_interfaces("fused", kernels_named("native", "cpu"), cpu_matmul=cpu_matmul_of(dtype, device))
    run: RunConfig = override(RunConfig(), {"precision.compute": dtype, "kernels.experts": "auto"})
    return local_interfaces(experts_in_use(run, device), kernels_named("torch", device, dtype))


def filled_layer(shape: LayerShape, weights: Weights, seams: ParallelInterfaces) -> MoELayer:
    """moefold's layer with these weights, built as a model builds it; all experts are on this rank."""
    dtype = weights.gate_EDF.dtype
    model = ModelConfig(dim=shape.dim, num_layers=1, moe=moe_config(shape))
    layer = build_decoder(model, dtype, seams, _FIRST_LAYER).layers["0"].feed_forward
    assert isinstance(layer, MoELayer)
    layer.to(dtype).train()
    copy_weight(layer.router.weight, weights.router_DE.t())
    copy_weight(layer.experts.gate_up, torch.stack((weights.gate_EDF.mT, weights.up_EDF.mT), dim=1))
    copy_weight(layer.experts.down, weights.down_EFD.mT)
    if layer.shared is not None and weights.shared is not None:
        copy_weight(layer.shared.gate_up, torch.stack((weights.shared.gate_DS.t(), weights.shared.up_DS.t())))
        copy_weight(layer.shared.down, weights.shared.down_SD.t())
    return layer


def moe_config(shape: LayerShape) -> MoEConfig:
    return MoEConfig(
        num_experts=shape.experts,
        top_k=shape.top_k,
        expert_hidden_dim=shape.hidden,
        router=RouterConfig(normalize=True),
        shared_hidden_dim=shape.shared,
    )


def batch_of(tokens: int, device: str = "cpu") -> Batch:
    """One document; a MoE layer reads nothing of it but its sizes."""
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    return whole_batch(ids, ids, (tokens,), step_labels=tokens, step_tokens=tokens, step_sequences=1)


@torch.no_grad()
def copy_weight(parameter: Tensor, value: Tensor) -> None:
    """`copy_` that refuses to broadcast."""
    assert parameter.shape == value.shape, f"{tuple(value.shape)} for a parameter of {tuple(parameter.shape)}"
    parameter.copy_(value)
