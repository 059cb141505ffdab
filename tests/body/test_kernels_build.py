"""Every kernel compiles without a GPU and stays within its registers; one that does not is reported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.marks import slow_except

pytest.importorskip("triton", reason="kernels are an extra")

import triton

from moefold.moe.kernels.aot_build import (
    PAGE_TARGETS,
    Build,
    build_all,
    compile_for,
    specializations,
    traffic_table,
    usage_row,
    with_tables,
)
from moefold.tables import markdown_table

BUILDS = specializations()
REFRESH = "python -m moefold.moe.kernels.aot_build --into docs/PAGE.md renews its tables"
PAGES = {page: (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text() for page in PAGE_TARGETS}
DOC = PAGES["kernels"]
# Another version of the compiler gives other figures.
SAME_COMPILER = f"Triton {triton.__version__}," in DOC


def test_names_are_unique() -> None:
    assert len({build.name for build in BUILDS}) == len(BUILDS) > 0


@pytest.mark.parametrize("build", slow_except(BUILDS, *BUILDS[::10]), ids=lambda build: build.name)
def test_within_budget_and_as_documented(build: Build) -> None:
    built = list(build_all([build]))
    assert [one.target for one in built] == list(PAGE_TARGETS[build.page])
    if not SAME_COMPILER:
        pytest.skip(f"it compiles; limits are those of the compiler in docs/kernels.md, not of {triton.__version__}")
    assert not any(one.over_budget for one in built), [one.over_budget for one in built]
    row = f"| {' | '.join(usage_row(built))} |"
    assert row in PAGES[build.page], f"docs/{build.page}.md does not say {row}: {REFRESH}"


def listed(page: str) -> list[Build]:
    return [build for build in BUILDS if build.page == page]


@pytest.mark.parametrize("page", PAGES)
def test_bytes_are_as_documented(page: str) -> None:
    assert markdown_table(*traffic_table(listed(page))) in PAGES[page], REFRESH


@pytest.mark.parametrize("page", PAGES)
def test_nothing_else_is_documented(page: str) -> None:
    tables = PAGES[page].split("| kernel and layer |")[1:]
    lines = [line for table in tables for line in table.split("\n\n")[0].splitlines()[2:]]
    assert {line.split(" | ")[0].removeprefix("| ") for line in lines} == {build.name for build in listed(page)}


# Other constants of the same kernels, and sizes of one, which Triton makes constants of at launch.
GPT_OSS = {"H": 64, "GROUP": 8, "C": 64, "U": 64, "C_MAIN": 64, "U_POW2": 64}
VARIANTS = (
    ("attention, DeepSeek-V3", {"SINKS": True}),
    ("attention, DeepSeek-V3", {"num_q": 1, "num_k": 1}),
    ("attention, Qwen3-235B", {**GPT_OSS, "SINKS": True}),
    ("attention backward, keys, Qwen3-235B", GPT_OSS),
    ("attention backward, queries, Qwen3-235B", GPT_OSS),
    ("permute, DeepSeek-V3", {"PROBS_OUT": False}),
    ("permute, DeepSeek-V3", {"PROBS_OUT": False, "WEIGH": True}),
    ("permute, Mixtral-8x7B", {"K": 1, "num_tokens": 1, "num_experts": 1, "num_rows": 1, "L": 1}),
    ("permute backward, DeepSeek-V3", {"PROBS_IN": False}),
    ("permute backward, Mixtral-8x7B", {"K": 1, "L": 1}),
    ("unpermute backward, Mixtral-8x7B", {"K": 1, "K_POW2": 1, "num_tokens": 1, "num_experts": 1, "L": 1}),
    ("router, DeepSeek-V3", {"TERMS": 1, "SOFTMAX": True, "BIAS": False}),
    ("router, DeepSeek-V3", {"AFTER": True, "NORMALIZE": False, "E": 160, "X_POW2": 8, "Y_POW2": 32}),
    ("router, Mixtral-8x7B", {"num_tokens": 1, "E": 1, "Y_POW2": 1, "K": 1, "K_POW2": 1}),
    ("router backward, DeepSeek-V3", {"AFTER": True, "NORMALIZE": False}),
    ("router backward, Qwen3-235B", {"NORMALIZE": False, "num_tokens": 1}),
    ("row map, counts, Mixtral-8x7B", {"KEPT": True, "num_assignments": 1}),
    ("row map, counts before, Mixtral-8x7B", {"num_blocks": 1, "multiple": 1}),
    ("row map, rows, DeepSeek-V3", {"KEPT": True, "num_assignments": 1}),
    ("balance statistics, DeepSeek-V3", {"SETS": False, "num_sets": 1}),
    ("balance statistics, Qwen3-235B", {"num_sets": 1, "num_tokens": 1}),
    ("balance statistics backward, Qwen3-235B", {"SETS": False, "num_tokens": 1}),
)


@pytest.mark.parametrize(("name", "constants"), VARIANTS, ids=str)
def test_variants_compile_without_spilling(name: str, constants: dict[str, int]) -> None:
    build = next(build for build in BUILDS if build.name == name)
    signature = {name: kind for name, kind in build.signature.items() if name not in constants}
    built = compile_for(
        dataclasses.replace(build, signature=signature, constexprs={**build.constexprs, **constants}), "sm_90a"
    )
    assert built.spilled == 0


def test_what_is_over_budget_is_noticed() -> None:
    strict = dataclasses.replace(BUILDS[0], registers=1)
    assert "registers" in compile_for(strict, "sm_90a").over_budget


def test_a_spill_needs_a_reason() -> None:
    with pytest.raises(AssertionError, match="without a reason"):
        dataclasses.replace(BUILDS[0], spill_bytes=8)


def test_a_missing_argument_is_noticed() -> None:
    with pytest.raises(AssertionError, match="missing"):
        dataclasses.replace(BUILDS[0], constexprs={})


def test_tables_of_a_page_are_renewed() -> None:
    page = "# Page\n\n| a | b |\n| --- | --- |\n| old | 1 |\n\nwords\n\n| a | c |\n| --- | --- |\n| old | 2 |\n"
    new = with_tables(page, markdown_table(("a", "c"), [["new", "3"], ["more", "4"]]))
    assert new == page.replace("| --- | --- |\n| old | 2 |", "| --- | ---: |\n| new | 3 |\n| more | 4 |")
    with pytest.raises(AssertionError, match="0 tables"):
        with_tables(page, markdown_table(("x", "c"), [["new", "3"]]))
