"""Commands for Megatron-LM and torchtitan say the run and the layout, in options that those frameworks have.

`framework_options.json` has the options of their own parsers (`tests/framework_parsers.py` records it, and gives the
commands of 40 questions to those parsers).
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import moefold
from moefold.api.runs import load_run
from moefold.hardware.cluster import cluster_of
from moefold.plan.framework_commands import framework_command
from moefold.plan.launch_command import layer_pattern
from moefold.plan.report.proposal_report import proposal_data
from moefold.plan.search.proposal import with_framework
from moefold.plan.workload import Workload, workload_of_run
from moefold.recipes.catalog import RECIPES

RECORDED: dict[str, list[str]] = json.loads((Path(__file__).parent / "framework_options.json").read_text("utf-8"))
OPTIONS = {"megatron": next(iter(RECORDED.values())), "fsdp2": RECORDED["torchtitan 0.3.0"]}
# Layouts that switch on what a command may say.
EVERYTHING = (
    {"parallel.pp": "4", "parallel.vpp": "2", "parallel.schedule": "interleaved"},
    {"parallel.tp": "2", "parallel.cp": "2", "memory.recompute": "[norms,activation]"},
    {"memory.recompute": "[full]", "kernels.graphs": "full", "parallel.dispatcher": "hybridep"},
    {"kernels.graphs": "partial", "precision.recipe": "fp8_tensor", "parallel.dispatcher": "deepep"},
    {"precision.recipe": "nvfp4", "precision.moments": "bfloat16", "memory.optimizer": "host"},
    {"model.num_mtp": "1", "optim.lr": "1e-4", "optim.lr_schedule.kind": "cosine", "optim.lr_schedule.warmup": "10"},
)


def planned(name: str, framework: str, changes: dict[str, str] | None = None, release: str = "") -> Workload:
    one = {"data.global_batch": "512", "parallel.pp": "1", "parallel.tp": "1", "parallel.cp": "1", "parallel.ep": "4"}
    run = load_run(name, one | (changes or {}))
    if run.model.moe is None:
        run = load_run(name, one | (changes or {}) | {"parallel.ep": "1"})
    workload = workload_of_run(run, cluster_of("H100", 64), 1.0)
    return with_framework(workload, framework, release)  # type: ignore[arg-type]


def said(workload: Workload) -> dict[str, list[str]]:
    """Options with their values."""
    command = framework_command(workload)
    assert command is not None
    found: dict[str, list[str]] = {}
    for word in shlex.split(" ".join(command.words)):
        if word.startswith("--"):
            found[word] = []
        elif found:
            found[list(found)[-1]].append(word)
    return found


@pytest.mark.parametrize("framework", OPTIONS)
def test_every_option_is_one_of_the_frameworks_parser(framework: str) -> None:
    own = {"--nnodes", "--node-rank", "--master-addr", "--master-port", "--nproc-per-node", "--module", "--config"}
    written = 0
    for name in RECIPES:
        for changes in ({}, *EVERYTHING):
            command = framework_command(planned(name, framework, dict(changes)))
            if command is None:
                assert framework == "fsdp2", name
                continue
            used = set(re.findall(r"(?<!\S)--[\w.-]+", " ".join(command.words))) - own
            assert used <= set(OPTIONS[framework]), (name, changes, used - set(OPTIONS[framework]))
            written += 1
    assert written >= (20 if framework == "fsdp2" else 100)


def test_a_command_for_megatron_says_the_model_and_the_layout() -> None:
    found = said(planned("deepseek_v3", "megatron", {"parallel.pp": "4", "parallel.tp": "2"}))
    assert found["--moe-layer-freq"] == ["[0]*3+[1]*58"]
    assert found["--pipeline-model-parallel-layout"] == ["Et*16|t*16|t*15|t*14L"]
    expected: dict[str, Any] = {
        "--num-layers": 61,
        "--hidden-size": 7168,
        "--ffn-hidden-size": 18432,
        "--q-lora-rank": 1536,
        "--kv-lora-rank": 512,
        "--qk-head-dim": 128,
        "--qk-pos-emb-head-dim": 64,
        "--v-head-dim": 128,
        "--num-experts": 256,
        "--moe-router-topk": 8,
        "--moe-router-num-groups": 8,
        "--moe-router-group-topk": 4,
        "--moe-router-topk-scaling-factor": 2.5,
        "--moe-router-score-function": "sigmoid",
        "--moe-shared-expert-intermediate-size": 2048,
        "--rotary-scaling-factor": 40.0,
        "--tensor-model-parallel-size": 2,
        "--expert-model-parallel-size": 4,
        "--global-batch-size": 512,
    }
    assert {name: found[name] for name in expected} == {name: [str(value)] for name, value in expected.items()}
    for flag in ("--sequence-parallel", "--multi-latent-attention", "--moe-router-enable-expert-bias", "--bf16"):
        assert found[flag] == []
    assert "--moe-router-pre-softmax" not in found
    command = framework_command(planned("deepseek_v3", "megatron", {"parallel.tp": "2"}))
    assert command is not None and command.words[0] == "CUDA_DEVICE_MAX_CONNECTIONS=1"


def test_softmax_of_all_logits_is_said_only_where_its_top_k_are_not_normalised() -> None:
    assert "--moe-router-pre-softmax" in said(planned("deepseek_v2_lite", "megatron"))
    for name in ("qwen3_30b_a3b", "mixtral_8x7b", "gpt_oss_20b"):
        assert "--moe-router-pre-softmax" not in said(planned(name, "megatron")), name


def test_windows_sinks_and_biases_of_gpt_oss() -> None:
    found = said(planned("gpt_oss_20b", "megatron"))
    # Ours counts the token itself.
    assert found["--window-size"] == ["127,0"] and found["--window-attn-skip-freq"] == ["[1,0]*12"]
    assert found["--softmax-type"] == ["learnable"] and "--quick-geglu" in found
    assert "--disable-bias-linear" not in found and "--swiglu" not in found


def test_older_megatron_has_scopes_of_graphs() -> None:
    partial = {"kernels.graphs": "partial"}
    assert said(planned("qwen3_30b_a3b", "megatron", partial, "0.19.1"))["--cuda-graph-modules"][0] == "attn"
    assert "--cuda-graph-modules" not in said(planned("qwen3_30b_a3b", "megatron", partial, "0.16.1"))
    whole = said(planned("qwen3_30b_a3b", "megatron", {"kernels.graphs": "full"}, "0.16.1"))
    assert whole["--cuda-graph-scope"] == ["full_iteration"] and whole["--cuda-graph-impl"] == ["local"]


def test_what_a_framework_cannot_be_told_is_listed() -> None:
    command = framework_command(planned("kimi_k2", "megatron"))
    assert command is not None and any("Muon" in words for words in command.left_out)
    assert "it is not told" in command.introduction
    assert framework_command(planned("mixtral_8x7b", "fsdp2")) is None
    assert framework_command(planned("qwen3_30b_a3b", "moefold")) is None
    chosen = framework_command(planned("qwen3_30b_a3b", "fsdp2", {"parallel.dispatcher": "deepep"}))
    assert chosen is not None and any("deepep" in words for words in chosen.left_out)


def test_a_command_for_torchtitan_names_its_configuration() -> None:
    found = said(planned("qwen3_30b_a3b", "fsdp2", {"parallel.pp": "2", "parallel.ep": "8"}))
    assert (found["--module"], found["--config"]) == (["qwen3"], ["qwen3_30b_a3b"])
    assert found["--parallelism.pipeline-parallel-layers-per-stage"] == ["25"]
    # One rank's sequences of a step, in microbatches of one.
    assert found["--training.local-batch-size"] == ["16"]
    assert found["--parallelism.data-parallel-shard-degree"] == ["32"]
    assert "activation-checkpoint:none" in found[list(found)[-1]]


@pytest.mark.parametrize("layers", [[1, 0] * 5, [0, 0, 0, 1, 1], [1, 1, 0] * 4, [1, 0, 0, 0]])
def test_patterns_are_those_of_the_layers(layers: list[int]) -> None:
    made: list[int] = []
    for part in layer_pattern(layers).split("+"):
        values, _, repeats = part.partition("*")
        made += json.loads(values) * int(repeats)
    assert made == layers


def test_plans_print_it_and_say_it_as_data() -> None:
    plan = moefold.plan(load_run("qwen3_30b_a3b"), gpu="H100", gpus=64, framework="megatron", search=False)
    data = proposal_data(plan.proposal)["framework_command"]
    assert "pretrain_gpt.py" in data["command"] and data["left_out"] == ["how the learning rate falls"]
    assert plan.framework_command == data["command"]
    assert "pretrain_gpt.py" in plan.html() and "With Megatron-LM" in plan.html()
