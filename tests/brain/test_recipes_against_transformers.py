"""Every recipe has exactly as many parameters as the transformers model of the same hyper-parameters.

The models are built on the meta device, so DeepSeek-V3 and Kimi-K2 cost shapes, not bytes. transformers holds the
loss-free bias (`e_score_correction_bias`) as a buffer, as we do, so neither side counts it; a release that makes it a
parameter would add E per MoE layer, and the count below leaves it out by name.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.hf_models import hf_config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from moefold.blueprint.param_counts import count_parameters  # noqa: E402
from moefold.blueprint.parameters import buffers, parameters  # noqa: E402
from moefold.config.run import RunConfig  # noqa: E402
from moefold.recipes.catalog import RECIPES  # noqa: E402

LOSS_FREE_BIAS = "e_score_correction_bias"
SHARED_GATE = "shared_expert_gate.weight"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_counts_equal_those_of_transformers(name: str) -> None:
    run = RECIPES[name]()
    model = hf_on_meta(run)
    counts = count_parameters(run.model)
    assert counts.total == sum(hf_sizes(model, run).values())
    assert counts.active == hf_active(model, run)
    biases = [b for b_name, b in model.named_buffers() if b_name.endswith(LOSS_FREE_BIAS)]
    assert sum(b.numel() for b in biases) == sum(spec.size for spec in buffers(run.model))


@pytest.mark.parametrize("name", RECIPES)
def test_expert_stacks_have_the_same_sizes(name: str) -> None:
    """Totals could agree by accident; the experts' tensors agree one by one."""
    run = RECIPES[name]()
    theirs = sorted(size for key, size in hf_sizes(hf_on_meta(run), run).items() if is_routed(key))
    ours = sorted(spec.size for spec in parameters(run.model) if ".experts." in spec.name)
    assert ours == theirs


def hf_on_meta(run: RunConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config(run))


def hf_sizes(model: torch.nn.Module, run: RunConfig) -> dict[str, int]:
    """The only family with shared experts beside plain attention has a gate on them, whether the run has one or not."""
    assert run.model.moe is not None
    left_out = (LOSS_FREE_BIAS,) if run.model.moe.shared_gate else (LOSS_FREE_BIAS, SHARED_GATE)
    return {key: p.numel() for key, p in model.named_parameters() if not key.endswith(left_out)}


def hf_active(model: torch.nn.Module, run: RunConfig) -> int:
    assert run.model.moe is not None
    top_k, experts = run.model.moe.top_k, run.model.moe.num_experts
    return sum(size * top_k // experts if is_routed(key) else size for key, size in hf_sizes(model, run).items())


def is_routed(key: str) -> bool:
    return ".experts." in key  # ".shared_experts." has no dot before "experts"
