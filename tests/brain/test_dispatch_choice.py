"""The formula behind the adaptive choice: ranks that a token meets, and who wins where."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from moefold.cli.main import main
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import CapacityConfig, MoEConfig
from moefold.config.parallel import LinkConfig, ParallelConfig
from moefold.config.run import RunConfig
from moefold.plan.dispatch_choice import Exchange, dispatcher_in_use, estimates, ranks_met, volumes


@pytest.mark.parametrize(("experts", "ep", "top_k"), [(4, 2, 1), (8, 4, 3), (8, 2, 8), (12, 3, 5), (9, 9, 4)])
def test_ranks_met_are_the_mean_over_all_choices(experts: int, ep: int, top_k: int) -> None:
    each = experts // ep
    met = [len({expert // each for expert in chosen}) for chosen in combinations(range(experts), top_k)]
    assert ranks_met(experts, ep, top_k) == pytest.approx(sum(met) / len(met))


def test_rows_of_the_shape_in_the_benchmark() -> None:
    """8 of 64 experts over 4 ranks: 3.66 rows instead of 8."""
    assert ranks_met(64, 4, 8) == pytest.approx(3.66, abs=0.01)
    found = volumes(Exchange(tokens=1024, dim=1024, word=2, num_experts=64, top_k=8, ep=4))
    away = 1024 * 0.75
    assert found["all_to_all"].exchanged == pytest.approx(away * 8 * (2 * 2048 + 4))
    assert found["deduplicated"].exchanged == pytest.approx(away * ranks_met(64, 4, 8) * (2 * 2048 + 48))
    assert found["all_gather"].summed == 1024 * 3 * 4096


def test_narrow_rows_go_and_wide_ones_come_back() -> None:
    """Of 1,024 entries: 1,056 bytes there in mxfp8, 2,048 back in bfloat16."""
    narrow = volumes(Exchange(tokens=64, dim=1024, word=2, num_experts=64, top_k=8, ep=4, etp=2, sent_row=1056))
    assert narrow["all_to_all"].exchanged == pytest.approx(64 * 0.75 * 8 * (1056 + 2048 + 4))
    assert narrow["all_to_all"].gathered == pytest.approx(64 * 8 * (1056 + 4))
    assert narrow["all_gather"].gathered == 64 * 7 * (1056 + 8 * 12)


def test_the_page_has_the_formula_s_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dispatch.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for experts, ep, top_k, met, share in rows:
        expected = ranks_met(int(experts), int(ep), int(top_k))
        assert (met, share) == (f"{expected:.2f}", f"{expected / int(top_k):.2f}")


def adaptive(top_k: int, ep: int, pad: bool = False, **link: float) -> RunConfig:
    moe = MoEConfig(num_experts=64, top_k=top_k, capacity=CapacityConfig(pad=True) if pad else None)
    return RunConfig(
        model=ModelConfig(dim=1024, moe=moe),
        parallel=ParallelConfig(ep=ep, dispatcher="adaptive", link=LinkConfig(**link)),
        data=DataConfig(seq_len=1024),
    )


def test_the_choice_follows_choices_ranks_and_link() -> None:
    assert dispatcher_in_use(adaptive(8, 4)) == "deduplicated"
    # One choice per token: there is nothing to leave out, and choices beside rows are a little more.
    assert dispatcher_in_use(adaptive(1, 8)) == "all_to_all"
    # Where everyone gets nearly everything anyway and gathering is fast, gather.
    assert dispatcher_in_use(adaptive(32, 2, all_gather_gb_s=100.0, reduce_scatter_gb_s=100.0)) == "all_gather"
    assert dispatcher_in_use(adaptive(8, 4, pad=True)) != "deduplicated"
    assert "deduplicated" not in estimates(adaptive(8, 4, pad=True))


def test_a_named_dispatcher_stays() -> None:
    assert dispatcher_in_use(RunConfig(parallel=ParallelConfig(dispatcher="all_gather"))) == "all_gather"


def test_the_choice_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "debug_tiny", "--parallel.ep", "2", "--parallel.dispatcher", "adaptive"]) == 0
    said = capsys.readouterr().out
    assert "dispatch and combine, expected" in said and said.count("chosen") == 1
