"""From work and bytes to seconds: the rates of one workload's GPU, collectives over its links, and a schedule's bubble.

    time = arithmetic / sustained rate + traffic / memory bandwidth + gaps between kernels

The host launches kernels concurrently; where it is slower than the GPU, its time counts. Collectives take their time by
bytes, links and reach of the group.

An order of enough microbatches has a beginning and an end that do not depend on how many there are; between them the
slowest rank never waits. So its bubble is a number of units for each order, a unit being one third of a stage's time
for one microbatch (forward, input gradient and weight gradient cost about the same). 1F1B and interleaved 1F1B wait
3 (P - 1) units, by their closed form; other orders are simulated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from moefold.blueprint.narrow_bytes import matmul_bits
from moefold.config.casts import Cast
from moefold.errors import ConfigError, Problem
from moefold.hardware.cluster import Cluster, Gpu
from moefold.hardware.machine import Machine
from moefold.plan.op_costs import Work
from moefold.plan.timing.constants import Constants
from moefold.plan.traffic import DispatchBytes, Reach, distinct, expert_reach
from moefold.plan.workload import Workload
from moefold.schedule.names import schedule_named
from moefold.schedule.simulate import Durations, simulate

# 1e12 FLOP/s of bf16 per watt at which an architecture's chip keeps its usual clock. That is what the usual chip has,
# but for the A100: the variant with 300 W of 400 does 183 matmuls at 94 % of the rate that runs on the other one have.
_USUAL = {"sm80": 312 / 320, "sm90": 989 / 700, "sm100": 2450 / 1200, "sm103": 2450 / 1400}
# Exponent of the smooth maximum of GPU and host time; 4 adds 19 % where both are equal.
_SHARPNESS = 4.0
# Attention rates are of heads of so many dimensions.
_HEAD = 128
# Frameworks that have a constant of their own: their time against Megatron's.
_FACTORS = ("fsdp2", "deepspeed", "jax")
_TODAY = 2026.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds per unit of each kind of work, for one workload."""

    gemm: float
    grouped: float
    quantised: float
    quantised_fused: float
    attention_forward: float
    attention_backward: float
    scan: float
    traffic: float
    # The same where buffers are long: an optimizer's update, and scores of attention that are written.
    stream: float
    gap: float
    launch: float
    loop: float

    def compute(self, work: Work, *, backward: bool) -> float:
        """Arithmetic."""
        attention = self.attention_backward if backward else self.attention_forward
        return (
            work.gemm_flops * self.gemm
            + work.grouped_flops * self.grouped
            + work.attention_flops * attention
            + work.scan_flops * self.scan
        )

    def moving(self, work: Work) -> float:
        """What only moves memory, conversions included."""
        return (
            work.traffic * self.traffic
            + work.streamed * self.stream
            + work.quantised * self.quantised
            + work.quantised_fused * self.quantised_fused
        )


def rates_of(workload: Workload, c: Constants, length: float) -> Rates:
    """`length`: tokens of a sequence; longer ones attend faster."""
    if workload.cluster.machine is not None:
        _check_measured(workload)
        return measured_rates(workload.cluster.machine)
    gpu = workload.cluster.gpu
    factor = _framework_factor(workload, c) * _age(workload, c)
    bandwidth = gpu.memory_tb_s * 1e12 * c.traffic
    passes = 1.0 if workload.casts is None else conversion_passes(workload.casts.x_fprop)
    fused = c.compiled if workload.framework.compiled else 1.0
    gain = 1 + c.attention_long * min(2.0, max(-2.0, log2(length / 4096)))
    # Measured attention rates are alike shares of the peak on the usual GPU of each architecture; a GPU that has
    # fewer watts for the same arithmetic is slower. The newest GPUs have twice the exponentials.
    gain *= c.attention_sm103 if gpu.architecture == "sm103" else 1.0
    gain *= _head_gain(workload, c)
    gain *= c.flash2 if workload.framework.attention == "flash2" else 1.0
    gain *= _capped(gpu, c)
    if workload.framework.name == "fsdp2":
        # torch's ring attention runs its steps one by one and merges them in eager mode.
        gain /= (1 + c.ring_fsdp2) ** log2(workload.parallel.cp)
    attention = factor / (gpu.bf16_tflops * 1e12 * gain)
    matmuls = factor * _matmul_seconds(workload, c)
    host = 1e-6 * factor * (c.launch_grace if gpu.per_node == 4 else 1.0)
    # Each layer is cut into nodes with a backward of its own, which the interpreter calls one by one.
    host *= c.launch_overlap if workload.ep_overlap else 1.0
    return Rates(
        gemm=matmuls,
        grouped=matmuls / c.grouped,
        quantised=passes * c.quantise / bandwidth,
        quantised_fused=passes * c.quantise_fused / bandwidth,
        attention_forward=attention / c.attention_forward,
        attention_backward=attention / c.attention_backward,
        scan=factor / (gpu.bf16_tflops * 1e12 * c.scan),
        traffic=fused / bandwidth,
        stream=1 / (gpu.memory_tb_s * 1e12 * c.stream),
        gap=c.gap_us * 1e-6,
        launch=c.launch_us * host,
        loop=c.loop_us * host,
    )


def _head_gain(workload: Workload, c: Constants) -> float:
    """Exponentials and rescaling cost as much for a narrow head as for a wide one, and it has fewer FLOPs."""
    return float(min(1.0, (workload.model.narrowest_head or _HEAD) / _HEAD) ** c.attention_narrow)


def _check_measured(workload: Workload) -> None:
    """A machine's table says how fast moefold is there in float32, and nothing else."""
    problems = []
    if workload.format != "float32":
        message = f"is {workload.format}, but the machine was measured in float32"
        problems.append(Problem("precision.compute", message, "use float32, or plan without --machine"))
    if workload.framework.name != "moefold":
        message = f"is {workload.framework.name}, but the machine was measured with moefold"
        problems.append(Problem("framework", message, "use moefold, or plan without --machine"))
    if workload.parallel.param_sync != "direct":
        message = "is hierarchical, but the machine was measured with one collective over all ranks"
        problems.append(Problem("parallel.param_sync", message, "use direct, or plan without --machine"))
    if problems:
        raise ConfigError(*problems)


def measured_rates(machine: Machine) -> Rates:
    """Of one rank that has the machine to itself. Nothing runs beside it: what the host does is an operation's time."""
    gemm = 1 / (machine.gemm_gflops * 1e9)
    return Rates(
        gemm=gemm,
        grouped=gemm / machine.grouped,
        quantised=0.0,
        quantised_fused=0.0,
        attention_forward=1 / (machine.attention_forward_gflops * 1e9),
        attention_backward=1 / (machine.attention_backward_gflops * 1e9),
        scan=gemm,
        traffic=1 / (machine.traffic_gb_s * 1e9),
        stream=1 / (machine.traffic_gb_s * 1e9),
        gap=machine.operation_us * 1e-6,
        launch=0.0,
        loop=machine.expert_us * 1e-6,
    )


def conversion_passes(cast: Cast | None) -> float:
    """Over memory to narrow an operand both ways, against MXFP8's one. A scale that needs the largest value of a tensor
    or of a row first reads everything twice, rows of the transpose worst of all; that of the steps before does not.
    Scales of four bytes, or under another of the tensor, cost a part of a pass."""
    if cast is None or cast.scale in ("none", "e8m0_rceil", "e8m0_floor"):
        return 1.0
    if cast.block is None:
        return 0.7 if cast.delayed else 1.1
    return 1.2 if cast.block[1] else 3.0


def _matmul_seconds(workload: Workload, c: Constants) -> float:
    """Seconds per FLOP of a large matmul: each architecture sustains its own share of the peak, and a chip that is
    held below its usual watts less of that."""
    gpu = workload.cluster.gpu
    of_chip = {"sm80": c.gemm_sm80, "sm90": 1.0, "sm103": c.gemm_sm103}
    share = _capped(gpu, c) * of_chip.get(gpu.architecture, c.gemm_sm100)
    bits, tflops = gpu.matmul_units(matmul_bits(workload.casts))
    if bits == 8 and gpu.architecture.startswith("sm10"):
        share *= c.narrow_sm100
    if bits == 4 and gpu.architecture == "sm103":
        share *= c.fp4_sm103
    share *= {16: c.gemm_bf16, 8: c.gemm_fp8, 4: c.gemm_fp4}[bits]
    return 1 / (tflops * 1e12 * share)


def _capped(gpu: Gpu, c: Constants) -> float:
    """A chip that has fewer watts for its arithmetic than is usual runs at a lower clock."""
    usual = _USUAL.get(gpu.architecture, _USUAL["sm90"])
    return min(1.0, float((gpu.bf16_tflops / gpu.watts / usual) ** -c.power))


def _framework_factor(workload: Workload, c: Constants) -> float:
    """Time on GPU and host against Megatron's."""
    name = workload.framework.name
    return float(getattr(c, name)) if name in _FACTORS else 1.0


def _age(workload: Workload, c: Constants) -> float:
    """Frameworks and their kernels get better every year; a workload without a date is of today."""
    years = max(-1.0, min(2.0, _TODAY - workload.framework.date)) if workload.framework.date else 0.0
    return float((1 + c.year) ** years)


def slower(gpu_seconds: float, host: float) -> float:
    """The larger of two, rounded off where they are close."""
    top = max(gpu_seconds, host)
    if top <= 0:
        return 0.0
    return float(top * ((gpu_seconds / top) ** _SHARPNESS + (host / top) ** _SHARPNESS) ** (1 / _SHARPNESS))


def ring(total: float, where: Reach, cluster: Cluster, c: Constants) -> float:
    """A gather or scatter of `total` bytes over a group; an all-reduce is two of them.

    Inside a domain every rank receives what it lacks over its own links. Between domains the bytes cross once per
    domain, over the GPUs of those ranks of the group that are in it.
    """
    if where.size == 1 or total == 0:
        return 0.0
    inside = total * (where.size - 1) / where.size / (cluster.gpu.link_gb_s * 1e9 * c.ring_link)
    if not where.crosses:
        return float(inside + latency(cluster, c, crosses=False))
    network = cluster.nic_gb_s * 1e9 * c.ring_nic * where.inside * _penalty(cluster, c)
    outside = total * (where.domains - 1) / where.domains / network
    return float(max(inside if where.inside > 1 else 0.0, outside) + latency(cluster, c, crosses=True))


# DeepEP was written for 8 ranks that share fast links. Among 32 GPUs of a rack its dispatch reaches 400 GB/s and its
# combine 190 (guide for DeepSeek-V3 on GB200, section 2.2.1), of rows that each rank gets once; HybridEP takes 612 and
# 646 us for the same (report of Megatron Core, table 7).
DEEPEP_PEERS = 8
_ROWS_US = 4096 * distinct(32, 8) * 7168 * 2 / 1e3
DEEPEP_IN_RACKS = (612 + 646) / (_ROWS_US / 400 + _ROWS_US / 190)


def dispatch_seconds(sent: DispatchBytes, workload: Workload, c: Constants) -> float:
    """One dispatch or one combine. Fast links and the network work at the same time; the slower one counts."""
    if not sent.inside and not sent.outside:
        return 0.0
    cluster = workload.cluster
    fused = workload.dispatcher in ("deepep", "hybridep")
    link = cluster.gpu.link_gb_s * 1e9 * (c.dedup_link if fused else c.exchange_link)
    if workload.dispatcher == "deepep" and expert_reach(workload).inside > DEEPEP_PEERS:
        link *= DEEPEP_IN_RACKS
    network = cluster.nic_gb_s * 1e9 * (c.dedup_nic if fused else c.exchange_nic) * _penalty(cluster, c, dedup=fused)
    share = sms_rate(workload)
    inside, outside = sent.inside / link / share, sent.outside / network / share
    return float((inside**2 + outside**2) ** 0.5 + latency(cluster, c, crosses=sent.outside > 0))


# SMs that kernels use by default, with which they saturate the links: DeepEP's Buffer, and HybridEP in Megatron Core.
SATURATING_SMS = {"deepep": 20, "hybridep": 16}


def sms_rate(workload: Workload) -> float:
    """Share of the links that dispatch and combine get with ``parallel.dispatch_sms``: all of it from where they are
    saturated, and in proportion below. 1 where the key is not set."""
    sms = workload.parallel.dispatch_sms
    return 1.0 if sms is None or workload.dispatcher == "local" else min(1.0, sms / _saturating(workload))


def sms_taken(workload: Workload) -> float:
    """Compute lost per hidden second of dispatch or combine beyond ``contention``, which was fitted to runs with the
    default number of SMs: of the GPU's SMs, those that the exchange has more (or, negative, fewer) than by default."""
    sms, gpu = workload.parallel.dispatch_sms, workload.cluster.gpu
    if sms is None or workload.dispatcher == "local":
        return 0.0
    path = "parallel.dispatch_sms"
    if not gpu.sms:
        raise ConfigError(Problem(path, f"how many SMs {gpu.name} has is not known", "use null, or plan for H100"))
    if sms >= gpu.sms:
        words = f"is {sms}: {gpu.name} has {gpu.sms} SMs, and matmuls beside an exchange need some"
        raise ConfigError(Problem(path, words, f"use less, such as {_saturating(workload)}"))
    return (sms - _saturating(workload)) / gpu.sms


def _saturating(workload: Workload) -> int:
    known = SATURATING_SMS.get(workload.dispatcher)
    if known is None:
        words = f"no kernel of the {workload.dispatcher} dispatcher takes a number of SMs"
        raise ConfigError(
            Problem("parallel.dispatch_sms", words, f"use null, or parallel.dispatcher {', '.join(SATURATING_SMS)}")
        )
    return known


def latency(cluster: Cluster, c: Constants, *, crosses: bool) -> float:
    if crosses and cluster.network == "efa":
        return float(c.efa_latency_us * 1e-6)
    return float(c.latency_us * 1e-6 * (1.5 if crosses else 1.0))


def _penalty(cluster: Cluster, c: Constants, *, dedup: bool = False) -> float:
    if cluster.network != "efa":
        return 1.0
    return c.efa_dedup if dedup else c.efa


_CLOSED = ("gpipe", "1f1b", "interleaved")
PARTS = 3


@lru_cache(maxsize=1024)
def bubble_units(schedule: str, ranks: int, virtual: int) -> float:
    """Thirds of a stage's time."""
    if ranks == 1:
        return 0.0
    if schedule in _CLOSED:
        return float(PARTS * (ranks - 1))
    return simulated_units(schedule, ranks, virtual, 2 * ranks)


def simulated_units(schedule: str, ranks: int, virtual: int, microbatches: int) -> float:
    """The same by simulation: the time of the order less what the busiest rank has to do."""
    order = schedule_named(schedule).build(ranks, virtual, microbatches)
    timeline = simulate(order, Durations())
    return timeline.finish - max(timeline.busy)
