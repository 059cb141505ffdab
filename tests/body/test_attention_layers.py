"""Attention layers: causality, separate sequences, windows by layer, and shares of heads that add up to the whole."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.body.model_inputs import batch_of, fill
from torch import Tensor, nn

from moefold.attention.core import LocalCore
from moefold.attention.gqa import GroupedQueryAttention
from moefold.attention.mla import LatentAttention
from moefold.config.attention import GQAConfig, MLAConfig, RopeConfig, YarnConfig
from moefold.nn.matmul_policy import ParameterMatmul
from moefold.nn.parallel_interfaces import LocalTokens

WIDTH = 12
GQAS = {
    "plain": GQAConfig(num_heads=4, num_kv_heads=2, head_dim=6),
    "head norm": GQAConfig(num_heads=4, num_kv_heads=2, head_dim=6, qk_norm="head"),
    "full norm": GQAConfig(num_heads=4, num_kv_heads=4, head_dim=6, qk_norm="full"),
    "norm after rope": GQAConfig(num_heads=4, num_kv_heads=2, head_dim=6, qk_norm="head", qk_norm_when="after_rope"),
    "partial rope": GQAConfig(num_heads=4, num_kv_heads=2, head_dim=6, rope_dim=4),
    "chunks": GQAConfig(num_heads=4, num_kv_heads=2, head_dim=6, chunk=3, qk_norm="unit", qk_norm_when="after_rope"),
    "no rope": GQAConfig(
        num_heads=4, num_kv_heads=2, head_dim=6, chunk=3, nope_every=1, nope_temperature=0.5, nope_floor=2
    ),
    "everything": GQAConfig(
        num_heads=4, num_kv_heads=2, head_dim=6, qkv_bias=True, out_bias=True, sinks=True, window=3
    ),
    "output gate": GQAConfig(num_heads=4, num_kv_heads=2, head_dim=6, qk_norm="head", qkv_bias=True, output_gate=True),
}
MLAS = {
    "latent queries": MLAConfig(num_heads=4, q_latent=10, kv_latent=7, nope_dim=6, rope_dim=4, value_dim=5),
    "direct queries": MLAConfig(num_heads=4, q_latent=None, kv_latent=7, nope_dim=6, rope_dim=4, value_dim=5),
}
CASES = {**GQAS, **MLAS}
YARN = RopeConfig(interleaved=True, yarn=YarnConfig(original_context=16, mscale=1.0, mscale_all_dim=0.7))


@pytest.fixture(autouse=True)
def _float64() -> object:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _layer(config: GQAConfig | MLAConfig, tokens: LocalTokens | None = None, layer: int = 0) -> nn.Module:
    seam, matmul_policy = tokens or LocalTokens(), ParameterMatmul()
    if isinstance(config, GQAConfig):
        return GroupedQueryAttention(config, RopeConfig(), WIDTH, layer, 1e-6, seam, LocalCore(), matmul_policy)
    return LatentAttention(config, YARN, WIDTH, 1e-6, seam, LocalCore(), matmul_policy)


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_a_token_sees_only_the_past_of_its_own_sequence(config: GQAConfig | MLAConfig) -> None:
    attention, batch = _layer(config), batch_of(2, 5, 9)
    fill(attention)
    x = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for token in range(10):
        (grad,) = torch.autograd.grad(attention(x, batch)[token].sum(), x)
        seen = grad.abs().sum(-1).nonzero().flatten().tolist()
        first = token - token % 5
        if isinstance(config, GQAConfig) and config.window:
            first = max(first, token - config.window + 1)
        if isinstance(config, GQAConfig) and (chunk := config.chunk_of(0)):
            first += token % 5 // chunk * chunk
        assert seen == list(range(first, token + 1))


def test_the_window_applies_to_every_nth_layer() -> None:
    config = GQAConfig(window=4, window_every=2)
    assert [_layer(config, layer=i).window for i in range(4)] == [4, None, 4, None]


def test_layers_without_rope_have_no_chunks_and_no_norms_without_weights() -> None:
    config = GQAConfig(chunk=4, nope_every=2, nope_temperature=0.1, qk_norm="unit", qk_norm_when="after_rope")
    layers = [_layer(config, layer=i) for i in range(4)]
    assert [layer.chunk for layer in layers] == [4, None, 4, None]
    assert [layer.q_norm is not None for layer in layers] == [True, False, True, False]
    assert [layer.temperature for layer in layers] == [0.0, 0.1, 0.0, 0.1]


def test_the_gate_of_an_entry_is_the_sigmoid_of_the_row_beside_its_query() -> None:
    """Heads of the plain layer, times the sigmoid written out; the output projection is the identity."""
    heads, dim, width = 4, 6, 24
    fields = {"num_heads": heads, "num_kv_heads": 2, "head_dim": dim, "qk_norm": "head"}

    def layer(config: GQAConfig) -> nn.Module:
        return GroupedQueryAttention(
            config, RopeConfig(), width, 0, 1e-6, LocalTokens(), LocalCore(), ParameterMatmul()
        )

    gated, plain, batch = layer(GQAConfig(**fields, output_gate=True)), layer(GQAConfig(**fields)), batch_of(2, 5, 9)
    fill(gated)
    x = torch.randn(10, width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        gated.out.weight.copy_(torch.eye(width))
        by_head = gated.q.weight.view(heads, 2, dim, width)
        state = {**gated.state_dict(), "q.weight": by_head[:, 0].reshape(width, width)}
        plain.load_state_dict(state)
        gate = (x @ by_head[:, 1].reshape(width, width).T).neg().exp().add(1).reciprocal()
        torch.testing.assert_close(gated(x, batch), plain(x, batch) * gate, rtol=1e-12, atol=1e-13)


class _TwoRanks(LocalTokens):
    """Sums over heads between two threads, each of which holds half of the heads and all tokens."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.parts: list[list[Tensor]] = [[], []]
        self.rank = threading.local()

    def sum_heads(self, x: Tensor) -> Tensor:
        self.parts[self.rank.value].append(x)
        self.barrier.wait()
        which = len(self.parts[self.rank.value]) - 1
        return self.parts[0][which] + self.parts[1][which]


# Which dimension of each parameter is cut over ranks that share the heads; the others are whole everywhere.
_CUT = {
    "q.weight": 0, "k.weight": 0, "v.weight": 0, "q.bias": 0, "k.bias": 0, "v.bias": 0, "out.weight": 1, "sinks": 0,
    "q_up.weight": 0, "kv_up.weight": 0,
}  # fmt: skip


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_shares_of_heads_add_up_to_the_whole(config: GQAConfig | MLAConfig) -> None:
    whole, batch = _layer(config), batch_of(2, 5, 9)
    fill(whole)
    seam = _TwoRanks()
    x = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(2))
    outs: list[Tensor] = [x, x]

    def run(rank: int) -> None:
        seam.rank.value = rank
        with torch.no_grad():
            outs[rank] = _share(whole, config, seam, rank)(x, batch)

    torch.set_default_dtype(torch.float64)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bias = getattr(whole.out, "bias", None)
    joined = outs[0] + outs[1] - (0 if bias is None else bias)  # each half added it after its own reduce
    torch.testing.assert_close(joined, whole(x, batch), rtol=1e-11, atol=1e-12)


def _share(whole: nn.Module, config: GQAConfig | MLAConfig, seam: _TwoRanks, rank: int) -> nn.Module:
    local_model = _layer(config, seam)
    for name, value in whole.named_parameters():
        full_norm = isinstance(config, GQAConfig) and config.qk_norm == "full" and "norm" in name
        dim = 0 if full_norm else _CUT.get(name)
        mine = value if dim is None else value.chunk(2, dim)[rank]
        owner, _, leaf = name.rpartition(".")
        setattr(local_model.get_submodule(owner), leaf, nn.Parameter(mine.detach().clone()))
    return local_model
