"""What of a workload the work of a layer depends on.

Layers of a model are alike, and so are many layouts that a search compares: the counts of `op_costs.py` are made once
for each layer and `Sizes`, and looked up after that.
"""

from __future__ import annotations

from dataclasses import dataclass

from moefold.blueprint.narrow_bytes import matmul_bits, sent_bytes
from moefold.plan.workload import Workload

# Grouped GEMMs of accelerators work in tiles of this many rows per expert; a processor takes rows as they come.
TILE = 128
# Exponent of the smooth maximum of memory and arithmetic time: 4 adds 19 % where both are equal. In one thread, where
# nothing overlaps, they add up.
_SHARPNESS = 4.0
# Watts hold arithmetic down and not memory: a larger share of its bandwidth reaches matmuls than of its peak. Weight
# gradients of experts with few rows, measured on B200, are too slow without it.
_FETCHED = {"sm100": 1.2}


@dataclass(frozen=True)
class Sizes:
    """What of a workload a layer's work depends on."""

    dim: int
    seq_len: int
    tokens: float
    tp: int
    ep: int
    etp: int
    imbalance: float
    narrow: bool
    operand_bytes: float
    gradient_bytes: float
    fused: bool
    exact: bool
    # Experts' second biases are added expert by expert, in float32.
    biases_apart: bool
    # The experts' activation, and its conversion to a narrow format, are the end of a grouped GEMM.
    fused_experts: bool
    # Scores stay on the chip.
    flash: bool
    # FLOPs that the GPU does while it fetches one byte.
    balance: float
    # Bytes of an element where matmuls are not narrow.
    word: float = 2.0
    # Scores, top-k and the auxiliary loss are a few kernels.
    fused_router: bool = False
    # How much longer arithmetic takes that stays wide.
    wide_slower: float = 1.0
    tile: int = TILE
    # Elements of a matmul's result that the GPU computes at once, a tile on each of its multiprocessors; 0 where the
    # last such wave costs nothing. Rows of queries over all heads that attention computes at once, and of keys that its
    # backward does; 0 where it is not known how many multiprocessors there are.
    wave: float = 0.0
    query_wave: float = 0.0
    key_wave: float = 0.0
    sharpness: float = _SHARPNESS


def sizes_of(workload: Workload) -> Sizes:
    gpu, bits = workload.cluster.gpu, matmul_bits(workload.casts)
    peak, measured = gpu.matmul_units(bits)[1], workload.cluster.machine is not None
    return Sizes(
        dim=workload.model.dim,
        seq_len=workload.run.data.seq_len,
        tokens=workload.context_tokens,
        tp=workload.parallel.tp,
        ep=workload.parallel.ep,
        etp=workload.parallel.etp,
        imbalance=_imbalance(workload) * workload.row_padding,
        narrow=bits < 16,
        operand_bytes=sent_bytes(workload.casts, workload.word),
        gradient_bytes=workload.gradient_bytes,
        fused=workload.framework.compiled or workload.dispatcher in ("deepep", "hybridep"),
        exact=workload.drops,
        fused_experts=workload.framework.fused_experts or workload.framework.paged_stash,
        fused_router=workload.framework.fused_router,
        flash=workload.framework.attention != "unfused",
        biases_apart=workload.framework.name == "megatron" and workload.run.kernels.graphs != "full",
        balance=peak / gpu.memory_tb_s / _FETCHED.get(gpu.architecture, 1.0),
        wide_slower=peak / gpu.bf16_tflops,
        word=workload.word,
        tile=1 if measured else TILE,
        wave=2.0 * gpu.sms * TILE**2 if gpu.architecture == "sm80" else 0.0,
        sharpness=1.0 if measured else _SHARPNESS,
        # B200's multiprocessors have two tiles of queries in turns.
        query_wave=(2.0 if gpu.architecture in ("sm100", "sm103") else 1.0) * gpu.sms * TILE,
        key_wave=1.0 * gpu.sms * TILE,
    )


def _imbalance(workload: Workload) -> float:
    """Where ranks share cores, all get equal parts of them until those with less to do are done; then the busiest gets
    a core to itself. So it makes up for some of what it has more."""
    machine, ep, busiest = workload.cluster.machine, workload.parallel.ep, workload.busiest
    if machine is None or busiest == 1.0:
        return busiest
    if ep == 1:
        return 1.0
    shared = max(1.0, machine.slowdown(workload.cluster.num_gpus))
    others = max(0.0, ep - busiest) / (ep - 1)
    return (busiest + others * (shared - 1)) / shared
