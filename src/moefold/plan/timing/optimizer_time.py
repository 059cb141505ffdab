"""How long the optimizer's update takes, by its algorithm, by the formats of its states and by where they are.

On the device the update is memory traffic: states are read and written once. States that wait in the host's memory
come over the link before the update and go back after it; the link works in both directions at once, so one direction
counts. An update on the CPU sends gradients out and weights back, and runs at the speed of the host's memory.

Muon orthogonalises every hidden matrix by Newton-Schulz iterations on the rank that owns it. One iteration on an
a x b matrix (a <= b) is three matmuls: X X', its square, and their product with X.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import prod

from moefold.blueprint.muon_matrices import matrices_of, newton_schulz_flops
from moefold.blueprint.param_groups import update_rule
from moefold.blueprint.parameters import parameters
from moefold.config.model import ModelConfig
from moefold.config.optim import OptimConfig
from moefold.plan.timing.throughput import Rates
from moefold.plan.workload import Workload

# Bytes that the optimizer reads and writes per parameter: gradient, master, both moments, and the new weight; and the
# states in it, which formats change.
TRAFFIC_BYTES = 34.0
STATE_BYTES = 12.0
# One rank's share of the host's memory bandwidth while all ranks of a node update on the CPU (assumed, not measured).
CPU_GB_S = 25.0
# Share of the matmul peak that Newton-Schulz iterations reach (assumed, not measured).
MUON_MFU = 0.4


def optimizer_seconds(workload: Workload, rates: Rates, updated: float, held: float) -> float:
    """``updated``: parameters that this rank updates; ``held``: those it holds, whose gradients are cleared."""
    gpu, place = workload.cluster.gpu, workload.run.memory.optimizer
    link = gpu.host_gb_s * 1e9
    if not workload.is_own:
        return updated * 16.0 / link if place == "host" else (updated * TRAFFIC_BYTES + held * 4.0) * rates.traffic
    states = workload.moments_bytes + (workload.master_bytes or workload.weight_bytes)
    moved = TRAFFIC_BYTES - 2 * (STATE_BYTES - states)
    cleared = held * 4.0 * rates.traffic
    if place == "cpu":
        sent = updated * max(workload.gradient_bytes, workload.gather_bytes) / link
        return sent + updated * moved / (CPU_GB_S * 1e9) + cleared
    update = updated * moved * rates.traffic + cleared
    if place == "host":
        # Muon's matrices have one moment.
        moments = workload.moment_bytes if workload.run.optim.algorithm == "muon" else workload.moments_bytes
        update += updated * (moments + workload.master_bytes - workload.device_master_bytes) / link
    return update + _newton_schulz_seconds(workload)


def _newton_schulz_seconds(workload: Workload) -> float:
    if workload.run.optim.algorithm != "muon":
        return 0.0
    work = muon_flops(workload.run.model, workload.run.optim) / workload.cluster.num_gpus
    return work / (MUON_MFU * workload.cluster.gpu.bf16_tflops * 1e12)


@lru_cache(maxsize=64)
def muon_flops(model: ModelConfig, optim: OptimConfig) -> int:
    """Of all matrices that Muon updates, cut as it sees them: experts, gate and up, and heads of MLA apart."""
    total = 0
    for spec in parameters(model):
        if update_rule(spec.name, spec.kind, optim).algorithm == "muon":
            matrices = matrices_of(spec, model)
            *stacks, rows, (_, columns) = matrices.edges
            cut = sum(newton_schulz_flops(b - a, columns, optim.muon.iterations) for a, b in pairwise(rows))
            total += prod(len(edges) - 1 for edges in stacks) * cut
    return total
