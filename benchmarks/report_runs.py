"""Runs of the Megatron Core MoE report as workloads, for tables and tests that hold predictions against its figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from moefold.config.attention import MLAConfig
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.hardware.cluster import cluster_of
from moefold.plan.workload import MEGATRON_PRECISION, Framework, PlannedFormat, Workload, changed, in_format
from moefold.recipes.catalog import RECIPES

GIB = 2**30
# Keys of a run, by section.
Sections = dict[str, dict[str, Any]]


def job(
    model: str, gpu: str, gpus: int, form: PlannedFormat, batch: tuple[int, int, int], how: Sections, **degrees: Any
) -> Workload:
    """batch: tokens per sequence, sequences per microbatch, sequences per step."""
    config = RECIPES[model]().model
    run = RunConfig(
        model=replace(config, num_mtp=1) if model == "deepseek_v3" else config,
        parallel=ParallelConfig(
            schedule="interleaved" if degrees.get("vpp", 1) > 1 else "1f1b", sharding="zero1", **degrees
        ),
        precision=in_format(MEGATRON_PRECISION, form),
        data=DataConfig(batch[0], batch[2], batch[1]),
    )
    framework = Framework("megatron", **how.get("framework", {}))
    keys = {section: keys for section, keys in how.items() if section != "framework"}
    return changed(Workload(run, cluster_of(gpu, gpus), framework), **keys)


def both(one: Sections, other: Sections) -> Sections:
    return {section: {**one.get(section, {}), **other.get(section, {})} for section in {**one, **other}}


DATED: Sections = {"framework": {"date": 2026.2}}
GRAPHED: Sections = {
    "kernels": {"graphs": "partial", "graph_scope": ("attn", "moe_router", "moe_preprocess")},
}
HYBRID = both(both(DATED, GRAPHED), {"parallel": {"dispatcher": "hybridep"}})
PAIRED = both(HYBRID, {"parallel": {"overlap": ("ep",)}})
DEEP = both(DATED, {"parallel": {"dispatcher": "deepep", "overlap": ("ep",)}})
QWEN = "qwen3_235b_a22b"


def _recompute(how: Sections, *names: str) -> Sections:
    return both(how, {"memory": {"recompute": names}})


class Measured(NamedTuple):
    """A row of table 20; ``tflops`` per GPU."""

    model: str
    gpu: str
    gpus: int
    form: PlannedFormat
    batch: tuple[int, int, int]
    how: Sections
    degrees: dict[str, int]
    tflops: float

    def workload(self) -> Workload:
        return job(self.model, self.gpu, self.gpus, self.form, self.batch, self.how, **self.degrees)


# What section B.2 says of them: overlap, graphs and recomputation by model and GPU.
_MLP, _UP = _recompute(HYBRID, "feed_forward"), _recompute(DEEP, "mla_up", "feed_forward")
_ACT = _recompute(PAIRED, "activation", "norms")
_HOPPER = _recompute(both(DEEP, GRAPHED), "activation", "norms")
TABLE_20 = [
    Measured("deepseek_v3", "GB300", 256, "mxfp8", (4096, 1, 8192), PAIRED, dict(pp=4, ep=64, vpp=4), 1233),
    Measured("deepseek_v3", "GB200", 256, "mxfp8", (4096, 1, 8192), _MLP, dict(pp=4, ep=64, vpp=4), 1048),
    Measured("deepseek_v3", "GB200", 256, "bfloat16", (4096, 1, 4096), _MLP, dict(pp=8, ep=32, vpp=4), 857),
    Measured("deepseek_v3", "H100", 1024, "fp8_blockwise", (4096, 1, 8192), _UP, dict(tp=2, pp=4, ep=64, vpp=4), 368),
    Measured(QWEN, "GB300", 256, "mxfp8", (4096, 2, 3072), HYBRID, dict(pp=4, ep=64, vpp=6), 974),
    Measured(QWEN, "GB200", 256, "mxfp8", (4096, 3, 3072), _ACT, dict(pp=4, ep=64, vpp=6), 919),
    Measured(QWEN, "GB200", 256, "bfloat16", (4096, 1, 8192), _ACT, dict(pp=4, ep=32, vpp=12), 750),
    Measured(QWEN, "H100", 256, "bfloat16", (4096, 1, 2048), _HOPPER, dict(tp=2, pp=8, ep=32, vpp=4), 320),
    Measured(QWEN, "GB300", 128, "mxfp8", (131072, 1, 1024), HYBRID, dict(tp=4, pp=4, cp=4, ep=32, vpp=12), 1150),
]

DEEPSEEK_V3 = ModelConfig(
    vocab_size=129280,
    dim=7168,
    num_layers=61,
    attention=MLAConfig("mla", 128, 1536, 512, 128, 64, 128),
    moe=MoEConfig(256, 8, 2048, shared_hidden_dim=2048, weight_at="output"),
    num_dense_layers=3,
    dense_hidden_dim=18432,
    num_mtp=1,
)
# PP4 x VPP4 x EP64 on 256 GPUs. Probs are applied after the experts there; section 4.1.2 moves them.
TABLE_3 = Workload(
    RunConfig(
        model=DEEPSEEK_V3,
        parallel=ParallelConfig(
            pp=4, vpp=4, ep=64, schedule="interleaved", stages="Et*4|(t*4|)*14tmL", sharding="zero1"
        ),
        precision=MEGATRON_PRECISION,
        data=DataConfig(4096, 64 * 64),
    ),
    cluster_of("H100", 256),
    Framework("megatron"),
)
# Its "GB" are 2**30 bytes, and its rank is the third: 16 MoE layers, of which 60 in live microbatches.
TABLE_3_RANK = 2
PROBS_INSIDE: Sections = {"model": {"moe": MoEConfig(256, 8, 2048, shared_hidden_dim=2048)}}
# Table 5: fine-grained offloading of activations. Which steps the report does not say.
OFFLOADED: Sections = {"memory": {"offload": ("moe_act",)}}
_LEAN = both(HYBRID, {"memory": {"recompute": ("feed_forward", "mla_up")}})
TABLE_5 = {
    "DeepSeek-V3, 256 GB200, offloading": (
        job("deepseek_v3", "GB200", 256, "mxfp8", (4096, 1, 2048), _LEAN, pp=8, ep=32, vpp=4),
        job("deepseek_v3", "GB200", 256, "mxfp8", (4096, 1, 2048), both(_LEAN, OFFLOADED), pp=8, ep=32, vpp=4),
    ),
    "Qwen3-235B, 256 GB200, offloading instead of tensor parallelism": (
        job(QWEN, "GB200", 256, "mxfp8", (4096, 1, 8192), HYBRID, tp=2, pp=4, ep=16, vpp=6),
        job(QWEN, "GB200", 256, "mxfp8", (4096, 1, 8192), both(HYBRID, OFFLOADED), pp=4, ep=64, vpp=6),
    ),
}
