"""What serving engines read of an export: architecture, config.json, the tokenizer's files and the index of tensors.

transformers is here in every run of the tests. vLLM and SGLang are asked where they are installed, `pip install
--no-deps` is enough: their tables of architectures are read as source, without importing them, so that neither a GPU
nor their own torch is needed. vLLM's own check of a model directory (`vllm.config.ModelConfig`) runs in a process of
its own where vLLM can be imported. The table of docs/hugging-face.md says which versions were asked.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers")

from tests.checkpoint.hf_sources import Imagined
from tests.hf_models import FAMILY_PROXIES
from tests.marks import slow_except
from tests.published_models import PUBLISHED, model_of, small
from transformers import AutoConfig, AutoModelForCausalLM

from moefold.checkpoint.hf.config_maps import FAMILIES
from moefold.checkpoint.hf.hf_config import family_of, write_config
from moefold.checkpoint.hf.hf_conversion import Export, export
from moefold.checkpoint.hf.hf_directory import INDEX
from moefold.config.model import ModelConfig
from moefold.recipes.catalog import RECIPES

CONTEXT = 64
ABSENT = object()
# config.json has the spelling of transformers 4, which 5 and the engines read too; left: ours, right: theirs.
SPELLINGS = {"torch_dtype": "dtype", "num_experts": "num_local_experts"}
ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_parameters")
# Keys that transformers writes beside ours, none of which changes what the model computes.
LEFT_OUT = {
    "transformers_version": "says who wrote the file",
    "attention_dropout": "in training only, and 0",
    "output_router_logits": "what a call returns, not what it computes",
    "router_aux_loss_coef": "in training only; a run's own balance loss is in its config.yaml",
    "router_jitter_noise": "in training only, and 0",
    "pretraining_tp": "asks for slower matmuls of the same result",
    "head_dim": "follows from the dims of latent attention",
    "qk_head_dim": "follows from the dims of latent attention",
    "layer_types": "follows from use_sliding_window, which is written as false",
    "max_window_layers": "has no meaning without sliding windows",
    "eod_token_id": "Hunyuan's default of a special token; tokens are the tokenizer's to say",
    "sep_token_id": "as eod_token_id",
}


def models() -> dict[str, ModelConfig]:
    """One small model per row of the table of families."""
    recipes = {name: replace(RECIPES[name]().model, num_mtp=0) for name in FAMILY_PROXIES}
    return recipes | {name: model_of(small(name)) for name in PUBLISHED}


@pytest.mark.parametrize("name", models())
def test_config_json_is_what_transformers_would_write(name: str, tmp_path: Path) -> None:
    model = models()[name]
    ours = write_config(model, family_of(model), CONTEXT, "float32")
    (tmp_path / "config.json").write_text(json.dumps(ours))
    read = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    read.save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())

    assert _rope(ours) == _rope(theirs)
    for old, new in SPELLINGS.items():
        if old in ours and old not in theirs:
            assert ours.pop(old) == theirs.pop(new), old
    for key in ROPE:
        ours.pop(key, None)
        theirs.pop(key, None)
    differ = {key for key in ours | theirs if ours.get(key, ABSENT) != theirs.get(key, ABSENT)}
    assert not differ & ours.keys()
    assert differ <= LEFT_OUT.keys()


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """In transformers 5's spelling: one object."""
    if "rope_parameters" in config:
        return dict(config["rope_parameters"])
    found = {"rope_type": "default", **(config["rope_scaling"] or {}), "rope_theta": config["rope_theta"]}
    return found | {key: config[key] for key in ("partial_rotary_factor",) if key in config}


@pytest.mark.parametrize("name", slow_except(models(), "GLM-4.5-Air", "gpt_oss_20b_proxy", "Llama-4-Scout"))
def test_an_export_has_every_tensor_and_file_that_an_engine_opens(name: str, tmp_path: Path) -> None:
    model = models()[name]
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    files = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "generation_config.json": '{"eos_token_id": 2}'}
    for file, text in files.items():
        (tokenizer / file).write_text(text)
    (tokenizer / "tokenization_own.py").write_text("raise SystemExit")
    plan = Export(model, CONTEXT, torch.float32, max_shard=100_000, tokenizer=tokenizer)
    done = export(Imagined(model), plan, tmp_path / "ours")

    config = AutoConfig.from_pretrained(tmp_path / "ours", local_files_only=True)
    theirs = AutoModelForCausalLM.from_config(config).float()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert type(theirs).__name__ == config.architectures[0] == FAMILIES[family_of(model)].architecture
    indexes = [json.loads((tmp_path / where / INDEX).read_text()) for where in ("ours", "theirs")]
    assert indexes[0]["weight_map"].keys() == indexes[1]["weight_map"].keys()
    assert indexes[0]["metadata"]["total_size"] == indexes[1]["metadata"]["total_size"]
    found = {file.name: file.read_text() for file in (tmp_path / "ours").glob("*.json") if file.name in files}
    assert found == files and set(files) <= set(done.files)
    assert not list((tmp_path / "ours").glob("*.py"))


# ---- vLLM and SGLang ----


class Row(NamedTuple):
    """Of the table of engines in docs/hugging-face.md: how each engine has an architecture."""

    architecture: str
    vllm: str
    sglang: str


def engines_table() -> dict[str, Row]:
    page = (Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([\w ]+) \| ([\w ]+) \|$", page, flags=re.MULTILINE)
    return {family: Row(*rest) for family, *rest in rows}


def test_the_table_of_engines_has_every_family_by_its_architecture() -> None:
    assert {family: row.architecture for family, row in engines_table().items()} == {
        family: table.architecture for family, table in FAMILIES.items()
    }


def test_architectures_are_in_the_registry_of_vllm() -> None:
    source, tables = _tree("vllm", "model_executor/models/registry.py"), {}
    for node in ast.walk(source):
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if _assigns(node) else None
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Dict):  # type: ignore[attr-defined]
            tables[target.id] = node.value  # type: ignore[attr-defined]
    own = _entries(tables["_TEXT_GENERATION_MODELS"])
    through = _entries(tables["_TRANSFORMERS_SUPPORTED_MODELS"])
    found = {
        family: "own" if table.architecture in own else "transformers" if table.architecture in through else "no"
        for family, table in FAMILIES.items()
    }
    assert found == {family: row.vllm for family, row in engines_table().items()}


def test_architectures_are_in_the_registry_of_sglang() -> None:
    folder, classes = _package("sglang") / "srt" / "models", set()
    for file in folder.glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if _assigns(node) and getattr(node.targets[0], "id", "") == "EntryClass":  # type: ignore[attr-defined]
                classes |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}  # type: ignore[attr-defined]
    # An architecture without a class of its own runs through SGLang's class around transformers.
    found = {family: "own" if table.architecture in classes else "transformers" for family, table in FAMILIES.items()}
    assert "TransformersForCausalLM" in classes
    assert found == {family: row.sglang for family, row in engines_table().items()}


@pytest.mark.slow
def test_vllm_accepts_the_directories(tmp_path: Path) -> None:
    """vLLM's own check: architecture, dtype, heads, context and experts, as its ModelConfig reads them."""
    folder = _package("vllm")
    rows, asked = engines_table(), {}
    for name, model in models().items():
        if rows[family_of(model)].vllm == "own":
            export(Imagined(model), Export(model, CONTEXT, torch.bfloat16), tmp_path / name)
            asked[name] = model
    lines = [
        "import json, sys",
        "from vllm.config import ModelConfig",
        "for path in sys.argv[1:]:",
        "    found = ModelConfig(model=path, skip_tokenizer_init=True)",
        "    facts = [found.architecture, str(found.dtype), found.get_vocab_size(), found.get_hidden_size()]",
        "    print('FOUND ' + json.dumps([path, *facts, found.get_total_num_hidden_layers()]), flush=True)",
    ]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(folder.parent), *sys.path])}
    command = [sys.executable, "-c", "\n".join(lines), *(str(tmp_path / name) for name in asked)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3000, check=False)
    if "ModuleNotFoundError" in done.stderr and "FOUND" not in done.stdout:
        pytest.skip(f"vLLM is installed without what it imports: {done.stderr.strip().splitlines()[-1]}")
    found = {Path(row[0]).name: row[1:] for row in _facts(done.stdout)}
    assert found.keys() == asked.keys(), done.stderr[-3000:]
    for name, model in asked.items():
        sizes = [model.vocab_size, model.dim, model.num_layers]
        assert found[name] == [rows[family_of(model)].architecture, "torch.bfloat16", *sizes], name


def _facts(text: str) -> list[list[Any]]:
    return [json.loads(line.removeprefix("FOUND ")) for line in text.splitlines() if line.startswith("FOUND ")]


def _assigns(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and len(node.targets) == 1


def _entries(table: ast.Dict) -> set[str]:
    return {key.value for key in table.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


@cache
def _package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    try:
        spec = find_spec(name)
        said = version(name)
    except (PackageNotFoundError, ValueError):
        spec, said = None, ""
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed: pip install --no-deps {name} is enough for its registry")
    documented = re.search(rf"{name} (\d+(?:\.\w+)*)", _page_in_lower_case())
    assert documented is not None
    if documented[1] != said:
        pytest.skip(f"the table is about {name} {documented[1]}, and {said} is installed")
    return Path(spec.origin).parent


def _page_in_lower_case() -> str:
    return (Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text().lower()


def _tree(package: str, path: str) -> ast.Module:
    return ast.parse((_package(package) / path).read_text(encoding="utf-8"))
