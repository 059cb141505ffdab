"""A matmul that saves the parameter itself has the bits of autograd's; so has a backward cut in two, with as many
matmuls, and a gradient that is added in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.autograd_matmul import AutogradMatmul, matmuls_by_autograd
from tests.peak_memory import PeakMemory
from tests.staged_runs import EXACT, MODEL, microbatches, share_on, staged_run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moefold.attention.gqa import GroupedQueryAttention
from moefold.attention.mla import LatentAttention
from moefold.config.attention import GQAConfig, MLAConfig
from moefold.config.precision import PrecisionConfig
from moefold.moe.experts import Experts
from moefold.moe.router import Router
from moefold.nn.layers import FeedForward
from moefold.nn.matmul_kernels import GROUPED_MATMULS
from moefold.nn.matmul_policy import MatmulPolicy, ParameterMatmul, WeightGradQueue
from moefold.parallel.parallelize import LocalModel
from moefold.pipeline.pipeline_state import objective_of
from moefold.pipeline.runtime import run_schedule

EVERYTHING = ("attention", "feed_forward", "experts")
ATTENTIONS = {"gqa": GQAConfig(qk_norm="head", qkv_bias=True), "mla": MLAConfig()}
# Four microbatches: one token, several documents, one document, the same once more.
SHAPES = ((7,), (5, 1, 4), (1,), (5, 1, 4))
NUM_MIXTURES = 2


class _Gemms(TorchDispatchMode):
    """Counts the matmuls that are executed."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in self.NAMES:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


def gemms_of(work: Callable[[], object]) -> Counter[str]:
    with _Gemms() as gemms:
        work()
    return gemms.seen


# ---- one product ----


def _linear(matmul_policy: MatmulPolicy, backend: str, x: Tensor, weight: Tensor) -> Tensor:
    return matmul_policy.linear(x, weight)


def _grouped(
    rows_per_expert: list[int], matmul_policy: MatmulPolicy, backend: str, x: Tensor, weight: Tensor
) -> Tensor:
    return matmul_policy.grouped(GROUPED_MATMULS[backend], x, weight, torch.tensor(rows_per_expert), rows_per_expert)


CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (_linear, (7, 8), (16, 8)),
    "stacked weight": (_linear, (7, 8), (2, 16, 8)),
    "no rows": (_linear, (0, 8), (16, 8)),
    "grouped": (lambda *given: _grouped([3, 0, 4], *given), (7, 8), (3, 16, 8)),
    "stacked and grouped": (lambda *given: _grouped([3, 0, 4], *given), (7, 8), (3, 2, 16, 8)),
    "grouped, no rows": (lambda *given: _grouped([0, 0, 0], *given), (0, 8), (3, 16, 8)),
}
BACKENDS_AND_FORMATS = [
    ("sequential", torch.float64, torch.float64),
    ("sequential", torch.float32, torch.bfloat16),
    ("grouped", torch.float32, torch.float32),
    ("grouped", torch.float32, torch.bfloat16),
]


def _leaves(case: str, params: torch.dtype, compute: torch.dtype) -> tuple[Tensor, nn.Parameter]:
    _, x_shape, weight_shape = CASES[case]
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(x_shape, generator=generator, dtype=torch.float64).to(compute).requires_grad_()
    weight = nn.Parameter(torch.randn(weight_shape, generator=generator, dtype=torch.float64).to(params))
    return x, weight


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "params", "compute"), BACKENDS_AND_FORMATS)
@pytest.mark.parametrize("put_off", [False, True])
def test_a_matmul_has_the_bits_of_its_reference(
    case: str, backend: str, params: torch.dtype, compute: torch.dtype, put_off: bool
) -> None:
    times = CASES[case][0]
    results = []
    for weight_grads in (None, WeightGradQueue()):
        x, weight = _leaves(case, params, compute)
        policy = AutogradMatmul() if weight_grads is None else ParameterMatmul(weight_grads)
        for factor in (1.0, 3.0):  # twice: gradients add up
            y = times(policy, backend, x, weight)
            with weight_grads.deferring(factor) if weight_grads is not None and put_off else nullcontext():
                y.backward(torch.full_like(y, factor))
            if weight_grads is not None:
                assert weight_grads.is_empty is not put_off
                weight_grads.run_until(factor)
                assert weight_grads.is_empty
        assert weight.grad is not None and weight.grad.dtype == params
        results.append((y, x.grad, weight.grad))
    for got, want in zip(*results):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "params", "compute"), BACKENDS_AND_FORMATS)
@pytest.mark.parametrize("put_off", [False, True])
def test_a_gradient_that_is_added_in_place_has_the_bits_of_autograd(
    case: str, backend: str, params: torch.dtype, compute: torch.dtype, put_off: bool
) -> None:
    """Into views of one buffer that is as wide as the parameters or wider, on weights of the compute dtype too."""
    times = CASES[case][0]
    for stored in (params, compute):
        found = []
        for policy in (AutogradMatmul(), ParameterMatmul(WeightGradQueue(), in_place=True)):
            x, weight = _leaves(case, stored, compute)
            weight.grad_dtype = params
            buffer = torch.zeros(2, weight.numel(), dtype=params)
            view = weight.grad = buffer[1].view_as(weight)
            for factor in (1.0, 3.0):
                y = times(policy, backend, x, weight)
                waits = isinstance(policy, ParameterMatmul) and put_off
                with policy.weight_grads.deferring(factor) if waits else nullcontext():
                    y.backward(torch.full_like(y, factor))
                if waits:
                    policy.weight_grads.run_until(factor)
            assert weight.grad is view and not buffer[0].any()
            found.append((x.grad, buffer))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_gradient_in_place_needs_no_wide_copy() -> None:
    """A bfloat16 weight whose gradient is collected in float32: beside the product there is no cast of it."""
    x, weight = torch.ones(2, 64, dtype=torch.bfloat16), nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    peaks = []
    for in_place in (True, False):
        weight.grad = torch.zeros(64, 64)
        y = ParameterMatmul(in_place=in_place).linear(x, weight)
        with PeakMemory() as memory:
            y.sum().backward()
        peaks.append(memory.peak)
    product, buffer = 64 * 64 * 2, 64 * 64 * 4
    assert peaks[0] < product + buffer + 64 < peaks[1]


@pytest.mark.parametrize("case", ["linear", "stacked weight", "grouped"])
def test_no_cast_of_a_weight_is_saved(case: str) -> None:
    x, weight = _leaves(case, torch.float32, torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
        CASES[case][0](ParameterMatmul(), "sequential", x, weight)
    kept = {tensor.untyped_storage()._cdata for tensor in saved if tensor.is_floating_point()}
    assert kept == {x.untyped_storage()._cdata}


def test_what_needs_no_gradient_gets_no_matmul() -> None:
    for backend, case in (("sequential", "linear"), ("grouped", "grouped")):
        times = CASES[case][0]
        for x_counts, weight_counts in ((True, False), (False, True), (True, True)):
            weight_grads = WeightGradQueue()
            x, weight = _leaves(case, torch.float32, torch.float32)
            x.requires_grad_(x_counts)
            weight.requires_grad_(weight_counts)
            y = times(ParameterMatmul(weight_grads), backend, x, weight)
            with weight_grads.deferring("later"):
                assert sum(gemms_of(lambda y=y: y.sum().backward()).values()) == x_counts
            assert (
                sum(gemms_of(lambda weight_grads=weight_grads: weight_grads.run_until("later")).values())
                == weight_counts
            )
            assert (x.grad is not None, weight.grad is not None) == (x_counts, weight_counts)


def test_without_gradients_nothing_is_kept() -> None:
    for case in ("linear", "grouped"):
        x, weight = _leaves(case, torch.float64, torch.float64)
        with torch.no_grad():
            y = CASES[case][0](ParameterMatmul(WeightGradQueue()), "sequential", x, weight)
        assert y.grad_fn is None


def test_the_oldest_goes_first_whatever_is_asked_for() -> None:
    weight_grads, done = WeightGradQueue(), []
    weight = nn.Parameter(torch.zeros(1))

    def gradient(number: int) -> Callable[[], Tensor]:
        return lambda: (done.append(number), torch.ones(1))[1]

    for number, key in enumerate("aabbc"):
        with weight_grads.deferring(key):
            weight_grads.put(weight, gradient(number))
    weight_grads.run_until("b")
    assert done == [0, 1, 2, 3] and not weight_grads.is_empty
    weight_grads.run_until("b")
    assert weight_grads.run_one() and not weight_grads.run_one()
    assert done == [0, 1, 2, 3, 4] and weight_grads.is_empty
    assert weight.grad is not None and weight.grad.item() == 5


# ---- a whole stage ----

STAGES = [
    pytest.param(
        attention,
        backend,
        recompute,
        id=f"{attention}-{backend}-{'recompute' if recompute else 'kept'}",
        marks=() if (attention == "mla") == (backend == "grouped") == bool(recompute) else pytest.mark.slow,
    )
    for attention in ATTENTIONS
    for backend in GROUPED_MATMULS
    for recompute in ((), EVERYTHING)
]


def _share(
    schedule: str, attention: str, precision: PrecisionConfig, experts: str, recompute: tuple[str, ...]
) -> LocalModel:
    model = replace(MODEL, attention=ATTENTIONS[attention])
    return share_on(staged_run(model, precision, experts, recompute, schedule=schedule))


def _objective(local_model: LocalModel) -> Tensor:
    """Embedding, dense layer, MoE layer, MTP module, losses: all in one stage."""
    (batch,) = microbatches(local_model.run, ((5, 1, 4),))
    objective = objective_of(local_model, local_model.model(batch), batch)
    assert objective is not None
    return objective


def _gradients(local_model: LocalModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in local_model.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("attention", "backend", "recompute"), STAGES)
def test_both_halves_together_execute_the_matmuls_of_the_whole(
    attention: str, backend: str, recompute: tuple[str, ...]
) -> None:
    precision = PrecisionConfig("float32", "float32")
    with matmuls_by_autograd():
        native = _share("1f1b", attention, precision, backend, recompute)
    whole, split = (_share(schedule, attention, precision, backend, recompute) for schedule in ("1f1b", "zb_h1"))
    assert whole.weight_grads is None and split.weight_grads is not None
    expected = gemms_of(_objective(native).backward)
    unsplit = gemms_of(_objective(whole).backward)
    objective = _objective(split)
    with split.weight_grads.deferring("weights"):
        inputs = gemms_of(objective.backward)
    weights = gemms_of(lambda: split.weight_grads.run_until("weights"))
    assert split.weight_grads.is_empty
    assert inputs + weights == unsplit
    assert sum(weights.values()) == num_weight_gradients(split, backend)
    # The plain loop over experts keeps the input of each product just before it, so that a recomputation, which stops
    # at the last thing that was kept, recomputes all but one of an MoE layer's last matmuls. Here it recomputes none.
    spared = NUM_MIXTURES * (4 - 1) if recompute and backend == "sequential" else 0
    assert expected == unsplit + Counter(mm=spared)
    assert_equal_gradients(_gradients(split), _gradients(native))
    assert_equal_gradients(_gradients(whole), _gradients(native))


def num_weight_gradients(local_model: LocalModel, backend: str) -> int:
    """One for each weight that a product takes; one per expert where the loop is plain."""
    single = sum(p.ndim > 1 for name, p in local_model.model.named_parameters() if is_a_product(name))
    return single + 2 * NUM_MIXTURES * ((4 if backend == "sequential" else 1) - 1)


def is_a_product(name: str) -> bool:
    """All matrices but the router's, which is small and scored in float32, and the vocabulary's two."""
    return not name.endswith("router.weight") and name not in ("embedding.weight", "head.weight") and "bias" not in name


def assert_equal_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize(("attention", "backend", "recompute"), STAGES)
def test_a_whole_step_executes_as_many_matmuls_with_its_backwards_split(
    attention: str, backend: str, recompute: tuple[str, ...]
) -> None:
    """zb_h1 on one rank, against 1f1b."""
    precision = PrecisionConfig("float32", "float32")
    with matmuls_by_autograd():
        plain = _share("1f1b", attention, precision, backend, recompute)
    split = _share("zb_h1", attention, precision, backend, recompute)
    batches = microbatches(plain.run, SHAPES)
    sums = []
    expected, found = (
        gemms_of(lambda local_model=local_model: sums.append(run_schedule(local_model, batches)))
        for local_model in (plain, split)
    )
    spared = len(SHAPES) * NUM_MIXTURES * (4 - 1) if recompute and backend == "sequential" else 0
    assert sum(found.values()) == sum(expected.values()) - spared
    assert torch.equal(sums[0].loss, sums[1].loss) and torch.equal(sums[0].counts_ME, sums[1].counts_ME)
    assert_equal_gradients(_gradients(split), _gradients(plain))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("recompute", [(), EVERYTHING])
def test_a_whole_step_has_the_bits_of_autograd_also_in_place(schedule: str, recompute: tuple[str, ...]) -> None:
    """Parameters in float32, matmuls in bfloat16."""
    precision, found = PrecisionConfig("float32", "bfloat16"), []
    for way in ("autograd", "parameter", "in place"):
        with matmuls_by_autograd() if way == "autograd" else nullcontext():
            local = _share("1f1b" if way == "autograd" else schedule, "mla", precision, "sequential", recompute)
        for module in local.model.modules() if way == "in place" else ():
            for owner in (module, getattr(module, "backend", None)):
                if isinstance(getattr(owner, "matmul_policy", None), ParameterMatmul):
                    owner.matmul_policy.in_place = True
        for parameter in local.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        run_schedule(local, microbatches(local.run, SHAPES))
        found.append(_gradients(local))
    assert_equal_gradients(found[1], found[0])
    assert_equal_gradients(found[2], found[0])


@contextmanager
def entries(model: nn.Module) -> Iterator[Counter[str]]:
    """How often each module is entered."""
    seen: Counter[str] = Counter()
    hooks = [
        module.register_forward_pre_hook(lambda module, _, name=name: seen.update([name]))
        for name, module in model.named_modules()
    ]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "1f1b_overlapped"])
def test_a_recomputed_phase_is_computed_once_more_per_microbatch(attention: str, schedule: str) -> None:
    shares = [_share(schedule, attention, EXACT, "sequential", recompute) for recompute in ((), EVERYTHING)]
    batches = microbatches(shares[0].run, SHAPES)
    for local_model, times in zip(shares, (1, 2)):
        with entries(local_model.model) as seen:
            run_schedule(local_model, batches)
        for name, module in local_model.model.named_modules():
            if isinstance(module, (GroupedQueryAttention, LatentAttention, Experts, FeedForward)):
                assert seen[name] == times * len(SHAPES), name
            # Nothing is routed, and nothing sent, twice.
            if isinstance(module, Router):
                assert seen[name] == len(SHAPES), name
    assert_equal_gradients(_gradients(shares[1]), _gradients(shares[0]))


def test_a_gradient_that_was_put_off_keeps_nothing_alive() -> None:
    """Its inputs may be leaves of a recorded phase; the first gradient of a weight stays until the step ends."""
    weight, leaf, weight_grads = (
        torch.nn.Parameter(torch.zeros(3)),
        torch.ones(3, requires_grad=True),
        WeightGradQueue(),
    )
    weight_grads.put(weight, lambda: leaf * 2)
    weight_grads.run_all()
    assert weight.grad is not None and weight.grad.grad_fn is None
