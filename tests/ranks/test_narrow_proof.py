"""Proofs of runs with a precision recipe: the reference makes the calls of ranks, and what has no proof is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moefold
from moefold.checks.run_all import problems
from moefold.cli.main import main
from moefold.config.data import DataConfig, PackingMode
from moefold.config.parallel import DispatcherName, ParallelConfig, RankOrderConfig
from moefold.config.precision import Format
from moefold.config.precision_recipes import RecipeName
from moefold.errors import ConfigError
from moefold.prove.call_rows import call_rows
from moefold.prove.cases import Case, reduce_run, reference_case
from moefold.prove.mutant_cases import CASES
from moefold.prove.narrow_cases import left_out
from moefold.prove.proof_inputs import labels_of_batch, rank_batch, wave_batch
from moefold.prove.proof_report import case_report
from moefold.prove.random_cases import draw_case, draw_cases, draw_narrow_cases
from moefold.prove.reference import reference
from moefold.prove.unchanged_bits import is_repeated
from moefold.prove.verdict import prove
from moefold.topology.folded_layout import DENSE_ORDERS, EXPERT_ORDERS

NARROW = CASES["narrow"]


LAYOUTS = ((ParallelConfig(), 1), (ParallelConfig(cp=2), 2))


def in_layout(
    parallel: ParallelConfig, world: int, packing: PackingMode = "concat", recipe: RecipeName | None = "mxfp8"
) -> Case:
    data = DataConfig(seq_len=7, global_batch=4, micro_batch=1, packing=packing)
    precision = replace(NARROW.run.precision, recipe=recipe)
    return Case(replace(NARROW.run, parallel=parallel, data=data, precision=precision), world)


@pytest.mark.parametrize("order", DENSE_ORDERS)
@pytest.mark.parametrize("packing", ["concat", "bin_packed"])
def test_calls_have_the_tokens_of_their_ranks(packing: PackingMode, order: str) -> None:
    """Against the batches that ranks run: the tokens of a context shard, and of a tp rank a run of them."""
    case = in_layout(ParallelConfig(cp=2, tp=2, rank_order=RankOrderConfig(order)), 8, packing)
    labels = labels_of_batch(case)
    for wave in range(case.num_waves):
        whole = wave_batch(case, wave, labels)
        rows = call_rows(case.run, whole)
        for rank in range(case.world):
            batch, place = rank_batch(case, wave, rank, labels), case.layout.context_place(rank)
            assert torch.equal(whole.tokens_S[rows.gathered[place]], batch.tokens_S)
            assert torch.equal(whole.positions_S[rows.gathered[place]], batch.positions_S)
        assert [len(own) for own in rows.own] == list(whole.shards.sizes)
        assert torch.equal(torch.cat(rows.own), torch.cat(rows.gathered))


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({"dispatcher": "all_gather"}, [0, 1, 2, 3, 4, 5, 6, 7]),
        # ep ranks 0, 2, 4, 6 have the first shard of their experts, and receive for it.
        ({"dispatcher": "all_to_all"}, [0, 2, 4, 6, 1, 3, 5, 7]),
        ({"dispatcher": "deduplicated"}, [0, 2, 4, 6, 1, 3, 5, 7]),
        # Hosts of two ep ranks: each inner rank passes on what it has from every host.
        ({"dispatcher": "two_level", "ep_inner": 2}, [0, 4, 2, 6, 1, 5, 3, 7]),
    ],
)
def test_experts_have_rows_in_the_order_of_their_dispatcher(changes: dict[str, object], order: list[int]) -> None:
    case = in_layout(ParallelConfig(ep=4, etp=2, **changes), 8)  # type: ignore[arg-type]
    case = replace(case, run=replace(case.run, data=replace(case.run.data, global_batch=8)))
    whole = wave_batch(case, 0, labels_of_batch(case))
    (block,) = call_rows(case.run, whole).expert_blocks
    assert torch.cat(block).tolist() == [7 * rank + token for rank in order for token in range(7)]


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("expert", EXPERT_ORDERS)
@pytest.mark.parametrize("dense", DENSE_ORDERS)
def test_blocks_of_experts_are_those_of_the_order_of_ranks(dense: str, expert: str, dispatcher: DispatcherName) -> None:
    """Every rank's tokens are in the call of its own block, in the order of the block's ranks or by etp, then ep."""
    parallel = ParallelConfig(tp=2, ep=2, etp=2, dispatcher=dispatcher, rank_order=RankOrderConfig(dense, expert))
    case = in_layout(parallel, 8)
    layout, whole = case.layout, wave_batch(case, 0, labels_of_batch(case))
    rows = call_rows(case.run, whole)
    assert len(rows.expert_blocks) == 2
    for block in rows.expert_blocks:
        held = [next(place for place, own in enumerate(rows.own) if torch.equal(own, part)) for part in block]
        ranks = [next(rank for rank in range(8) if layout.token_place(rank) == place) for place in held]
        assert tuple(sorted(ranks)) == layout.ranks("expert_block", ranks[0])
        places = [(layout.coordinate(rank, "etp"), layout.coordinate(rank, "ep")) for rank in ranks]
        assert ranks == sorted(ranks) if dispatcher == "all_gather" else places == sorted(places)


def test_calls_decide_what_is_narrowed_over_several_rows_and_nothing_else() -> None:
    """Casts of mxfp8 in the forward pass belong to rows, and its codes of weights to nothing else. One scale for a
    tensor depends on the rows of a call."""
    mx = [reference(in_layout(parallel, world)) for parallel, world in LAYOUTS]
    assert abs(float(mx[0]["loss"] / mx[1]["loss"]) - 1) < 1e-12
    codes = [name for name in mx[0] if name.startswith(("codes/", "scales/"))]
    assert codes and all(torch.equal(mx[0][name], mx[1][name]) for name in codes)
    tensor = [reference(in_layout(parallel, world, recipe="fp8_tensor")) for parallel, world in LAYOUTS]
    name = "gradient/layers.0.attention.q.weight"
    assert float((tensor[0][name] - tensor[1][name]).norm()) > 1e-4 * float(tensor[0][name].norm())
    wide = reference(in_layout(*LAYOUTS[0], recipe=None))
    assert not any(name.startswith(("codes/", "scales/")) for name in wide)


def test_a_run_with_a_recipe_is_proved() -> None:
    run = moefold.load_run("debug_tiny", {"precision.recipe": "mxfp8", "parallel.cp": 2, "kernels.casts": "native"})
    verdict = moefold.prove(run, world=2)
    assert verdict.holds, case_report(verdict)
    codes = [row for row in verdict.rows if row.quantity.startswith("codes/")]
    assert codes and all(row.tolerance == row.error == 0.0 for row in codes)


@pytest.mark.parametrize(
    ("changes", "dtype", "said"),
    [
        ({"precision.recipe": "mxfp8"}, "bfloat16", "prove it with --dtype float64"),
        ({"precision.dispatch": "mxfp8"}, "bfloat16", "prove it with --dtype float64"),
        ({"precision.recipe": "fp8_delayed"}, "float64", "scales are those of earlier steps"),
    ],
)
def test_what_has_no_proof_is_refused(changes: dict[str, object], dtype: Format, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        reduce_run(moefold.load_run("debug_tiny", changes), 1, dtype)


def test_amaxes_that_are_compared_over_tp_are_refused_with_two_scales() -> None:
    """What joins the inputs of an MTP module is whole on every rank, and sees the rank's tokens. Of 300 drawn cases one
    had it."""
    wide = {"precision.recipe": "nvfp4", "parallel.tp": 2, "precision.wide": ["*.attention.*", "*.shared*"]}
    run = moefold.load_run("debug_tiny", wide | {"model.num_mtp": 1})
    with pytest.raises(ConfigError, match=r"2 ranks compare the amax of what enters mtp\.0\.join"):
        reduce_run(run, 2)
    reduce_run(moefold.load_run("debug_tiny", wide), 2)
    assert draw_case(181123456540735, 8).run.precision.recipe is None


def test_padded_capacities_with_a_recipe_are_refused() -> None:
    moe = NARROW.run.model.moe
    assert moe is not None
    capacity = moefold.load_run("debug_tiny", {"model.moe.capacity": {"pad": True}}).model.moe.capacity  # type: ignore[union-attr]
    run = replace(NARROW.run, model=replace(NARROW.run.model, moe=replace(moe, capacity=capacity)))
    with pytest.raises(ConfigError, match="padding lies between rows"):
        reduce_run(run, 4)


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all", "deduplicated"])
def test_rows_of_zeros_lie_between_the_rows_of_two_ranks(dispatcher: DispatcherName) -> None:
    """Blocks along tokens are then those of one rank. `all_gather` counts tokens by the configuration where shapes are
    fixed, as here."""
    parallel = ParallelConfig(ep=2, dispatcher=dispatcher)
    kernels = replace(NARROW.run.kernels, row_padding="routing_map")
    case = in_layout(parallel, 2)
    padded = replace(case, run=replace(case.run, kernels=kernels))
    verdict = prove(padded)
    assert verdict.holds, case_report(verdict)
    gradients = [reference(each)["gradient/layers.1.feed_forward.experts.gate_up"] for each in (case, padded)]
    # Scales are powers of two: other blocks round the smallest values alone.
    assert float((gradients[0] - gradients[1]).norm()) > 1e-9 * float(gradients[0].norm())


def test_what_is_kept_and_deferred_is_compared_bit_for_bit() -> None:
    verdict = prove(CASES["narrow codes"])
    unchanged = [row for row in verdict.rows if row.quantity.startswith("unchanged/")]
    gradients = [row for row in verdict.rows if row.quantity.startswith("gradient/")]
    assert verdict.holds and len(unchanged) == len(gradients) > 10
    assert all(row.tolerance == row.error == 0.0 for row in unchanged)
    assert not is_repeated(replace(CASES["deferred"].run)) and not is_repeated(CASES["narrow rows"].run)


def test_what_a_recipe_adds_is_proved_and_the_rest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {
        "precision.recipe": "fp8_blockwise",
        "precision.gather": "narrow",
        "precision.dispatch": "mxfp8",
        "precision.down_input": "per_token",
        "precision.reduce": "bfloat16_all_to_all",
        "kernels.row_padding": "permute",
        "memory.retain.rows": "quantize",
    }
    run = moefold.load_run("debug_tiny", changes)
    case = reduce_run(run, 2)
    for proved in (case.run, reference_case(case).run):
        assert proved.precision.gather == "narrow" and proved.precision.dispatch == "mxfp8"
        assert proved.precision.down_input == "per_token" and proved.kernels.row_padding == "permute"
        assert proved.memory.retain.rows == "quantize" and proved.precision.reduce is None
    assert left_out(run, case.run.precision) == ("precision.reduce bfloat16_all_to_all",)
    assert left_out(moefold.load_run("debug_tiny"), case.run.precision) == ()
    given = [word for key, value in changes.items() for word in (f"--{key}", value)]
    assert main(["prove", "debug_tiny", "--world", "2", *given]) == 0
    assert "Not proved: precision.reduce bfloat16_all_to_all: numbers are kept" in capsys.readouterr().out


def test_cases_with_a_recipe_alone_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    cases = list(draw_narrow_cases(5, 2, seed=3))
    assert len(cases) == 5 and all(case.run.precision.recipe for case in cases)
    assert [draw_case(case.run.seed, 2) for case in cases] == cases
    assert main(["prove", "--cases", "1", "--recipes", "--max-world", "1", "--seed", "3"]) == 0
    assert "1 of 1 cases hold" in capsys.readouterr().out
    for wrong in (["debug_tiny", "--recipes"], ["--cases", "1", "--recipes", "--dtype", "bfloat16"]):
        assert main(["prove", *wrong]) == 2
        assert "--recipes is for --cases N in float64" in capsys.readouterr().err


def test_a_third_of_the_draws_have_a_recipe_and_are_legal() -> None:
    cases = list(draw_cases(120, 4, seed=3))
    narrow = [case for case in cases if case.run.precision.recipe is not None]
    assert 0.2 < len(narrow) / len(cases) < 0.45
    assert not any(problems(case.run, case.world) for case in narrow)
    assert not any(case.run.precision.recipe for case in draw_cases(20, 4, seed=3, dtype="bfloat16"))
