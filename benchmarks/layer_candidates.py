"""Candidates of `benchmarks.layer`: lower bounds, moefold's layer, and the layers of other libraries.

A peer's adapter imports its library when it is built, in its own process: a library that is not installed, or does not
run on this machine, only removes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from benchmarks.peers.automodel import automodel
from benchmarks.peers.megatron import megatron
from benchmarks.peers.torchtitan import torchtitan
from benchmarks.peers.transformers import transformers
from benchmarks.roofline import DenseRoofline, GroupedRoofline
from benchmarks.runner import Builder
from benchmarks.timed_layer import Forward, TimedLayer
from moefold.bench.layer_bench import batch_of, cpu_matmul_of, filled_layer
from moefold.bench.layer_workload import LayerShape, Weights
from moefold.model.build import local_interfaces
from moefold.moe.moe_kernels import kernels_named


def moefold_layer(backend: str, kernels: str = "torch") -> Builder:
    """moefold's layer with this backend for its experts, and these kernels."""
    make = partial(_make, backend, kernels)
    return lambda options: TimedLayer(options, partial(make, cpu_matmul_of(options["dtype"], "cpu")))


def _make(
    backend: str, kernels: str, cpu_matmul: str, shape: LayerShape, weights: Weights
) -> tuple[Forward, Sequence[Tensor]]:
    interfaces = local_interfaces(backend, kernels_named(kernels, "cpu"), cpu_matmul=cpu_matmul)
    layer = filled_layer(shape, weights, interfaces)
    batch = batch_of(shape.tokens)
    return (lambda x: layer(x, batch, None)[0]), list(layer.parameters())


BASELINES: dict[str, Builder] = {"dense": DenseRoofline, "grouped_mm": GroupedRoofline}
MOEFOLD: dict[str, Builder] = {
    "moefold fused": moefold_layer("fused", "native"),
    "moefold fused in torch": moefold_layer("fused"),
    "moefold sequential": moefold_layer("sequential"),
}
PEERS: dict[str, Builder] = {
    "transformers eager": transformers("eager"),
    "transformers grouped_mm": transformers("grouped_mm"),
    "torchtitan": torchtitan,
    "megatron-core": megatron,
    "automodel torch": automodel("torch"),
    "automodel torch_mm": automodel("torch_mm"),
}
CANDIDATES = BASELINES | MOEFOLD | PEERS
