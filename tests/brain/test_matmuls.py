"""Parameters, matmuls and stages of shapes that no recipe has, counted by hand."""

from __future__ import annotations

import pytest

from moefold.blueprint.flops import core_flops, training_flops
from moefold.blueprint.matmuls import Matmul, layer_matmuls
from moefold.blueprint.model_shape import Attention, Dense, Layer, ModelShape, MoE, Recurrence
from moefold.blueprint.param_counts import LayerCounts, active_layer_size, layer_counts
from moefold.blueprint.stages import StageSpec, even_stages, print_stages

D = 64
MLA = Attention(4, 4, 24, 16, q_latent=32, kv_latent=8, rope_dim=8)
ONE_KV_HEAD = Attention(8, 1, 16, 16, q_latent=32)
MAMBA = Recurrence(heads=6, head_dim=10, state=12, groups=2)
# Layer: matrices that tp shards, those that it replicates, experts.
COUNTS = {
    "mla": (Layer(MLA, None), (32 * 96 + 8 * 4 * (16 + 16) + 64 * 64, D * (32 + 8 + 8), 0)),
    "one key/value head, latent queries": (Layer(ONE_KV_HEAD, None), (32 * 128 + D * 32 + 128 * D, D * 32, 0)),
    "recurrence": (Layer(MAMBA, None), (D * (2 * 60 + 2 * 24 + 6) + 60 * D, 0, 0)),
    "ungated": (Layer(None, Dense(100, gated=False)), (2 * D * 100, 0, 0)),
    "ungated experts in a latent": (
        Layer(None, MoE(16, 2, 20, shared_hidden_dim=30, latent=12, gated=False)),
        (2 * D * 30, D * 16 + 2 * D * 12, 16 * 2 * 12 * 20),
    ),
    "gated shared expert": (Layer(None, MoE(16, 2, 20, 30, shared_gate=True)), (3 * D * 30, D * 17, 16 * 3 * D * 20)),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_matrices_by_hand(name: str) -> None:
    layer, expected = COUNTS[name]
    assert layer_counts(layer, D) == LayerCounts(*expected)


@pytest.mark.parametrize("name", COUNTS)
def test_every_active_matrix_is_a_matmul(name: str) -> None:
    layer, (sharded, replicated, experts) = COUNTS[name]
    routed = experts // layer.feed.experts * layer.feed.top_k if isinstance(layer.feed, MoE) else 0
    assert sum(row.flops for row in layer_matmuls(layer, D)) == 2 * (sharded + replicated + routed)


def test_rows_of_the_table() -> None:
    rows = {row.name: row for row in layer_matmuls(Layer(ONE_KV_HEAD, MoE(16, 2, 20)), D)}
    assert rows["q_down"] == Matmul("q_down", "attention", D, 32)
    assert rows["q_up"] == Matmul("q_up", "attention", 32, 128, sharded="outer")
    assert rows["kv"] == Matmul("kv", "attention", D, 32, sharded="outer", least_outer=32)
    assert rows["out"] == Matmul("out", "attention", 128, D, sharded="inner")
    assert rows["experts.gate_up"] == Matmul("experts.gate_up", "routed", D, 40, 2, 16, "outer")
    assert rows["experts.down"] == Matmul("experts.down", "routed", 20, D, 2, 16, "inner")
    assert rows["router"] == Matmul("router", "router", D, 16)
    assert list(rows) == ["q_down", "q_up", "kv", "out", "router", "experts.gate_up", "experts.down"]


def test_flops_of_a_hybrid_model() -> None:
    """Three times the matmuls and cores of the layers, of the MTP module with its join, and of both heads."""
    block = Layer(ONE_KV_HEAD, Dense(100))
    layers = (Layer(MAMBA, None), block)
    scan, scores = 2 * 60 * 2 * 12, 2 * 8 * 32 * (128 / 2)
    assert (core_flops(layers[0], 128), core_flops(block, 128)) == (scan, scores)
    mamba = 2 * sum(COUNTS["recurrence"][1]) + scan
    attention = 2 * sum(COUNTS["one key/value head, latent queries"][1]) + scores + 2 * 3 * D * 100
    expected = mamba + 2 * attention + 2 * 2 * D * D + 2 * 2 * D * 1000
    assert training_flops(ModelShape(D, 1000, layers, mtp_layers=(block,)), 128) == 3 * expected


def test_even_stages() -> None:
    """Evenly; with the ends in place of a layer each; else so that the most expensive stage is as cheap as possible."""
    layer = Layer(MLA, Dense(100))
    assert print_stages(even_stages(ModelShape(D, 10, (layer,) * 8), 4)) == "Ett|tt|tt|ttL"
    assert print_stages(even_stages(ModelShape(D, 10, (layer,) * 6), 4)) == "Et|tt|tt|tL"
    assert even_stages(ModelShape(D, 10, (layer,) * 2, mtp_layers=(layer,)), 2) == (
        StageSpec(0, True, range(0, 1), (), False),
        StageSpec(1, False, range(1, 2), (0,), True),
    )
    # A head as expensive as two layers leaves one beside it; 7 layers over 3 ranks.
    vocab = 2 * active_layer_size(layer, D) // D
    assert print_stages(even_stages(ModelShape(D, vocab, (layer,) * 8), 3)) == "Et*3|t*3|ttL"
