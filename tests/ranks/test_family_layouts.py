"""Models of every published family, reduced in size, compute on ranks what one process computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.marks import slow_except
from tests.published_models import PUBLISHED, documented, model_of

from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.prove.cases import reduce_run
from moefold.prove.proof_report import case_report
from moefold.prove.verdict import prove
from moefold.recipes.catalog import recipe

# Every row of the table in docs/hugging-face.md; dense models have no experts to put on ranks.
FAMILIES = list(documented())
EXPERTS_AND_STAGES = ParallelConfig(pp=2, ep=2)
HEADS_AND_CONTEXT = ParallelConfig(tp=2, cp=2, ep=4)
# Linear attention has whole documents.
HYBRIDS = {"Qwen3-Next-80B-A3B": ParallelConfig(tp=2, pp=2, ep=2)}


@pytest.mark.parametrize("name", slow_except(FAMILIES, "GLM-4.5", "Qwen3-Next-80B-A3B"))
def test_experts_and_stages_over_ranks_change_nothing(name: str) -> None:
    holds(name, EXPERTS_AND_STAGES)


@pytest.mark.parametrize("name", slow_except(FAMILIES, "Llama-4-Maverick"))
def test_heads_and_context_over_ranks_change_nothing(name: str) -> None:
    holds(name, HYBRIDS.get(name, HEADS_AND_CONTEXT))


def holds(name: str, parallel: ParallelConfig) -> None:
    model = model_of(PUBLISHED[name]) if name in PUBLISHED else recipe(name).model
    if model.moe is None:
        parallel = replace(parallel, ep=1)
    verdict = prove(reduce_run(RunConfig(name=name, model=model, parallel=parallel), 4))
    assert verdict.holds, case_report(verdict)
