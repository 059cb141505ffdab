"""Every kernel compiles for cards that are not here, and stays within its registers; the frame notices if not."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton", reason="kernels are an extra")

from moefold.ops.kernels.build import TARGETS, Build, compile_for, specializations

BUILDS = specializations()


def test_names_are_unique() -> None:
    assert len({build.name for build in BUILDS}) == len(BUILDS) > 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
def test_within_budget(build: Build, target: str) -> None:
    built = compile_for(build, target)
    assert built.cubin_bytes > 0
    assert not built.over_budget


def test_what_is_over_budget_is_noticed() -> None:
    strict = dataclasses.replace(BUILDS[0], registers=1)
    assert "registers" in compile_for(strict, "sm_90a").over_budget


def test_a_spill_needs_a_reason() -> None:
    with pytest.raises(AssertionError, match="without a reason"):
        dataclasses.replace(BUILDS[0], spill_bytes=8)


def test_a_missing_argument_is_noticed() -> None:
    with pytest.raises(AssertionError, match="missing"):
        dataclasses.replace(BUILDS[0], constexprs={})
