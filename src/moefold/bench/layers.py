"""Who takes part in `bench layer`: the bare engines, moefold's layer, and the layers of other libraries.

A peer's adapter imports its library when it is built, in its own process: a library that is not installed, or does not
run on this machine, takes only itself out.
"""

from __future__ import annotations

from moefold.bench.our_layer import ours
from moefold.bench.peers.automodel import automodel
from moefold.bench.peers.megatron import megatron
from moefold.bench.peers.torchtitan import torchtitan
from moefold.bench.peers.transformers import transformers
from moefold.bench.roofline import DenseEngine, GroupedEngine
from moefold.bench.runner import Builder

BARE: dict[str, Builder] = {"dense": DenseEngine, "grouped_mm": GroupedEngine}
OURS: dict[str, Builder] = {
    "moefold fused": ours("fused", "native"),
    "moefold fused in torch": ours("fused"),
    "moefold sequential": ours("sequential"),
}
PEERS: dict[str, Builder] = {
    "transformers eager": transformers("eager"),
    "transformers grouped_mm": transformers("grouped_mm"),
    "torchtitan": torchtitan,
    "megatron-core": megatron,
    "automodel torch": automodel("torch"),
    "automodel torch_mm": automodel("torch_mm"),
}
CONTESTANTS = BARE | OURS | PEERS
