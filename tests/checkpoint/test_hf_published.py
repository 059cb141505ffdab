"""Published models of families that have no recipe: counted at full size, compared with transformers at small size."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import save_file
from tests.body.model_inputs import batch_of
from tests.checkpoint.hf_sources import Imagined, decoder_of, loaded_by_transformers, tensors_in
from tests.hf_models import FAMILY_PROXIES
from tests.hf_weights import randomize
from tests.marks import slow_except
from tests.published_models import PUBLISHED, documented, hf_model, model_of, small, transformers_in_float64
from tests.support import on_ranks

from moefold.blueprint.param_counts import count_parameters
from moefold.blueprint.parameters import buffers
from moefold.checkpoint.hf.config_maps import FAMILIES
from moefold.checkpoint.hf.gather_weights import hf_weights
from moefold.checkpoint.hf.hf_config import canonical_model, family_of, read_config
from moefold.checkpoint.hf.hf_conversion import Export, export, import_directory
from moefold.checkpoint.hf.hf_directory import HfDirectory
from moefold.checkpoint.load import load_into
from moefold.checkpoint.single_process import StoredWeights
from moefold.comm.process_groups import Groups
from moefold.config.parallel import ParallelConfig
from moefold.errors import ConversionError
from moefold.parallel.parallelize import build_local_model
from moefold.recipes.catalog import recipe

LENGTH = 37
LOSS_FREE_BIAS = "e_score_correction_bias"


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_published_size_equal_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        theirs = hf_model(PUBLISHED[name])
    model = model_of(PUBLISHED[name])
    found = {key: value.numel() for key, value in theirs.named_parameters() if not key.endswith(LOSS_FREE_BIAS)}
    assert count_parameters(model).total == sum(found.values())
    biases = sum(value.numel() for key, value in theirs.state_dict().items() if key.endswith(LOSS_FREE_BIAS))
    assert biases == sum(spec.size for spec in buffers(model))


@pytest.mark.parametrize("name", PUBLISHED)
def test_import_and_export_keep_every_logit_and_bit(name: str, tmp_path: Path) -> None:
    theirs = hf_model(small(name)).float().eval()
    randomize(theirs, seed=1)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    batch = batch_of(2, LENGTH, small(name)["vocab_size"])
    tokens = batch.tokens_S.view(2, LENGTH)

    done, imported = import_directory(HfDirectory(tmp_path / "theirs"), tmp_path / "runs", "imported")
    assert canonical_model(imported.model) == canonical_model(model_of(small(name)))
    stored = StoredWeights(done.path)
    with torch.no_grad():
        expected = theirs(tokens).logits.flatten(0, 1)
        found, wanted = decoder_of(stored, imported.model), expected
        if imported.model.linear_attention is not None:
            wide = copy.deepcopy(theirs).double()
            with transformers_in_float64(wide):
                found, wanted = found.double(), wide(tokens).logits.flatten(0, 1)
            found.embedding.compute = torch.float64
        logits = found.logits(batch)
    assert expected.std() > 0.1
    assert (logits - wanted).abs().max() <= documented()[name].largest_difference

    export(stored, Export(imported.model, 64, torch.float32), tmp_path / "ours")
    before, after = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    with torch.no_grad():
        again = loaded_by_transformers(tmp_path / "ours")(tokens).logits.flatten(0, 1)
    assert torch.equal(again, expected)


def test_the_table_of_the_documents_has_every_family_and_its_numbers() -> None:
    rows = documented()
    assert all(row.largest_difference <= 1e-5 for row in rows.values())
    assert PUBLISHED.keys() | {name.removesuffix("_proxy") for name in FAMILY_PROXIES} == rows.keys()
    assert {row.model_type for row in rows.values()} == FAMILIES.keys()
    for name, row in rows.items():
        model = model_of(PUBLISHED[name]) if name in PUBLISHED else replace(recipe(name).model, num_mtp=0)
        assert count_parameters(model).total == row.parameters, name
        assert family_of(model) == row.model_type, name


@pytest.mark.parametrize("name", slow_except(PUBLISHED, "ERNIE-4.5-21B-A3B", "Llama-4-Maverick"))
def test_a_sharded_model_streams_the_weights_that_were_imported(name: str, tmp_path: Path) -> None:
    model = hf_model(small(name)).float()
    randomize(model, seed=1)
    model.save_pretrained(tmp_path / "theirs")
    expected = tensors_in(tmp_path / "theirs")
    done, imported = import_directory(HfDirectory(tmp_path / "theirs"), tmp_path / "runs", "imported")
    degrees = {"pp": 2, "ep": 2} if imported.model.moe is not None else {"pp": 2, "tp": 2}
    run = replace(imported, parallel=ParallelConfig(**degrees))

    def work(groups: Groups) -> int:
        local_model = build_local_model(run, groups, torch.device("cpu"))
        load_into(done.path, local_model, None)
        found = dict(hf_weights(local_model))
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
        return len(found)

    assert set(on_ranks(work, 4, **degrees)) == {len(expected)}


def test_mtp_modules_of_glm_are_stored_as_the_layers_after_the_last(tmp_path: Path) -> None:
    model = replace(model_of(small("GLM-4.5")), num_mtp=1)
    export(Imagined(model), Export(model, 64, torch.float32), tmp_path / "ours")
    names = tensors_in(tmp_path / "ours").keys()
    assert {f"model.layers.3.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.head")} <= names
    assert "model.layers.3.mlp.gate.e_score_correction_bias" in names
    found = HfDirectory(tmp_path / "ours")
    assert canonical_model(found.config.model) == canonical_model(model)
    assert all(torch.equal(found.read(key), Imagined(model).read(key)) for key in found.names())


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("GLM-4.5", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("GLM-4.5", {"use_qk_norm": "yes"}, "use_qk_norm"),
        ("dots.llm1", {"sliding_window": 64, "max_window_layers": 1}, "sliding_window"),
        ("MiniMax-M2", {"rotary_dim": 8, "partial_rotary_factor": 0.25}, "rotary_dim"),
        ("MiniMax-M2", {"use_routing_bias": False}, "use_routing_bias"),
        ("ERNIE-4.5-21B-A3B", {"moe_layer_interval": 2}, "moe_layer_interval"),
        ("ERNIE-4.5-21B-A3B", {"moe_layer_end_index": 1}, "moe_layer_end_index"),
        ("Llama-4-Scout", {"moe_layers": [0, 1]}, "moe_layers"),
        ("Llama-4-Scout", {"no_rope_layers": [0, 1, 1, 0]}, "no_rope_layers"),
        ("Llama-4-Scout", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("Llama-4-Scout", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.original_max_"),
        ("Hunyuan-A13B", {"moe_topk": [1, 2, 2]}, "moe_topk"),
        ("Hunyuan-A13B", {"num_shared_expert": 2}, "num_shared_expert"),
        ("Hunyuan-A13B", {"use_cla": True}, "use_cla"),
        ("Qwen3-Next-80B-A3B", {"layer_types": ["full_attention", "linear_attention"] * 2 + ["x"]}, "layer_types"),
        ("Qwen3-Next-80B-A3B", {"full_attention_interval": 9}, "model.linear_attention.full_attention_every"),
        ("Qwen3-Next-80B-A3B", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("Qwen3-Next-80B-A3B", {"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_a_family_cannot_express_is_refused_by_key(name: str, changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConversionError) as caught:
        read_config(small(name) | changes)
    assert any(problem.path.startswith(f"config.json: {key}") for problem in caught.value.problems)


def test_the_language_model_of_a_llama_4_is_read_without_its_vision_model(tmp_path: Path) -> None:
    model = model_of(small("Llama-4-Maverick"))
    export(Imagined(model), Export(model, 64, torch.float32), tmp_path / "text")
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    assert config["model_type"] == "llama4_text"
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors_in(tmp_path / "text").items()}
    tensors |= {"vision_model.class_embedding": torch.zeros(3), "multi_modal_projector.linear_1.weight": torch.ones(2)}
    (tmp_path / "whole").mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    outer = {"model_type": "llama4", "text_config": config, "vision_config": {"hidden_size": 4}}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(outer))
    found = HfDirectory(tmp_path / "whole")
    assert canonical_model(found.config.model) == canonical_model(model)
    assert set(found.skipped) == {"vision_model.class_embedding", "multi_modal_projector.linear_1.weight"}
    assert all(torch.equal(found.read(key), Imagined(model).read(key)) for key in found.names())
