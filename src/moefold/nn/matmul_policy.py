"""How a weight multiplies its input: the interface behind every large matmul of the model.

The weight is stored in its own dtype; the matmul is computed in the dtype of the input, or in the narrow formats of a
precision recipe (`precision/operands.py`). The matmuls themselves are those of `matmul_kernels.py`.

``ParameterMatmul`` saves the parameter and the input, and casts the weight again in backward: autograd would save the
cast, one more copy of all weights for every microbatch in flight. Its backward has two halves. The gradient of the
input is computed at once, because the previous stage waits for it; the gradient of the weight may be deferred until the
schedule has a gap (``WeightGradQueue``). Both halves together execute exactly the matmuls of the whole, and what they
need is kept by reference, so a recomputed input is recomputed once.

Where gradients are collected in one wide buffer (flat sharding), a weight gradient is added to it as it is computed
(``accumulate_weight_grad``, gradient accumulation fusion), and autograd gets none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moefold.nn.float32_matmul import grouped_in_float32, linear_in_float32
from moefold.nn.matmul_kernels import (
    LINEAR_KERNELS,
    TORCH_LINEAR,
    GroupedKernels,
    GroupedMaker,
    GroupedMatmul,
    LinearKernels,
    grouped_kernels,
)
from moefold.ops.engines import load_engine
from moefold.precision.operands import WIDE, Operands, WgradAmaxes


class MatmulPolicy(Protocol):
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x W^T, where all but the last dim of the weight are rows of W."""
        ...

    def grouped(
        self, matmul: GroupedMatmul, rows: Tensor, weight: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
    ) -> Tensor:
        """The same for rows sorted by expert, each with its own expert's weight, the first dim of ``weight``."""
        ...


# Computes one weight's gradient, in the shape of the weight; None if it has added it to ``weight.grad`` itself.
Gradient = Callable[[], Tensor | None]


class WeightGradQueue:
    """Deferred weight gradients, in the order in which their inputs' gradients were computed.

    Outside of ``deferring`` nothing is deferred; gradients go to autograd as usual.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[object, nn.Parameter, Gradient]] = deque()
        self._key: object | None = None

    @contextmanager
    def deferring(self, key: object) -> Iterator[None]:
        """Inside, weight gradients wait under this key."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    @property
    def active(self) -> bool:
        return self._key is not None

    def put(self, weight: nn.Parameter, gradient: Gradient) -> None:
        self._waiting.append((self._key, weight, gradient))

    @torch.no_grad()
    def run_one(self) -> bool:
        """Compute the oldest one; False if none waits. Always the oldest, so that sums have one order.

        Outside of autograd, also the computing itself: a gradient must not keep alive what it was computed from.
        """
        if not self._waiting:
            return False
        _, weight, gradient = self._waiting.popleft()
        _accumulate(weight, gradient())
        return True

    def run_until(self, key: object) -> None:
        """Compute the oldest ones until none of this key waits."""
        while any(waiting == key for waiting, _, _ in self._waiting):
            self.run_one()

    def run_for(self, weights: Iterable[nn.Parameter]) -> None:
        """Compute the oldest ones until none of these weights waits."""
        wanted = {id(weight) for weight in weights}
        while any(id(weight) in wanted for _, weight, _ in self._waiting):
            self.run_one()

    def run_all(self) -> None:
        while self.run_one():
            pass

    @property
    def is_empty(self) -> bool:
        return not self._waiting


def _accumulate(weight: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    if weight.grad is None:
        # A leaf may collect its gradient in another dtype than its own, as FSDP's gathered parameters do.
        weight.grad = gradient.to(weight.grad_dtype or weight.dtype)
    else:
        weight.grad.add_(gradient)


def accumulate_weight_grad(weight: nn.Parameter, grad: Tensor, x: Tensor, kernels: LinearKernels) -> None:
    """``weight.grad += grad^T x``, into a gradient that may be wider than the product. Operands are the kernels'.

    On GPUs torch's GEMM adds to its output in float32, so that neither a product nor a cast of it is stored. On CPUs
    the product is rounded to its own dtype first and cast entry by entry as it is added: the bits of the usual way.
    """
    assert weight.grad is not None
    wide = weight.grad.dtype == torch.float32
    if kernels is TORCH_LINEAR and grad.is_cuda and grad.dtype in (torch.bfloat16, torch.float16) and wide:
        out_YX = weight.grad.view(-1, weight.shape[-1])
        rows = grad.flatten(0, -2).t(), x.flatten(0, -2)
        torch.ops.aten.addmm.dtype_out(out_YX, *rows, torch.float32, out=out_YX)
    else:
        weight.grad.add_(kernels.weight_grad(grad, x).view(weight.shape))


class ParameterMatmul:
    """``weight_grads``: where a schedule defers weight gradients to. ``in_place``: a weight that has a gradient already
    is added to at once, and not by autograd, whose hooks for accumulated gradients do not run then. ``operands``: what
    the matmuls get of inputs, gradients and weights. ``grouped``: makes the matmuls of experts of their grouped GEMM.
    """

    def __init__(
        self,
        weight_grads: WeightGradQueue | None = None,
        linear: LinearKernels = TORCH_LINEAR,
        in_place: bool = False,
        operands: Operands = WIDE,
        grouped: GroupedMaker = grouped_kernels,
    ) -> None:
        self.weight_grads, self.kernels, self.in_place, self.operands = weight_grads, linear, in_place, operands
        self.grouped_kernels = grouped

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        kept: Tensor = _Keep.apply(x, weight, *self._saved(x, weight, None))
        # Of x itself and not of its view: narrow copies are found by the tensor.
        fprop = partial(self.operands.fprop, x, weight)
        return _Linear.apply(kept, weight, kept.grad_fn, x.requires_grad, self, fprop)

    def grouped(
        self, matmul: GroupedMatmul, rows: Tensor, weight: Tensor, rows_per_expert_e: Tensor, host: list[int] | None
    ) -> Tensor:
        # Where blocks, scales and padding follow the rows of an expert, the host must know them.
        host = rows_per_expert_e.tolist() if host is None and self.operands is not WIDE else host
        kept: Tensor = _Keep.apply(rows, weight, *self._saved(rows, weight, host))
        fprop = partial(self.operands.fprop, rows, weight, host)
        kernels = self.grouped_kernels(matmul, rows_per_expert_e, host)
        return _Grouped.apply(kept, weight, kept.grad_fn, rows.requires_grad, host, kernels, self, fprop)

    def _saved(self, x: Tensor, weight: Tensor, rows_per_expert: list[int] | None) -> tuple[Tensor, ...]:
        """A frozen weight has no gradient, for which alone the input is needed."""
        if not weight.requires_grad or not torch.is_grad_enabled():
            return ()
        return self.operands.keep(x, rows_per_expert)

    def with_operands(self, operands: Operands) -> ParameterMatmul:
        """The same for a module whose matmuls have other operands."""
        return ParameterMatmul(self.weight_grads, self.kernels, self.in_place, operands, self.grouped_kernels)

    def with_kernels(self, linear: LinearKernels, grouped: GroupedMaker) -> ParameterMatmul:
        return ParameterMatmul(self.weight_grads, linear, self.in_place, self.operands, grouped)

    def adds_to(self, weight: Tensor) -> bool:
        """Whether a gradient of this weight is added in place."""
        return self.in_place and weight.is_leaf and weight.grad is not None


class _Keep(torch.autograd.Function):
    """Saves what ``Operands.keep`` gave of a matmul's input for its backward, before the matmul is computed.

    An autograd function's tensors are saved after its forward has run. Recomputation stops once it has every saved
    tensor, so with the input saved first it does not recompute the last matmul of a phase, which nothing needs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *saved: Tensor) -> Tensor:
        # With the weight as an input there is a backward also where the input needs no gradient.
        ctx.save_for_backward(*saved)
        ctx.num_saved = len(saved)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *[None] * ctx.num_saved


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        keeper: Any,
        passes_on: bool,
        policy: ParameterMatmul,
        fprop: Callable[[], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """``keeper`` saved the input for the backward; ``passes_on`` says whether the input needs a gradient; ``fprop``
        gives the operands.

        The weight is kept as an attribute and not as a saved tensor: FSDP frees and gathers it again between forward
        and backward, and gradients accumulate on this object.
        """
        ctx.weight, ctx.keeper, ctx.passes_on, ctx.policy = weight, keeper, passes_on, policy
        x_in, weight_in = fprop()
        y = policy.kernels.forward(x_in, weight_in).to(x.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, policy = ctx.keeper.saved_tensors, ctx.weight, ctx.policy
        kernels: LinearKernels = policy.kernels

        def weight_gradient(amaxes: WgradAmaxes) -> Tensor | None:
            grad_in, x_in, _ = policy.operands.wgrad(grad, kept, amaxes)
            if not policy.adds_to(weight):
                return kernels.weight_grad(grad_in, x_in).view(weight.shape)
            accumulate_weight_grad(weight, grad_in, x_in, kernels)
            return None

        dx = None
        if ctx.passes_on:
            grad_in, weight_in = policy.operands.dgrad(grad, weight)
            dx = kernels.input_grad(grad_in, weight_in).to(grad.dtype)
            dx = dx.view(*grad.shape[:-1], dx.shape[-1])
        return dx, _now_or_later(ctx, weight, (grad, kept, None), weight_gradient), *[None] * 4


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        keeper: Any,
        passes_on: bool,
        host: list[int] | None,
        kernels: GroupedKernels,
        policy: ParameterMatmul,
        fprop: Callable[[], tuple[Tensor, Tensor]],
    ) -> Tensor:
        ctx.weight, ctx.keeper, ctx.passes_on = weight, keeper, passes_on
        ctx.host, ctx.kernels, ctx.policy = host, kernels, policy
        return kernels.forward(*fprop()).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, host, policy = ctx.keeper.saved_tensors, ctx.weight, ctx.host, ctx.policy
        kernels: GroupedKernels = ctx.kernels
        grad = grad.contiguous()

        def weight_gradient(amaxes: WgradAmaxes) -> Tensor | None:
            grad_in, rows_in, padded = policy.operands.wgrad(grad, kept, amaxes, host)
            gradient = kernels.weight_grad(grad_in, rows_in, None if padded == host else padded).view(weight.shape)
            if not policy.adds_to(weight):
                return gradient
            weight.grad.add_(gradient)
            return None

        drows = None
        if ctx.passes_on:
            drows = kernels.input_grad(*policy.operands.dgrad(grad, weight, host)).to(grad.dtype)
        return drows, _now_or_later(ctx, weight, (grad, kept, host), weight_gradient), *[None] * 6


def _now_or_later(
    ctx: Any,
    weight: nn.Parameter,
    read: tuple[Tensor, tuple[Tensor, ...], list[int] | None],
    gradient_from: Callable[[WgradAmaxes], Tensor | None],
) -> Tensor | None:
    """``read``: what the weight gradient is computed from. Ranks compare amaxes of it now, also where it is deferred:
    later they would do so at different places among their other collectives."""
    if not ctx.needs_input_grad[1]:
        return None
    gradient = partial(gradient_from, ctx.policy.operands.wgrad_amaxes(*read))
    weight_grads: WeightGradQueue | None = ctx.policy.weight_grads
    # A clone's weight is no leaf: its gradient goes home through autograd, with this backward.
    if weight_grads is not None and weight_grads.active and weight.is_leaf:
        weight_grads.put(weight, gradient)
        return None
    return gradient()


def matmul_policy_named(
    linear: str, weight_grads: WeightGradQueue | None = None, in_place: bool = False, cpu_matmul: str = "compute"
) -> MatmulPolicy:
    """With the kernels of ``kernels.linear``, on CPUs as ``kernels.cpu_matmul`` says; ``weight_grads`` is where a
    schedule defers weight gradients to."""
    if linear != "torch":
        # A missing or wrong version stops the run here, and not in its first step.
        load_engine("transformer_engine_gemm")
    policy = ParameterMatmul(weight_grads, LINEAR_KERNELS[linear], in_place)
    if cpu_matmul == "compute":
        return policy
    return policy.with_kernels(linear_in_float32(policy.kernels), grouped_in_float32)
