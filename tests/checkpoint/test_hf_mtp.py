"""DeepSeek-V3's MTP module is exported under its published names and imported again, and computes the same there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.body.model_inputs import batch_of
from tests.checkpoint.hf_sources import Imagined, loaded_by_transformers, saved_by_transformers, tensors_in
from tests.checkpoint.test_hf_refusals import Tensors, write_directory
from tests.support import on_ranks
from torch import Tensor

from moefold.blueprint.parameters import is_mtp
from moefold.checkpoint.hf.config_maps import family_rules
from moefold.checkpoint.hf.gather_weights import hf_weights
from moefold.checkpoint.hf.hf_config import canonical_model, family_of, read_config, write_config
from moefold.checkpoint.hf.hf_conversion import Export, export, import_directory
from moefold.checkpoint.hf.hf_directory import HfDirectory, weight_keys
from moefold.checkpoint.hf.logits_check import largest_difference
from moefold.checkpoint.hf.name_rules import hf_tensors
from moefold.checkpoint.load import load_into
from moefold.checkpoint.single_process import StoredWeights
from moefold.cli.main import main
from moefold.comm.process_groups import Groups
from moefold.config.parallel import ParallelConfig
from moefold.errors import ConversionError
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder
from moefold.parallel.parallelize import build_local_model
from moefold.recipes.catalog import RECIPES

RUN = RECIPES["deepseek_v3_proxy"]()
MODEL = replace(RUN.model, num_mtp=1)
LAYERS = MODEL.num_layers
MTP_PREFIX = f"model.layers.{LAYERS}."
SEQ_LEN = 19


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    export(Imagined(MODEL), Export(MODEL, 64, torch.float32), tmp_path / "hf")
    return tmp_path / "hf"


def test_names_are_the_published_ones(exported: Path) -> None:
    """As the index of the published weights lists layer 61, at our size."""
    found = tensors_in(exported)
    mtp_names = {name.removeprefix(MTP_PREFIX) for name in found if name.startswith(MTP_PREFIX)}
    latent = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    feed_forwards = ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(16))]
    assert mtp_names == {
        "embed_tokens.weight",
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "shared_head.head.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        *(f"self_attn.{name}.weight" for name in latent),
        *(f"{block}.{name}_proj.weight" for block in feed_forwards for name in ("gate", "up", "down")),
    }
    assert found[MTP_PREFIX + "eh_proj.weight"].shape == (64, 128)
    assert torch.equal(found[MTP_PREFIX + "embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found[MTP_PREFIX + "shared_head.head.weight"], found["lm_head.weight"])
    config = json.loads((exported / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and config["num_hidden_layers"] == LAYERS


@pytest.mark.parametrize(
    "model",
    [MODEL, replace(MODEL, num_mtp=2), replace(MODEL, tied_embeddings=True)],
    ids=["one", "two", "tied"],
)
def test_there_and_back_is_bitwise(model: Any, tmp_path: Path) -> None:
    source = Imagined(model)
    export(source, Export(model, 64, torch.float32, max_shard=100_000), tmp_path / "hf")
    done, run = import_directory(HfDirectory(tmp_path / "hf"), tmp_path / "runs", "x")
    assert canonical_model(run.model) == canonical_model(model) and done.notes == ()
    stored = StoredWeights(done.path)
    assert sorted(stored.names()) == sorted(source.names())
    assert all(torch.equal(stored.read(name), source.read(name)) for name in source.names())
    assert sum("mtp" in name for name in source.names()) > 10
    export(stored, Export(run.model, 64, torch.float32), tmp_path / "again")
    first, second = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "again")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---- transformers as a second opinion ----


def _decoder(source: Any) -> Decoder:
    decoder = build_decoder(MODEL, torch.float32, local_interfaces("sequential"))
    decoder.load_state_dict({name: source.read(key) for name, key in weight_keys(MODEL).items()})
    return decoder


def _spread(source: Imagined) -> dict[str, Tensor]:
    """Weights with which every layer matters: norms near 1, and logits that differ from token to token."""
    state = {}
    for key in source.names():
        value = source.read(key)
        state[key] = (
            1 + value if "norm" in key else value * (10 * value.shape[-1] ** -0.5) if value.dim() > 1 else value
        )
    return state


class Given:
    """Weights in memory as a source."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def names(self) -> list[str]:
        return list(self.state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.state[name].dtype

    def read(self, name: str, box: Any = None) -> Tensor:
        return self.state[name] if box is None else self.state[name][box]


def test_transformers_loads_it_with_equal_logits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = Given(_spread(Imagined(MODEL)))
    export(source, Export(MODEL, 64, torch.float32), tmp_path / "hf")
    largest, spread = largest_difference(source, MODEL, tmp_path / "hf")
    assert spread > 0.1 and largest < 1e-5 * max(spread, 1)


def test_transformers_drafts_the_same_token_further_ahead(tmp_path: Path) -> None:
    """Its own module for drafting, loaded from what we wrote, against ours with the same weights."""
    pytest.importorskip("transformers")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no MTP modules")
    source = Given(_spread(Imagined(MODEL)))
    export(source, Export(MODEL, 64, torch.float32), tmp_path / "hf")
    main_model: Any = loaded_by_transformers(tmp_path / "hf")
    # The names of its modules are known to it only for the published number of layers.
    main_model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}.*"]
    theirs = layers.MtpModel.from_pretrained(main_model).eval()
    batch = batch_of(1, SEQ_LEN, MODEL.vocab_size)
    tokens = batch.tokens_S.view(1, SEQ_LEN)
    with torch.no_grad():
        hidden = main_model(tokens, output_hidden_states=True).hidden_states[-1][:, :-1]
        expected = theirs.forward_layer(0, hidden, torch.arange(1, SEQ_LEN)[None], None, input_ids=tokens[:, 1:])
        expected_TV = main_model.lm_head(expected)[0]
        found_TV = _logits_ahead(_decoder(source), tokens[0])[:-1]
    assert expected_TV.std() > 0.1
    torch.testing.assert_close(found_TV, expected_TV, rtol=0, atol=1e-4 * float(expected_TV.std()))


def _logits_ahead(decoder: Decoder, tokens_S: Tensor) -> Tensor:
    """What module 0 predicts: fed with what the head reads, as everyone who runs these modules feeds them."""
    ahead_T = torch.cat((tokens_S[1:], tokens_S[:1]))
    batch = replace(batch_of(1, SEQ_LEN, MODEL.vocab_size), tokens_S=tokens_S)
    x_TD = decoder.embedding(tokens_S)  # type: ignore[misc]
    for layer in decoder.layers.values():
        x_TD = layer(x_TD, batch).x_tD
    x_TD = decoder.final_norm(x_TD)  # type: ignore[misc]
    y_TD = decoder.mtp["0"](x_TD, decoder.embedding(ahead_T), batch).x_tD  # type: ignore[misc]
    logits_TV: Tensor = decoder.mtp_norms["0"](y_TD) @ decoder.head_weight.T
    return logits_TV


def test_what_transformers_saves_is_imported_without_the_module(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    saved_by_transformers(RUN, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    key = next(key for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in config)
    path.write_text(json.dumps(config | {key: 1}))
    done, run = import_directory(HfDirectory(tmp_path / "theirs"), tmp_path / "runs", "x")
    assert run.model.num_mtp == 0 and not any("mtp" in name for name in StoredWeights(done.path).names())
    assert any(
        "num_nextn_predict_layers = 1, but the files have no tensor of such a layer" in note for note in done.notes
    )


# ---- refusals ----


def _written(exported: Path) -> tuple[Tensors, dict[str, Any]]:
    return tensors_in(exported), json.loads((exported / "config.json").read_text())


@pytest.mark.parametrize(
    ("copy", "original"),
    [("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", "lm_head.weight")],
)
def test_a_copy_that_is_none_is_refused_by_name(exported: Path, tmp_path: Path, copy: str, original: str) -> None:
    tensors, config = _written(exported)
    tensors[MTP_PREFIX + copy] = tensors[MTP_PREFIX + copy].clone()
    tensors[MTP_PREFIX + copy][200, 3] += 1
    with pytest.raises(ConversionError, match=re.escape(f"{MTP_PREFIX}{copy}: is not equal to {original}")):
        HfDirectory(write_directory(tmp_path / "x", tensors, config))
    del tensors[MTP_PREFIX + copy]
    HfDirectory(write_directory(tmp_path / "x", tensors, config)).close()


def test_a_module_in_part_is_refused_by_what_is_missing(exported: Path, tmp_path: Path) -> None:
    tensors, config = _written(exported)
    del tensors[MTP_PREFIX + "eh_proj.weight"], tensors[MTP_PREFIX + "mlp.experts.3.up_proj.weight"]
    tensors[MTP_PREFIX + "ffn.weight"] = torch.ones(3)
    with pytest.raises(ConversionError) as caught:
        HfDirectory(write_directory(tmp_path / "x", tensors, config))
    told = {problem.path.removeprefix(MTP_PREFIX): problem.message for problem in caught.value.problems}
    assert told.keys() == {"eh_proj.weight", "mlp.experts.3.up_proj.weight", "ffn.weight"}
    assert "mtp.0.join.weight" in told["eh_proj.weight"]


def test_a_module_that_config_does_not_speak_of_is_left_out(exported: Path, tmp_path: Path) -> None:
    tensors, config = _written(exported)
    opened = HfDirectory(write_directory(tmp_path / "x", tensors, config | {"num_nextn_predict_layers": 0}))
    assert opened.config.model.num_mtp == 0
    assert set(opened.skipped) == {name for name in tensors if name.startswith(MTP_PREFIX)}


@pytest.mark.parametrize("number", [-1, 10**9, True, 1.5, "1"])
def test_a_number_of_modules_that_cannot_be_is_refused(number: object) -> None:
    config = write_config(MODEL, "deepseek_v3", 64, "float32") | {"num_nextn_predict_layers": number}
    with pytest.raises(ConversionError, match="num_nextn_predict_layers"):
        read_config(config)


def test_rules_cover_the_full_size_model() -> None:
    model = replace(RECIPES["deepseek_v3"]().model, num_mtp=1)
    found = [
        hf_tensor for hf_tensor in hf_tensors(family_rules("deepseek_v3"), model) if is_mtp(hf_tensor.moefold_name)
    ]
    assert {hf_tensor.hf_name.split(".")[2] for hf_tensor in found} == {"61"}
    assert len(found) == 4 + 2 + 7 + 2 + 3 + 3 * 256


def test_families_without_names_for_it_say_so_and_can_leave_it_out(tmp_path: Path) -> None:
    model = replace(RECIPES["qwen3_30b_a3b_proxy"]().model, num_mtp=1)
    with pytest.raises(ConversionError, match=r"model.num_mtp: qwen3_moe cannot express 1.*--no-mtp"):
        family_of(model)
    done = export(Imagined(model), Export(model, 64, torch.float32, mtp=False), tmp_path / "hf")
    assert done.notes == ("left out 1 MTP modules",)
    assert read_config(json.loads((tmp_path / "hf" / "config.json").read_text())).model.num_mtp == 0


def test_the_command_leaves_modules_out(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "from-hf", str(exported), str(tmp_path / "runs"), "--name", "x"]) == 0
    run = str(tmp_path / "runs" / "x")
    assert main(["convert", "to-hf", run, str(tmp_path / "with")]) == 0
    assert main(["convert", "to-hf", run, str(tmp_path / "without"), "--no-mtp"]) == 0
    assert "left out 1 MTP modules" in capsys.readouterr().out
    whole, less = tensors_in(tmp_path / "with"), tensors_in(tmp_path / "without")
    assert {name for name in whole if name not in less} == {name for name in whole if name.startswith(MTP_PREFIX)}


# ---- a running model ----


def test_a_sharded_model_streams_what_a_file_would_hold(exported: Path, tmp_path: Path) -> None:
    done, imported = import_directory(HfDirectory(exported), tmp_path / "runs", "x")
    sharded = replace(imported, parallel=ParallelConfig(tp=2, ep=4))
    expected = tensors_in(exported)

    def work(groups: Groups) -> int:
        local_model = build_local_model(sharded, groups, torch.device("cpu"))
        load_into(done.path, local_model, None)
        names = []
        for name, tensor in hf_weights(local_model):
            assert torch.equal(tensor, expected[name]), name
            names.append(name)
        assert sorted(names) == sorted(expected)
        return len(names)

    assert set(on_ranks(work, 4, tp=2, ep=4)) == {len(expected)}
