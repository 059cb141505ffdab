"""Parameters start as the papers say: which are normal, with which standard deviation, and which are not random.

Every number is made again here, element by element in Python's integers and floats, from the rule in the papers and
the definition of the generator (splitmix64's finaliser, a sum of eight 16-bit uniform integers).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import pytest
import torch
from torch import Tensor

from moefold.comm.spawn import spawn_ranks
from moefold.config.attention import GatedDeltaNetConfig, GQAConfig, MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.data.sample_order import mix
from moefold.nn.init import Box
from moefold.parallel.parallelize import build_local_model, groups_of
from moefold.parallel.param_shards import local_part
from moefold.recipes.catalog import RECIPES

MASK = (1 << 64) - 1
STD, LAYERS, SEED = 0.05, 3, 5
LATENT = MoEConfig(
    num_experts=4, expert_hidden_dim=8, shared_hidden_dim=8, shared_gate=True, latent_dim=8, expert_mlp_bias=True
)
# The last matrix of attention and of every feed-forward, as GPT-2 and Megatron scale them.
OUTPUTS = ("out.weight", ".down", "latent_up.weight")
AT_ZERO, AT_ONE = ("bias", "sinks"), "norm"


def model(output_scale: Literal["none", "depth"], *, mla: bool = False) -> ModelConfig:
    gqa = GQAConfig(num_heads=4, num_kv_heads=2, head_dim=4, sinks=True, qkv_bias=True, out_bias=True, qk_norm="head")
    return ModelConfig(
        vocab_size=16,
        dim=16,
        num_layers=LAYERS,
        attention=MLAConfig(num_heads=2, q_latent=8, kv_latent=8, nope_dim=4, rope_dim=4, value_dim=4) if mla else gqa,
        moe=LATENT,
        num_dense_layers=1,
        dense_hidden_dim=8,
        num_mtp=1,
        init_std=STD,
        init_output_scale=output_scale,
    )


def finaliser(word: int) -> int:
    word &= MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def element(name: str, number: int, std: float) -> float:
    """Of the flattened global tensor ``name``."""
    key = int.from_bytes(hashlib.sha256(f"{SEED}/{name}".encode()).digest()[:8], "little")
    total = 0
    for word in (finaliser(2 * number + key), finaliser(2 * number + 1 + key)):
        for shift in (0, 16, 32, 48):
            total += (word >> shift) & 0xFFFF
    mean, variance = 8 * (2**16 - 1) / 2, 8 * (2**32 - 1) / 12
    return (total - mean) * (std / math.sqrt(variance))


def written_out(name: str, shape: tuple[int, ...], output_scale: str) -> Tensor:
    if AT_ONE in name:
        return torch.ones(shape, dtype=torch.float64)
    if any(word in name for word in AT_ZERO):
        return torch.zeros(shape, dtype=torch.float64)
    std = STD
    if output_scale == "depth" and name.endswith(OUTPUTS):
        std = STD / math.sqrt(2 * LAYERS)
    flat = [element(name, number, std) for number in range(math.prod(shape))]
    return torch.tensor(flat, dtype=torch.float64).view(shape)


def started(config: ModelConfig, parallel: ParallelConfig, world: int, rank: int) -> dict[str, tuple[Tensor, Box]]:
    """What a rank holds of every parameter, and where in the whole it lies."""
    precision, kernels = PrecisionConfig(params="float64", compute="float64"), KernelsConfig(experts="sequential")
    run = RunConfig(model=config, parallel=parallel, seed=SEED, precision=precision, kernels=kernels)
    share = build_local_model(run, groups_of(run, world, rank, timedelta(seconds=120)), torch.device("cpu"))
    return {
        name: (local_part(value.detach()).clone(), share.param_shards[name].box)
        for name, value in share.model.named_parameters()
    }


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize("output_scale", ["none", "depth"])
def test_every_element_is_the_rules(output_scale: Literal["none", "depth"], mla: bool) -> None:
    found = started(model(output_scale, mla=mla), ParallelConfig(), 1, 0)
    for name, (value, _) in found.items():
        want = written_out(name, tuple(value.shape), output_scale)
        torch.testing.assert_close(value, want, rtol=1e-15, atol=0, msg=name)
    scaled = {name.split(".", 2)[-1] for name in found if name.endswith(OUTPUTS)}
    expected = {"attention.out.weight", "feed_forward.down", "feed_forward.experts.down", "feed_forward.shared.down"}
    assert {name.removeprefix("block.") for name in scaled} == expected | {"feed_forward.latent_up.weight"}


def test_norms_that_are_added_to_one_start_at_zero() -> None:
    centred = replace(model("none"), norm_scale="one_plus_weight")
    found = started(centred, ParallelConfig(), 1, 0)
    assert sum(AT_ONE in name for name in found) > 10
    assert all(not value.any() for name, (value, _) in found.items() if AT_ONE in name)


def test_decays_of_linear_attention_start_with_many_time_scales() -> None:
    """A_log is the logarithm of a number between 0.01 and 16, every number made again here; dt_bias is one."""
    linear = replace(model("none"), linear_attention=GatedDeltaNetConfig(8, 16, full_attention_every=3))
    found = started(linear, ParallelConfig(), 1, 0)
    name = "layers.1.attention.A_log"
    key = int.from_bytes(hashlib.sha256(f"{SEED}/{name}".encode()).digest()[:8], "little")
    uniform = [(finaliser(2 * number + key) >> 32) / 2**32 for number in range(16)]
    expected = torch.tensor([math.log(0.01 + (16 - 0.01) * x) for x in uniform], dtype=torch.float64)
    torch.testing.assert_close(found[name][0], expected, rtol=1e-14, atol=0)
    assert 0.2 < sum(uniform) / 16 < 0.8 and (found["layers.1.attention.dt_bias"][0] == 1).all()
    assert "layers.2.attention.A_log" not in found and "mtp.0.block.attention.q.weight" in found


def test_scaled_outputs_have_the_published_spread() -> None:
    """The rule's purpose, without the generator: std / sqrt(2 L), here 0.05 / sqrt(6), of all outputs together."""
    found = started(model("depth"), ParallelConfig(), 1, 0)
    outputs = torch.cat([value.flatten() for name, (value, _) in found.items() if name.endswith(OUTPUTS)])
    normal = (value for name, (value, _) in found.items() if not name.endswith((*OUTPUTS, *AT_ZERO, "bias")))
    others = torch.cat([value.flatten() for value in normal if not (value == 1).all()])
    assert outputs.std().item() == pytest.approx(STD / math.sqrt(6), rel=0.03)
    assert others.std().item() == pytest.approx(STD, rel=0.03)


def test_a_layout_starts_with_parts_of_the_same_numbers() -> None:
    config, parallel = model("depth"), ParallelConfig(tp=2, ep=2)
    whole = started(config, ParallelConfig(), 1, 0)

    def compare(rank: int) -> tuple[list[str], list[str], list[int]]:
        parts = started(config, parallel, 2, rank)
        wrong = [name for name, (value, box) in parts.items() if not torch.equal(value, whole[name][0][box])]
        return wrong, list(parts), list(parts["layers.1.feed_forward.experts.down"][0].shape)

    for wrong, names, shape in spawn_ranks(compare, 2, seconds=300):
        assert not wrong
        assert {*names} == {*whole}
        assert shape[0] == LATENT.num_experts // 2


# DeepSeek: the papers of V2 and V3, section on hyper-parameters. OLMoE: its published training configuration. The
# others: initializer_range of the published config.json.
PUBLISHED = {"deepseek": 0.006, "kimi": 0.02, "qwen3": 0.02, "mixtral": 0.02, "olmoe": 0.02, "gpt_oss": 0.02}


@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("debug")])
def test_recipes_start_with_the_published_std(name: str) -> None:
    (std,) = [value for family, value in PUBLISHED.items() if name.startswith(family)]
    assert RECIPES[name]().model.init_std == std


@pytest.mark.parametrize(
    ("recipe", "config"),
    [("qwen3_30b_a3b", "Qwen3Moe"), ("mixtral_8x7b", "Mixtral"), ("olmoe_1b_7b", "Olmoe"), ("gpt_oss_20b", "GptOss")],
)
def test_families_without_a_paper_agree_with_transformers(recipe: str, config: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert RECIPES[recipe]().model.init_std == getattr(transformers, f"{config}Config")().initializer_range


def test_the_hash_is_splitmix64s() -> None:
    """Its first outputs from seed 0, as its authors' program prints them; the shuffle of data uses the same one."""
    gamma, published = 0x9E3779B97F4A7C15, (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    for number, want in enumerate(published, start=1):
        assert finaliser(number * gamma) == mix(number * gamma & MASK) == want
