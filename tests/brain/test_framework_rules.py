"""Rules about other frameworks say what the frameworks' own validators said, and every way of the search obeys them.

`framework_verdicts.json` has settings and what `TransformerConfig` of released megatron-core answered
(`tests/framework_validators.py` records it and asks again where the package is installed).
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moefold.api.runs import load_run
from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.errors import UnknownNameError
from moefold.hardware.cluster import cluster_of
from moefold.plan.framework_rules import MEGATRON, RULED, Rule, named_release, refusal, release_of
from moefold.plan.memory.saving_steps import savings
from moefold.plan.search.candidates import why_not_started
from moefold.plan.search.proposal import Question, propose
from moefold.plan.search.search import NothingFitsError

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "framework_verdicts.json").read_text("utf-8"))


def recorded_settings() -> list[dict[str, Any]]:
    """With tuples for lists, as the planner writes them."""
    return [
        {name: tuple(value) if isinstance(value, list) else value for name, value in each.items()}
        for each in RECORDED["settings"]
    ]


def differences(release: str, rules: tuple[Rule, ...]) -> list[str]:
    """Settings of which the rules say something else than the validator said."""
    held = [rule for rule in rules if rule.is_in(release_of(release)) and not rule.late]
    verdicts = [RECORDED["messages"][number] for number in RECORDED["verdicts"][release]]
    found = []
    for settings, verdict in zip(recorded_settings(), verdicts, strict=True):
        ours = next((rule.when for rule in held if rule.breaks(settings)), None)
        if (ours is None) != (verdict is None):
            found.append(f"{settings}\n  rule: {ours}\n  validator: {verdict}")
    return found


@pytest.mark.parametrize("release", RECORDED["verdicts"])
def test_rules_say_what_the_validator_said(release: str) -> None:
    assert len(RECORDED["settings"]) >= 500
    assert release in MEGATRON.releases
    assert differences(release, MEGATRON.rules) == []


def test_the_recording_notices_a_rule_that_is_missing_or_too_many() -> None:
    release = next(iter(RECORDED["verdicts"]))
    without = tuple(rule for rule in MEGATRON.rules if "recompute_granularity=full" not in rule.when)
    assert differences(release, without)
    assert differences(release, (*MEGATRON.rules, Rule("recompute_modules=mlp", "", "")))


def test_every_rule_has_a_source_and_words_that_can_be_read() -> None:
    for framework in RULED.values():
        for rule in framework.rules:
            assert rule.message and rule.source.split(".")[0] in ("megatron", "torchtitan", "torch"), rule
            assert not rule.breaks({}) or "!" in rule.when, rule


def test_no_release_means_all_and_a_release_itself() -> None:
    paged = {"num_moe_experts": 8, "moe_paged_stash": True, "moe_flex_dispatcher_backend": "hybridep"}
    assert "0.18" in (refusal("megatron", paged) or "")
    assert refusal("megatron", paged, "0.19.1") is None
    assert refusal("jax", paged) is None
    assert named_release("megatron@0.19.1") == ("megatron", "0.19.1")
    assert named_release("fsdp2") == ("fsdp2", "")
    with pytest.raises(UnknownNameError, match=r"0\.19\.1"):
        named_release("megatron@0.3")


def megatron(fixed: str, gpus: int = 8, release: str = "") -> Any:
    run, cluster = load_run("qwen3_30b_a3b"), cluster_of("H100", gpus)
    return propose(Question(run, run.name, cluster, framework="megatron", release=release, fixed=fixed, headroom=0.0))


def test_what_the_search_chooses_lists_and_asks_is_legal() -> None:
    """The lightest recompute beside an overlap was once all of it, which Megatron refuses."""
    proposal = megatron(
        "tp=1,cp=1,pp=1,ep=8,etp=1,sequences=1,format=bfloat16,sharding=zero1,dispatcher=all_to_all", 32
    )
    chosen = proposal.chosen.workload
    assert proposal.result is not None
    assert {each.choice.ep_overlap for each in proposal.result.ranked} == {False, True}
    for each in proposal.result.ranked:
        assert why_not_started(each.workload) is None, each.choice
        beside = each.choice.ep_overlap or each.choice.graphs == "partial"
        assert not (beside and each.choice.recompute & {"full", "experts"}), each.choice
        assert each.choice.graphs != "full", "0.16.1 has no pages for rows of experts"
    listed = {each.name for each in proposal.freed}
    assert not listed & {each.name for each in savings(chosen) if why_not_started(each.workload)}
    refused = [each for each in proposal.answers if "megatron-core refuses" in each.reason]
    assert all(each.prediction is None for each in refused)
    # What moefold cannot start at all has no line; any other has one that `check` accepts.
    assert not proposal.command or not problems(launched(proposal), 32)


def test_megatron_fsdp_overlaps_dispatch_in_few_layouts() -> None:
    """Its wrapper gathers parameters in hooks that the order of two microbatches passes by: of no layout before 0.18,
    then without virtual stages and graphs of layers."""
    works = {
        "use_megatron_fsdp": True,
        "overlap_moe_expert_parallel_comm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    works |= {"bf16": True, "expert_model_parallel_size": 4, "num_moe_experts": 8, "cuda_graph_impl": "none"}
    assert "gathers parameters" in (refusal("megatron", works) or "")
    assert refusal("megatron", works, "0.19.1") is None
    graphed = works | {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ("attn",)}
    staged = works | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    for settings, words in ((graphed, "per-layer CUDA graphs"), (staged, "interleaved")):
        assert words in (refusal("megatron", settings, "0.19.1") or "")
        assert refusal("megatron", {**settings, "use_megatron_fsdp": False}, "0.19.1") is None
    fixed = "tp=1,cp=1,pp=1,ep=8,etp=1,sharding=fsdp,dispatcher=all_to_all,ep_overlap=true"
    found = megatron(fixed, 32, release="0.19.1")
    assert {each.choice.graphs for each in found.result.ranked} == {"none"}
    with pytest.raises(NothingFitsError, match="Megatron-FSDP"):
        megatron(fixed, 32)


def launched(proposal: Any) -> Any:
    words = shlex.split(" ".join(proposal.command))
    words = words[words.index("train") + 2 :]
    changes = zip(words[::2], words[1::2], strict=True)
    return override(
        proposal.question.run, {key.removeprefix("--"): value for key, value in changes if not value.startswith("$")}
    )


@pytest.mark.nightly
@pytest.mark.parametrize("verb", ["check", "plans"])
@pytest.mark.timeout(3600)
def test_the_installed_validator_agrees(verb: str) -> None:
    """Where megatron-core is installed: what was recorded is what it says, and it accepts 40 proposals."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    words = [sys.executable, "-W", "ignore", "-m", "tests.framework_validators", verb]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
