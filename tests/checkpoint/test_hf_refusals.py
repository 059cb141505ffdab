"""What is not exactly a model's weights is refused, by the name of the tensor or key, before anything is written."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.hf_sources import Imagined
from tests.marks import slow_except
from tests.peak_memory import PeakMemory
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from moefold.checkpoint.hf.config_maps import family_rules
from moefold.checkpoint.hf.hf_config import family_of, read_config, write_config
from moefold.checkpoint.hf.hf_conversion import Export, export, import_directory
from moefold.checkpoint.hf.hf_directory import INDEX, SINGLE, HfDirectory
from moefold.checkpoint.hf.name_rules import NameRule, hf_tensors, parse_dims
from moefold.checkpoint.hf.untrusted_files import as_bytes, header
from moefold.checkpoint.shard_file import ShardReader
from moefold.checkpoint.single_process import StoredWeights
from moefold.checkpoint.tensor_spec import Box
from moefold.config.attention import GQAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.errors import ConversionError
from moefold.recipes.catalog import RECIPES

MODEL = RECIPES["debug_tiny"]().model
Tensors = dict[str, Tensor]


def write_directory(path: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    head = header((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    (path / SINGLE).write_bytes(head + b"".join(as_bytes(tensor) for tensor in tensors.values()))
    (path / "config.json").write_text(json.dumps(config or write_config(MODEL, "mixtral", 64, "float32")))
    return path


def good_tensors() -> Tensors:
    return {
        hf_tensor.hf_name: torch.ones(hf_tensor.hf_shape) for hf_tensor in hf_tensors(family_rules("mixtral"), MODEL)
    }


GATE = "model.layers.1.block_sparse_moe.gate.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.3.w2.weight"


def test_a_good_directory_opens(tmp_path: Path) -> None:
    HfDirectory(write_directory(tmp_path / "hf", good_tensors())).close()


def test_every_wrong_tensor_is_named_at_once(tmp_path: Path) -> None:
    tensors = good_tensors()
    del tensors[EXPERT]
    tensors[GATE] = torch.ones(8, 63)
    tensors["model.layers.2.input_layernorm.weight"] = torch.ones(64)
    directory = write_directory(tmp_path / "hf", tensors)
    with pytest.raises(ConversionError) as caught:
        import_directory(HfDirectory(directory), tmp_path / "runs", "x")
    told = {problem.path: problem.message for problem in caught.value.problems}
    assert told.keys() == {EXPERT, GATE, "model.layers.2.input_layernorm.weight"}
    assert "layers.0.feed_forward.experts.down[3]" in told[EXPERT] and "(8, 64)" in told[GATE]
    assert not (tmp_path / "runs").exists()


def test_a_type_that_is_no_weight_is_named(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "hf", good_tensors())
    content = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(content.replace(b'"F32","shape":[8,64]', b'"I32","shape":[8,64]'))
    with pytest.raises(ConversionError, match=r"gate.weight: is I32; weights are one of F64, F32, BF16, F16"):
        HfDirectory(directory)


def test_a_layer_that_predicts_further_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    model = RECIPES["deepseek_v3_proxy"]().model
    export(Imagined(model), Export(model, 64, torch.float32), tmp_path / "hf")
    directory = HfDirectory(tmp_path / "hf")
    tensors = {hf_tensor.hf_name: torch.ones(hf_tensor.hf_shape) for hf_tensor in directory.hf_tensors}
    tensors[f"model.layers.{model.num_layers}.eh_proj.weight"] = torch.ones(3)
    config = write_config(model, "deepseek_v3", 64, "float32") | {"auto_map": {"AutoModel": "evil.Model"}}
    done, _ = import_directory(HfDirectory(write_directory(tmp_path / "mtp", tensors, config)), tmp_path / "runs", "x")
    assert "auto_map" in done.notes[0] and "skipped 1 tensors" in done.notes[1]


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path: Path) -> None:
    config = write_config(MODEL, "mixtral", 64, "float32") | {"tie_word_embeddings": True}
    tensors = good_tensors()
    opened = HfDirectory(write_directory(tmp_path / "hf", tensors, config))
    assert opened.skipped == ("lm_head.weight",) and "parameter/head.weight" not in opened.names()
    tensors["lm_head.weight"][200, 3] = 2.0
    with pytest.raises(ConversionError, match=r"lm_head.weight: is not equal to model.embed_tokens.weight"):
        HfDirectory(write_directory(tmp_path / "hf", tensors, config))


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "hf", good_tensors())
    (directory / SINGLE).rename(directory / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"pytorch_model.bin is a pickle and is never opened"):
        HfDirectory(directory)


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "x\0.safetensors",
        3,
        INDEX,
        "link.safetensors",
    ],
)
def test_the_index_names_only_plain_files_beside_it(tmp_path: Path, file: object) -> None:
    directory = write_directory(tmp_path / "hf", good_tensors())
    (tmp_path / SINGLE).write_bytes((directory / SINGLE).read_bytes())
    (directory / "link.safetensors").symlink_to(tmp_path / SINGLE)
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(good_tensors(), file)}))
    with pytest.raises(ConversionError, match=r"not a file name|symbolic link"):
        HfDirectory(directory)


CONFIG = write_config(MODEL, "mixtral", 64, "float32")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 2**60}, "vocab_size"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok: 99 of 8 experts per token"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn", "factor": 8}}, "original_max_position_embeddings"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "mixtrol"}, "model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.weight_block_size"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ],
    ids=str,
)
def test_a_config_that_means_something_else_is_refused_by_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConversionError) as caught:
        read_config(CONFIG | change)
    assert key in str(caught.value)


def test_published_spellings_are_read() -> None:
    """Keys as Mixtral-8x7B's own config.json has them: no head_dim, rope_theta outside, torch_dtype."""
    published = {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    }
    found = read_config(published)
    expected = RECIPES["mixtral_8x7b"]().model
    assert replace(found.model, moe=None, dense_hidden_dim=1) == replace(expected, moe=None, dense_hidden_dim=1)
    assert found.model.moe is not None and found.context == 32768
    assert replace(found.model.moe, balance=expected.moe.balance) == expected.moe  # type: ignore[union-attr]


def test_a_model_that_no_family_can_say_is_refused_by_key() -> None:
    odd = replace(MODEL, moe=replace(MODEL.moe or MoEConfig(), latent_dim=16))
    with pytest.raises(ConversionError, match=r"model.moe.latent_dim: mixtral cannot express 16"):
        family_of(odd)


@pytest.mark.parametrize(("top_k", "top_groups", "fits"), [(4, 2, True), (2, 2, False), (6, 2, False), (6, 3, True)])
def test_groups_that_transformers_scores_otherwise_are_refused(top_k: int, top_groups: int, fits: bool) -> None:
    """DeepseekV3 there adds a group's best two scores, whatever top_k / top_groups is; both ways."""
    model = RECIPES["deepseek_v3_proxy"]().model
    assert model.moe is not None
    written = write_config(model, "deepseek_v3", 64, "bfloat16")
    router = replace(model.moe.router, top_groups=top_groups)
    other = replace(model, moe=replace(model.moe, top_k=top_k, router=router))
    changed = written | {"num_experts_per_tok": top_k, "topk_group": top_groups}
    if fits:
        assert family_of(other) == "deepseek_v3" and read_config(changed).model.moe is not None
        return
    for work in (lambda: family_of(other), lambda: read_config(changed)):
        with pytest.raises(ConversionError, match=f"topk_group: .* best two experts.* is {top_k} / {top_groups}"):
            work()
    one_group = replace(other, moe=replace(other.moe or model.moe, router=replace(router, num_groups=1, top_groups=1)))
    assert family_of(one_group) == "deepseek_v3"


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path) -> None:
    wider = replace(MODEL, vocab_size=300)
    with pytest.raises(ConversionError, match=r"parameter/embedding.weight: has shape \(256, 64\), not \(300, 64\)"):
        export(Imagined(MODEL), Export(wider, 64, torch.float32), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ---- rules ----


def test_dims_go_there_and_back() -> None:
    dims = parse_dims("e 2 f d = e d (f 2)", 4)
    tensor = torch.arange(3 * 2 * 5 * 7).view(3, 2, 5, 7)
    stored = dims.to_hf(tensor)
    assert stored.shape == (3, 7, 10) and torch.equal(stored[1, 4, 3], tensor[1, 1, 1, 4])
    assert torch.equal(dims.from_hf(stored, (3, 2, 5, 7)), tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda rules: rules[1:],
        lambda rules: (*rules, NameRule("layers.{i}.feed_forward.experts.down", "all.{i}")),
        lambda rules: (*rules[:1], NameRule("final_norm.weight", "model.embed_tokens.weight"), *rules[2:]),
        lambda rules: tuple(rule for rule in rules if not rule.moefold_name.endswith("[{e}, 1]")),
    ],
    ids=["one too few", "one covers twice", "a name twice", "a slice missing"],
)
def test_rules_that_are_no_bijection_are_refused(change: Any) -> None:
    hf_tensors(family_rules("mixtral"), MODEL)
    with pytest.raises(ConversionError):
        hf_tensors(change(family_rules("mixtral")), MODEL)


# ---- memory ----

LARGE = ModelConfig(
    vocab_size=64,
    dim=512,
    num_layers=2,
    moe=MoEConfig(num_experts=16, expert_hidden_dim=1024, router=RouterConfig(normalize=True)),
)
LARGE_GPT_OSS = replace(
    LARGE,
    attention=replace(GQAConfig(), qkv_bias=True, out_bias=True, sinks=True, window=8, window_every=2),
    moe=replace(
        LARGE.moe or MoEConfig(),
        router=RouterConfig(score_when="after_topk", logit_bias=True),
        activation="clamped_swiglu",
        expert_mlp_bias=True,
    ),
)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Peak bytes of tensors, and of Python's and numpy's buffers, that are allocated in the block."""
    peak = [0]
    tracemalloc.start()
    try:
        with PeakMemory() as tensors:
            yield peak
        peak[0] = tensors.peak + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("model", slow_except([LARGE, LARGE_GPT_OSS], LARGE), ids=["one tensor per expert", "stacked"])
def test_conversion_needs_less_than_twice_the_largest_tensor(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = ShardReader.view

    def uncounted(reader: ShardReader, dtype: torch.dtype, offset: int, chunk: Box, part: Box) -> Tensor:
        """A view into a mapped file is not memory of the process."""
        with _disable_current_modes():
            return view(reader, dtype, offset, chunk, part)

    monkeypatch.setattr(ShardReader, "view", uncounted)
    source = Imagined(model)
    largest = max(prod(shape) for shape in source.shapes.values()) * 4
    assert largest == 64 << 20
    with peak_memory() as exporting:
        export(source, Export(model, 64, torch.float32), tmp_path / "hf")
    directory = HfDirectory(tmp_path / "hf")
    with peak_memory() as importing:
        done, run = import_directory(directory, tmp_path / "runs", "x")
    directory.close()
    stored = StoredWeights(done.path)
    with peak_memory() as again:
        export(stored, Export(run.model, 64, torch.bfloat16), tmp_path / "again")
    print(f"largest {largest >> 20} MiB; peaks {[peak[0] >> 20 for peak in (exporting, importing, again)]} MiB")
    assert largest // 2 < importing[0] < 2 * largest  # it was measured, and it is bounded
    assert max(exporting[0], again[0]) < 2 * largest
