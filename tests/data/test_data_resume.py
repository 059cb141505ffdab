"""Resumes read the samples that were not read yet, and refuse other data (F14, F15)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.data.token_files import documents, megatron
from tests.data_resume_draws import BATCH, Draw, compare, run_all
from tests.train.test_trainer import tiny

import moefold
from moefold.errors import MoefoldError


@pytest.mark.slow
def test_samples_after_kills_and_with_other_ranks_are_those_of_a_calm_run() -> None:
    found = run_all(1, seed=16)
    assert found["runs"] == 1 and found["kills"] >= 2 and not found["bad"], found["each"]


PLAN = Draw((4,), "concat", 2, (2, 4, 1), (1, 2, 3), (2,), 0)
CALM = {
    step: {index: [f"0:{index // 4}:{index % 4}"] for index in range((step - 1) * BATCH, step * BATCH)}
    for step in (1, 2, 3)
}
WRONG: dict[str, Callable[[dict[int, dict[int, list[str]]]], object]] = {
    "left out": lambda seen: seen[2][5].clear(),
    "read twice": lambda seen: seen[2][5].append("0:1:1"),
    "another sample": lambda seen: seen[3].update({8: ["0:2:3"]}),
    "a step missing": lambda seen: seen.pop(3),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_notices(name: str) -> None:
    other = copy.deepcopy(CALM)
    assert not compare(CALM, other, PLAN)
    WRONG[name](other)
    assert compare(CALM, other, PLAN)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file more": lambda folder: megatron(folder / "e", documents(20, 5)),
    "a file less": lambda folder: [(folder / f"b{ending}").unlink() for ending in (".bin", ".idx")],
    "a file under another name": lambda folder: [
        (folder / f"a{ending}").rename(folder / f"z{ending}") for ending in (".bin", ".idx")
    ],
    "a file replaced": lambda folder: megatron(folder / "b", documents(20, 9)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_is_not_resumed_on_another_list_of_files(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "tokens"
    for seed, file in enumerate("ab"):
        megatron(folder / file, documents(20, seed))
    data = {"data.train": str(folder), "data.validation": None}
    assert moefold.Trainer(tiny(tmp_path, 2, **data), reporters=[]).fit() == "finished"
    CHANGES[name](folder)
    with pytest.raises(MoefoldError, match=r"other data|not what this run was trained on"):
        moefold.Trainer(tiny(tmp_path, 3, **data), reporters=[]).fit()


def test_a_reader_that_dies_on_its_thread_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread reads ahead; what ended it is raised where the step waits for its batch."""
    from moefold.data.samples import Samples

    original = Samples.sample

    def fails(self: Samples, index: int) -> object:
        if index >= 8:
            raise MoefoldError(f"sample {index} cannot be read")
        return original(self, index)

    monkeypatch.setattr(Samples, "sample", fails)
    with pytest.raises(MoefoldError, match="sample 8 cannot be read"):
        moefold.Trainer(tiny(tmp_path, 4), reporters=[]).fit()
