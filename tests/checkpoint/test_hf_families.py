"""Each family, from a directory that transformers saved to our model and back, without a bit or a logit lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.marks import slow_except

pytest.importorskip("transformers")

from tests.body.model_inputs import batch_of
from tests.checkpoint.hf_sources import (
    Imagined,
    decoder_of,
    loaded_by_transformers,
    saved_by_transformers,
    tensors_in,
)
from tests.hf_models import FAMILY_PROXIES
from tests.published_models import documented
from tests.support import on_ranks

from moefold.checkpoint.hf.gather_weights import hf_weights
from moefold.checkpoint.hf.hf_config import canonical_model, family_of, read_config, write_config
from moefold.checkpoint.hf.hf_conversion import Export, export, import_directory
from moefold.checkpoint.hf.hf_directory import HfDirectory
from moefold.checkpoint.load import load_into
from moefold.checkpoint.save import Saver
from moefold.checkpoint.single_process import StoredWeights
from moefold.checkpoint.state_dict import chunks_of, run_record
from moefold.cli.main import main
from moefold.comm.process_groups import Groups
from moefold.config.attention import GQAConfig
from moefold.config.loading import load_run_file
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.errors import ConversionError
from moefold.parallel.parallelize import build_local_model
from moefold.recipes.catalog import RECIPES


@pytest.mark.parametrize("name", FAMILY_PROXIES)
def test_import_and_export_keep_every_logit_and_bit(name: str, tmp_path: Path) -> None:
    run = RECIPES[name]()
    theirs = saved_by_transformers(run, tmp_path / "theirs", max_shard_size="300KB")
    batch = batch_of(2, 37, run.model.vocab_size)
    tokens = batch.tokens_S.view(2, 37)

    done, imported = import_directory(HfDirectory(tmp_path / "theirs"), tmp_path / "runs", "imported")
    assert canonical_model(imported.model) == canonical_model(run.model)
    assert load_run_file(tmp_path / "runs" / "imported" / "config.yaml") == imported
    stored = StoredWeights(done.path)
    with torch.no_grad():
        expected = theirs(tokens).logits.flatten(0, 1)
        found = decoder_of(stored, imported.model).logits(batch)
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= documented()[name.removesuffix("_proxy")].largest_difference

    export(stored, Export(imported.model, 64, torch.float32, max_shard=200_000), tmp_path / "ours")
    with torch.no_grad():
        again = loaded_by_transformers(tmp_path / "ours")(tokens).logits.flatten(0, 1)
    assert torch.equal(again, expected)
    before, after = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert max(file.stat().st_size for file in (tmp_path / "ours").glob("*.safetensors")) < 220_000

    back, _ = import_directory(HfDirectory(tmp_path / "ours"), tmp_path / "runs", "again")
    second = StoredWeights(back.path)
    assert all(torch.equal(stored.read(key), second.read(key)) for key in stored.names())


@pytest.mark.parametrize("name", slow_except(FAMILY_PROXIES, *FAMILY_PROXIES[:2]))
def test_a_sharded_model_loads_streams_and_saves_the_same_weights(name: str, tmp_path: Path) -> None:
    run = replace(RECIPES[name](), parallel=ParallelConfig(tp=2, ep=4))
    saved_by_transformers(run, tmp_path / "theirs")
    done, imported = import_directory(HfDirectory(tmp_path / "theirs"), tmp_path / "runs", "imported")
    sharded = replace(imported, parallel=run.parallel)
    expected = tensors_in(tmp_path / "theirs")

    def work(groups: Groups) -> int:
        local_model = build_local_model(sharded, groups, torch.device("cpu"))
        assert load_into(done.path, local_model, None)["origin"]["format"] == "huggingface"
        names = []
        for name, tensor in hf_weights(local_model):
            assert torch.equal(tensor, expected[name]), name
            names.append(name)
        assert sorted(names) == sorted(expected)
        saver = Saver(tmp_path / "saved", groups["world"], 0, background=False, about=run_record(local_model))
        saver.begin(7, chunks_of(local_model, None), {})
        saver.finish()
        return len(names)

    assert set(on_ranks(work, 4, tp=2, ep=4)) == {len(expected)}
    stored = StoredWeights(tmp_path / "saved" / "step_00000007")
    export(stored, Export(stored.run.model, 64, torch.float32), tmp_path / "ours")
    after = tensors_in(tmp_path / "ours")
    assert after.keys() == expected.keys() and all(torch.equal(after[key], expected[key]) for key in expected)


# Six experts over four data-parallel ranks, with no dim that divides by four: ranks hold 2, 2, 2 and no experts.
UNEVEN = ModelConfig(
    dim=66,
    num_layers=1,
    attention=GQAConfig(),
    moe=MoEConfig(num_experts=6, expert_hidden_dim=7, router=RouterConfig(normalize=True)),
)


@pytest.mark.parametrize(
    "degrees",
    slow_except(
        [{"ep": 2, "etp": 2}, {"ep": 2}, {"tp": 4}, {"ep": 2, "dp_replicate": 2, "edp_replicate": 2}, {}],
        {"ep": 2, "etp": 2},
        {},
    ),
    ids=str,
)
def test_streaming_undoes_every_cut(degrees: dict[str, int]) -> None:
    model = UNEVEN if not degrees else RECIPES["debug_tiny"]().model
    run = RunConfig(model=model, parallel=ParallelConfig(**degrees))

    def alone(groups: Groups) -> dict[str, list[float]]:
        return {name: tensor.flatten().tolist() for name, tensor in hf_weights(_share(run, groups))}

    whole = on_ranks(alone, 1)[0]

    def work(groups: Groups) -> int:
        found = dict(hf_weights(_share(run, groups)))
        assert found.keys() == whole.keys()
        for name, tensor in found.items():
            assert tensor.flatten().tolist() == whole[name], name
        return len(found)

    assert len(set(on_ranks(work, 4, **degrees))) == 1


def _share(run: RunConfig, groups: Groups):  # type: ignore[no-untyped-def]
    alone = groups.layout.world == 1
    return build_local_model(replace(run, parallel=ParallelConfig()) if alone else run, groups, torch.device("cpu"))


# Made for comparing layouts and not after a published model.
NOBODYS = "debug_10m"


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {NOBODYS}))
def test_every_recipe_has_a_family_that_can_say_it(name: str) -> None:
    model = RECIPES[name]().model
    family = family_of(model)
    assert canonical_model(read_config(write_config(model, family, 64, "float32")).model) == canonical_model(model)


def test_a_recipe_of_no_family_is_refused_by_what_cannot_be_said() -> None:
    with pytest.raises(ConversionError) as caught:
        family_of(RECIPES[NOBODYS]().model)
    assert {problem.path for problem in caught.value.problems} >= {
        "model.moe.shared_hidden_dim",
        "model.moe.router.scale",
    }


def test_the_command_goes_both_ways_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RECIPES["qwen3_30b_a3b_proxy"]()
    saved_by_transformers(run, tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "theirs" / "modeling_evil.py").write_text("raise SystemExit")
    capsys.readouterr()
    words = ["convert", "from-hf", str(tmp_path / "theirs"), str(tmp_path / "runs"), "--name", "q", "--check", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == "qwen3_moe" and report["check"]["largest_difference"] < 1e-5
    config = str(tmp_path / "runs" / "q" / "config.yaml")
    assert main(["check", config]) == 1 and "data.train: names no tokens" in capsys.readouterr().out
    assert main(["train", config]) == 2 and "data.train: names no tokens" in capsys.readouterr().err
    said = ["--data.train", "tokens", "--train.steps", "10", "--optim.lr", "1e-4"]
    assert main(["check", config, *said[:2]]) == 1 and "optim.lr: names no" in capsys.readouterr().out
    assert main(["check", config, *said]) == 0
    imported = load_run_file(Path(config))
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert imported.data.seq_len == theirs["max_position_embeddings"] and imported.precision.compute == "float32"
    assert any("router_aux_loss_coef" in note for note in report["notes"])
    capsys.readouterr()
    words = ["convert", "to-hf", str(tmp_path / "runs" / "q"), str(tmp_path / "ours"), "--dtype", "bfloat16", "--check"]
    assert main(words) == 0
    assert "logits equal" in capsys.readouterr().out
    carried = {file.name for file in (tmp_path / "ours").iterdir()}
    assert carried >= {"config.json", "model.safetensors", "tokenizer.json"} and "modeling_evil.py" not in carried
    assert main(words) == 2 and "exists already" in capsys.readouterr().err


def test_a_dense_model_is_upcycled_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = ModelConfig(vocab_size=64, moe=None, dense_hidden_dim=48, attention=GQAConfig(qk_norm="head"))
    export(Imagined(dense), Export(dense, 64, torch.float32), tmp_path / "dense")
    loaded_by_transformers(tmp_path / "dense")
    words = ["convert", "upcycle", str(tmp_path / "dense"), str(tmp_path / "runs"), "--name", "up"]
    assert main([*words, "--experts", "8", "--top-k", "4", "--shards", "2", "--check"]) == 0
    assert "logits equal" in capsys.readouterr().out
    assert main(["convert", "to-hf", str(tmp_path / "runs" / "up"), str(tmp_path / "moe"), "--check"]) == 0
    assert read_config(json.loads((tmp_path / "moe" / "config.json").read_text())).model_type == "qwen3_moe"
    assert main([*words, "--experts", "8", "--top-k", "3", "--shards", "2"]) == 2
    assert "top_k" in capsys.readouterr().err
    words[-1] = "scaled"
    assert main([*words, "--experts", "8", "--top-k", "4", "--shards", "2", "--check", "--scheme", "scaled"]) == 0
    assert "logits approximate" in capsys.readouterr().out
    moe = load_run_file(tmp_path / "runs" / "scaled" / "config.yaml").model.moe
    assert moe is not None and not moe.router.normalize
