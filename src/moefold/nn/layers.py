"""Linear layers in the dtype of their input, RMSNorm over whole rows and over rows sharded by heads, and the dense
gated feed-forward (a layer's own, or the shared expert).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from moefold.config.memory import RetainedStep
from moefold.config.model import NormScale
from moefold.nn.batch import Batch
from moefold.nn.low_rank import add_low_rank
from moefold.nn.matmul_policy import MatmulPolicy
from moefold.nn.parallel_interfaces import TokenSharding
from moefold.nn.step_retention import KEEP_ALL, Retention
from moefold.ops.backends import IN_TORCH, Kernels
from moefold.ops.fp32_linear import upcast
from moefold.ops.rmsnorm import rms_norm, rms_norm_spread


class Linear(nn.Module):
    """y = x W^T + b. Values are set later, as a function of the parameter's name, so none are drawn here."""

    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None
    lora_scale = 1.0

    def __init__(self, in_dim: int, out_dim: int, matmul_policy: MatmulPolicy, bias: bool = False) -> None:
        super().__init__()
        self.matmul_policy = matmul_policy
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.empty(out_dim)) if bias else None
        # Set where the run has adapters (`nn/low_rank.py`).
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.add_bias(self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """Without the bias, for partial sums: a bias must be added once, after the ranks' partial sums are summed."""
        y = self.matmul_policy.linear(x, self.weight)
        return add_low_rank(y, x, self.lora_a, self.lora_b, self.lora_scale, self.matmul_policy)

    def add_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RMSNorm(nn.Module):
    """``scale``: what rows are multiplied by after the division, `model.norm_scale`."""

    def __init__(
        self,
        dim: int,
        eps: float,
        norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
        scale: NormScale = "weight",
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.norm = norm
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, scaled_by(self.weight, self.scale), self.eps)


def scaled_by(weight_Y: Tensor, scale: NormScale) -> Tensor:
    """1 + w is added in at least float32: in bfloat16 it would have no digits for a weight below 1/256."""
    return weight_Y if scale == "weight" else 1.0 + upcast(weight_Y)


class UnitRMSNorm(nn.Module):
    """Without a weight."""

    def __init__(self, dim: int, eps: float, norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm) -> None:
        super().__init__()
        self.dim, self.eps, self.norm = dim, eps, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, x.new_ones(self.dim), self.eps)


class SpreadRMSNorm(nn.Module):
    """Over all heads at once: this rank holds some of them, and the mean is over all of them."""

    def __init__(self, dim: int, eps: float, tokens: TokenSharding, scale: NormScale = "weight") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.full_dim = dim
        self.scale = scale
        self.tokens = tokens

    def forward(self, x_SX: Tensor) -> Tensor:
        return rms_norm_spread(x_SX, scaled_by(self.weight, self.scale), self.eps, self.full_dim, self.tokens.sum_heads)


class FeedForward(nn.Module):
    """Gate and up are stacked, [2, F, D], so that a shard over the hidden dim has both of its columns."""

    gate_up_lora_a: nn.Parameter | None
    gate_up_lora_b: nn.Parameter | None
    down_lora_a: nn.Parameter | None
    down_lora_b: nn.Parameter | None
    lora_scale = 1.0

    def __init__(
        self,
        dim: int,
        hidden: int,
        activation: str,
        tokens: TokenSharding,
        matmul_policy: MatmulPolicy,
        kernels: Kernels = IN_TORCH,
        step: RetainedStep = "dense",
        retain: Retention = KEEP_ALL,
    ) -> None:
        """``step``: which step of a block this is, for ``retain``."""
        super().__init__()
        self.step, self.retain = step, retain
        self.gate_up = nn.Parameter(torch.empty(2, hidden, dim))
        self.down = nn.Parameter(torch.empty(dim, hidden))
        for name in ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b"):
            self.register_parameter(name, None)
        self.activation = activation
        self.kernels = kernels
        self.tokens = tokens
        # Each weight's own, which may differ in their casts.
        self.matmul_policy = self.down_matmul_policy = matmul_policy

    def forward(self, x_tD: Tensor, batch: Batch) -> Tensor:
        return self.from_hidden(self._arriving(x_tD, batch), batch)

    def to_hidden(self, x_tD: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Hidden activations of all tokens, chunk by chunk (``TokenSharding.gather_chunks``)."""
        return tuple(self._arriving(x_tD, batch))

    def from_hidden(self, hidden_SF: Iterable[Tensor], batch: Batch) -> Tensor:
        return self.tokens.reduce_chunks(map(self._partial, hidden_SF), batch)

    def _arriving(self, x_tD: Tensor, batch: Batch) -> Iterator[Tensor]:
        for (x_SD,) in self.tokens.gather_chunks(batch, x_tD):
            yield self.retain.step(self.step, self._hidden, self.retain.received("feed_norm", x_SD))

    def _partial(self, hidden_SF: Tensor) -> Tensor:
        out_SD = self.down_matmul_policy.linear(hidden_SF, self.down)
        adapter = (self.down_lora_a, self.down_lora_b, self.lora_scale)
        return add_low_rank(out_SD, hidden_SF, *adapter, self.down_matmul_policy)

    def _hidden(self, x_SD: Tensor) -> Tensor:
        gate_up_SG = self.matmul_policy.linear(x_SD, self.gate_up)
        adapter = (self.gate_up_lora_a, self.gate_up_lora_b, self.lora_scale)
        gate_up_SG = self.retain.received(self.step, add_low_rank(gate_up_SG, x_SD, *adapter, self.matmul_policy))
        return self.kernels.weighted_activation(gate_up_SG, None, self.activation)
