"""Prove one case: on forked ranks, or on the ranks of a launched job, and compare their quantities with the reference.

In float64 one tolerance fits all. In float32 and bfloat16 `rounding_tolerance` estimates how much two layouts may
differ. Where that is exceeded, one process's error in the format, against float64, is measured for this very case, and
three times that is allowed: gradients that cancel are wrong by more than the estimate in every layout.

**On a job** (GPUs over NCCL, `prove_on_ranks`) every rank computes the reference itself, on its CPU: a proof's model is
small, and hosts need not share a file system. Ranks then build their shards on their own device, run one step with the
kernels that the case names, and compare; differences are gathered as numbers, so that every rank has the verdict. The
same path runs on CPUs over gloo, which is how it was tested; it was never run on a GPU. There the error in the format
is measured first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from moefold.checks import engine_limits, narrow_recipes
from moefold.checks import kernels as kernel_rules
from moefold.checks.engine_limits import ENGINE_EXPERTS
from moefold.checks.kernels import experts_in_use
from moefold.comm.spawn import spawn_ranks
from moefold.config.precision import Format, KernelsConfig
from moefold.config.run import RunConfig
from moefold.errors import RankError
from moefold.moe.routing_policies import PolicyOrName
from moefold.prove.cases import Case, proof_kernels, reduce_run, reference_case
from moefold.prove.compare_rank import (
    Difference,
    ReferenceSize,
    compare_rank,
    difference,
    floors,
    reference_size,
    relative_error,
    relative_norm_error,
    uncovered,
)
from moefold.prove.reference import reference, write_reference
from moefold.prove.unchanged_bits import UNCHANGED

TOLERANCE = 1e-9
# Of one AdamW update in float32 from the same gradients; a bfloat16 weight alone is wrong by about 2**-10.
MASTER_TOLERANCE = 2.0**-20
# The largest relative error of a stored value.
ROUNDING = {"bfloat16": 2.0**-9, "float32": 2.0**-25 * 8}


@dataclass(frozen=True)
class Row:
    """One compared quantity."""

    quantity: str
    error: float
    tolerance: float
    # Elements without a primary replica, or with several; any is a failure.
    uncovered: int = 0

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance and self.uncovered == 0


@dataclass(frozen=True)
class Verdict:
    """The result of `prove`: `holds`, the `worst` relative error, and a row for every compared quantity, worst first.

    ``failure`` is the error of ranks that did not finish, ``culprit`` the quantity or error to look at first.

    >>> import moefold
    >>> verdict = moefold.prove(moefold.load_run("debug_tiny", {"parallel.tp": 2}), world=2)
    >>> isinstance(verdict, moefold.Verdict), verdict.holds, verdict.failure
    (True, True, None)
    """

    case: Case
    rows: tuple[Row, ...] = ()
    observations: frozenset[str] = field(default_factory=frozenset)
    failure: str | None = None

    @property
    def holds(self) -> bool:
        return self.failure is None and bool(self.rows) and all(row.holds for row in self.rows)

    @property
    def worst(self) -> float:
        return max((row.error for row in self.rows), default=float("inf"))

    @property
    def culprit(self) -> str:
        """The quantity, or the error, that a failed proof is about."""
        if self.failure is not None:
            return self.failure.splitlines()[0]
        return next((row.quantity for row in self.rows if not row.holds), "")


def prove(
    case: Case,
    seconds: float = 300.0,
    fault: Callable[[], None] | None = None,
    routing_policy: PolicyOrName | None = None,
) -> Verdict:
    """Run the reference, then the ranks, and compare quantity by quantity.

    ``fault`` runs on every rank and never in the reference: it seeds a fault that the proof must find.
    ``routing_policy`` replaces the policy of the config on both sides. In float32 and bfloat16 the tolerance is an
    estimate of what two orders of summation differ by; where it is exceeded, the format's own error is measured, and
    the verdict is made again with it.
    """

    def compare(rank: int) -> dict[str, Any]:
        if fault is not None:
            fault()
        return compare_rank(case, load_file(path), rank, routing_policy)

    with tempfile.TemporaryDirectory(prefix="moefold-proof-") as folder:
        path = Path(folder) / "reference.safetensors"
        try:
            spawn_ranks(lambda _: write_reference(case, path, routing_policy), 1, seconds=seconds)
            ranks = spawn_ranks(compare, case.world, seconds=seconds)
        except RankError as error:
            return Verdict(case, failure=str(error))
        expected = load_file(path)
    verdict = verdict_of(case, expected, ranks)
    if verdict.holds or case.run.precision.compute == "float64":
        return verdict
    try:
        (rounding,) = spawn_ranks(lambda _: _own_rounding(case, routing_policy), 1, seconds=seconds)
    except RankError as error:
        return Verdict(case, failure=str(error))
    return verdict_of(case, expected, ranks, rounding)


def _own_rounding(case: Case, routing_policy: PolicyOrName | None) -> dict[str, float]:
    return rounding_errors(case, reference(reference_case(case), routing_policy), routing_policy)


def verdict_of(
    case: Case,
    expected: dict[str, Tensor],
    ranks: Sequence[Mapping[str, Any]],
    rounding: Mapping[str, float] | None = None,
) -> Verdict:
    """From the reference's quantities and every rank's differences from them.

    ``rounding``: errors that are the format's own, by quantity, where the reference has a wider one; three times that
    is allowed, if it is more than what is allowed anyway.
    """
    sizes = {name: reference_size(tensor) for name, tensor in expected.items() if not name.startswith("routing/")}
    differences = {name: [Difference(*rank[name]) for rank in ranks if name in rank] for name in sizes}
    rows = _rows(case, differences, sizes, rounding or {})
    return Verdict(case, rows, observations_of(case, expected["counts"], int(expected["dropped"])))


def _rows(
    case: Case, differences: dict[str, list[Difference]], sizes: dict[str, ReferenceSize], rounding: Mapping[str, float]
) -> tuple[Row, ...]:
    exact = case.run.precision.compute == "float64"
    measure = relative_error if exact else relative_norm_error
    floor = floors(sizes)
    rows = [
        Row(
            name,
            measure(differences[name], size, floor.get(name.partition("/")[0], 0.0)),
            exact_tolerance(name) if exact else max(rounding_tolerance(case, name), 3 * rounding.get(name, 0.0)),
            uncovered(differences[name], size),
        )
        for name, size in sizes.items()
    ]
    return tuple(sorted(rows, key=_causes_first))


def exact_tolerance(quantity: str) -> float:
    """In float64. Narrowed weights have the same bits in every layout, gradients in every choice of memory."""
    return 0.0 if quantity.startswith(("codes/", "scales/", f"{UNCHANGED}/")) else TOLERANCE


# In order of computation: an early error changes everything after it, so the first kind that fails is where to look.
_ORDER = (
    "codes",
    "scales",
    "counts",
    "plain",
    "kept",
    "dropped",
    "loss",
    "mtp_loss",
    "balance",
    "gradient",
    UNCHANGED,
    "grad_norm",
    "expert_bias",
    "exp_avg",
    "exp_avg_sq",
    "momentum",
    "master",
    "parameter",
)


def _causes_first(row: Row) -> tuple[bool, int, float]:
    """Failures first, in order of computation; the largest errors first."""
    excess = -row.error / max(row.tolerance, 1e-300)
    return (True, 0, excess) if row.holds else (False, _ORDER.index(row.quantity.partition("/")[0]), excess)


# A head's sink; the gate of a shared expert.
_FROM_ONE_NUMBER = ("sinks", "shared_gate.weight")


def rounding_tolerance(case: Case, quantity: str) -> float:
    """Largest relative norm error between two orders of the same arithmetic in float32 or bfloat16.

    Every stored activation is rounded, in bfloat16 to 8 bits: a relative error of at most 2**-9, of 2**-9 / sqrt(3) on
    average, in a random direction. About a dozen tensors are rounded per layer in forward and twice as many in
    backward, so a gradient depends on r = 36 roundings per layer, whose random sum is sqrt(r) of one. A gradient then
    sums n tokens' terms; where they cancel the relative error grows, and cancellation to the square root of their
    number is allowed for by the fourth root of n. The bound is six times that. A head's sink has one number, whose
    terms may cancel altogether with no other entry to average over: the square root of n. So may the one number per
    token that a shared expert's gate gets, an inner product of an output and its gradient. A squared gradient has twice
    the relative error. Counts are integers and must be equal. In float32 a stored value is rounded to 24 bits, but its
    matmul has added up terms that were rounded as well: eight times that is allowed.

    Adam's first update is lr times the sign of the gradient. An entry whose gradient is smaller than its rounding error
    may get either sign: among normally distributed entries about as many as the bound says, each wrong by twice lr.
    """
    kind = quantity.partition("/")[0]
    if kind in ("counts", "plain", "kept", "dropped"):
        return 0.0
    if kind == "master":
        return MASTER_TOLERANCE
    tokens = case.run.data.global_batch * case.run.data.seq_len
    roundings = 36 * case.run.model.num_layers + 12
    one = ROUNDING[case.run.precision.compute] / sqrt(3)
    cancellation = tokens ** (0.5 if quantity.endswith(_FROM_ONE_NUMBER) else 0.25)
    bound = 6 * one * sqrt(roundings) * cancellation
    if kind == "parameter":
        return max(bound, 2 * case.run.optim.lr / case.run.model.init_std * sqrt(bound))
    return bound * (2 if kind == "exp_avg_sq" else 1)


def rounding_errors(
    case: Case, expected: dict[str, Tensor], routing_policy: PolicyOrName | None = None
) -> dict[str, float]:
    """The error of one CPU process in the case's format, by quantity."""
    run = replace(case.run, kernels=proof_kernels(case.run.precision.compute))
    rounded = reference(Case(run, case.world), routing_policy, routing=expected)
    sizes = {name: reference_size(tensor) for name, tensor in expected.items() if not name.startswith("routing/")}
    floor = floors(sizes)
    return {
        name: relative_norm_error(
            [difference(rounded[name], expected[name], is_primary=True)], size, floor.get(name.partition("/")[0], 0.0)
        )
        for name, size in sizes.items()
    }


def observations_of(case: Case, counts_ME: Tensor, dropped: int) -> frozenset[str]:
    """Special situations that occurred in this case, for the coverage table."""
    found = set()
    samples = [sum(lengths) for lengths in case.documents]
    microbatches = [sum(samples[i] for i in group) for wave in case.plan.waves for group in wave.documents]
    if any(tokens % case.run.parallel.tp for tokens in microbatches):
        found.add("token counts that do not divide over tp")
    if not all(microbatches):
        found.add("a microbatch without a token")
    if len(set(microbatches)) > 1:
        found.add("microbatches of different sizes")
    if any(1 in lengths for lengths in case.documents):
        found.add("a document of one token")
    found |= {f"a wave sharded over {wave.context} ranks" for wave in case.plan.waves if case.run.parallel.dynamic_cp}
    if counts_ME.numel():
        if (counts_ME == 0).any():
            found.add("an expert that receives no token")
        per_rank = counts_ME.view(counts_ME.shape[0], case.run.parallel.ep, -1).sum(-1)
        if (per_rank == 0).any():
            found.add("a rank that receives no token")
    if dropped:
        found.add("tokens dropped")
    return frozenset(found)


# Keys of ``kernels`` whose named backend is proved; of experts, grouped GEMMs of other libraries.
_NAMED = ("experts", "permute", "linear", "attention", "casts", "row_padding")


def device_case(run: RunConfig, world: int, dtype: Format, device: str) -> Case:
    """The reduced run with the kernels that the run names, where they take this format and the reduced sizes.

    Otherwise `auto` experts and attention, and torch's kernels in float64; the report says which were used.
    """
    case = reduce_run(run, world, dtype)
    backend = "torch" if dtype == "float64" or run.kernels.backend == "native" else run.kernels.backend
    kernels = KernelsConfig(experts="auto", backend=backend)
    for key in _NAMED:
        name = getattr(run.kernels, key)
        named = replace(kernels, **{key: name})
        if (key != "experts" or name in ENGINE_EXPERTS) and not _refused(replace(case.run, kernels=named)):
            kernels = named
    chosen = replace(case.run, kernels=kernels)
    return Case(replace(chosen, kernels=replace(kernels, experts=experts_in_use(chosen, device))), world)


def _refused(run: RunConfig) -> bool:
    return any(rule(run) for rule in (*kernel_rules.RULES, *engine_limits.RULES, *narrow_recipes.RULES))


def prove_on_ranks(case: Case, rank: int, device: torch.device, routing_policy: PolicyOrName | None = None) -> Verdict:
    """Called on every rank of the case's world, in its process group; without one if the world is 1."""
    expected = reference(reference_case(case), routing_policy)
    if device.type != "cpu":
        # Sums by atomics have another order in every run.
        expected = {name: tensor for name, tensor in expected.items() if not name.startswith(f"{UNCHANGED}/")}
    own = compare_rank(case, expected, rank, routing_policy, device)
    names = [name for name in expected if not name.startswith("routing/")]
    rounding = {} if case.run.precision.compute == "float64" else rounding_errors(case, expected, routing_policy)
    return verdict_of(case, expected, gather_differences(own, names, device), rounding)


def gather_differences(
    own: Mapping[str, Sequence[float]], names: Sequence[str], device: torch.device
) -> list[dict[str, list[float]]]:
    """Each rank's differences by name; a rank has those of its own shards only."""
    absent = [0.0] * 4
    rows = [[float(name in own), *map(float, own.get(name, absent))] for name in names]
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(table) for _ in range(dist.get_world_size())] if dist.is_initialized() else [table]
    if dist.is_initialized():
        dist.all_gather(gathered, table)
    return [
        {
            name: [largest, squares, int(elements), bool(primary)]
            for name, (there, largest, squares, elements, primary) in zip(names, ranks.tolist(), strict=True)
            if there
        }
        for ranks in gathered
    ]
