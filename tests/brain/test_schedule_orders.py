"""Every order at any size: valid, complete, and as fast and small as it promises."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moefold.errors import ConfigError, UnknownNameError
from moefold.schedule.actions import PRODUCES_GRADIENT, SENDS, TRANSFERS, Action, Kind, Order, place
from moefold.schedule.names import SCHEDULES, schedule_named
from moefold.schedule.passes import add_transfers, executable, pair_overlaps, split_backward
from moefold.schedule.simulate import Durations, peak_live, simulate
from moefold.schedule.validate import problems

OVERLAPPED = [name for name, schedule in SCHEDULES.items() if schedule.overlaps]


def compute_parts(actions: Iterable[Action]) -> Iterator[Action]:
    """The computations of a rank one by one: overlaps taken apart, transfers left out."""
    for action in actions:
        if action.kind not in TRANSFERS:
            yield from action.parts


@st.composite
def orders(draw: st.DrawFn, names: list[str] | None = None) -> Order:
    schedule = SCHEDULES[draw(st.sampled_from(names or list(SCHEDULES)))]
    ranks, microbatches = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    virtual = schedule.virtual or draw(st.integers(1, 4))
    assume(not schedule.problems(ranks, virtual, microbatches))
    return schedule.build(ranks, virtual, microbatches)


def per_stage(order: Order, forward: float = 1, backward_input: float = 1, backward_weight: float = 1) -> Durations:
    """Times of a rank's whole share of the layers, so that orders with different numbers of stages compare."""
    virtual = order.num_virtual
    return Durations(forward / virtual, backward_input / virtual, backward_weight / virtual)


@given(orders(), st.booleans())
def test_every_order_is_valid_and_complete(order: Order, split: bool) -> None:
    if split:
        order = split_backward(order)
    whole = add_transfers(order)
    assert problems(order) == [] and problems(whole) == []
    work = order.num_stages * order.num_microbatches
    kinds = Counter(part.kind for actions in order.actions for part in compute_parts(actions))
    assert kinds[Kind.FORWARD] == kinds[Kind.BACKWARD] + kinds[Kind.BACKWARD_INPUT] == work
    assert kinds[Kind.BACKWARD_WEIGHT] == kinds[Kind.BACKWARD_INPUT]
    assert not split or kinds[Kind.BACKWARD] == 0
    # One message per border between ranks, each way.
    borders = sum(order.crosses(stage) for stage in range(order.num_stages))
    sent = sum(action.kind in SENDS for actions in whole.actions for action in actions)
    assert sent == 2 * borders * order.num_microbatches


@given(orders(), st.integers(0, 2**32), st.booleans())
def test_no_order_depends_on_how_long_things_take(order: Order, seed: int, split: bool) -> None:
    draw = random.Random(seed)
    times = [tuple(draw.uniform(0.1, 3) for _ in range(order.num_stages)) for _ in range(3)]
    durations = Durations(*times, send=draw.choice((0.0, 0.7)), overlap=draw.choice((0.8, 1.0)))
    if split:
        order = split_backward(order, durations)
    computed, whole = simulate(order, durations), simulate(add_transfers(order), durations)
    assert not computed.stuck and not whole.stuck
    # Sends take as long whether they are written down or not.
    assert whole.finish == pytest.approx(computed.finish, rel=1e-12)


@given(st.integers(1, 12), st.integers(1, 60), st.floats(0.1, 3), st.floats(0.1, 3))
def test_bubble_of_1f1b_is_the_closed_form(ranks: int, microbatches: int, forward: float, backward: float) -> None:
    assume(microbatches >= ranks)
    order = SCHEDULES["1f1b"].build(ranks, 1, microbatches)
    found = simulate(order, Durations(forward, backward / 2, backward / 2))
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)


@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.sampled_from(["interleaved", "interleaved_overlapped"])
)
def test_bubble_of_interleaved_is_the_closed_form(ranks: int, virtual: int, rounds: int, name: str) -> None:
    microbatches = rounds * ranks
    found = simulate(SCHEDULES[name].build(ranks, virtual, microbatches))
    assert found.bubble == pytest.approx((ranks - 1) / (virtual * microbatches + ranks - 1), abs=1e-12)


@given(st.integers(1, 12), st.integers(1, 40))
def test_1f1b_holds_as_many_microbatches_as_ranks_follow(ranks: int, microbatches: int) -> None:
    order = SCHEDULES["1f1b"].build(ranks, 1, microbatches)
    assert [peak_live(actions) for actions in order.actions] == [min(ranks - r, microbatches) for r in range(ranks)]


@given(st.integers(2, 12), st.integers(0, 30))
def test_zb_h1_leaves_a_third_of_the_bubble_in_the_same_memory(ranks: int, more: int) -> None:
    microbatches = ranks + more
    plain = simulate(SCHEDULES["1f1b"].build(ranks, 1, microbatches))
    order = SCHEDULES["zb_h1"].build(ranks, 1, microbatches)
    found = simulate(order)
    assert plain.finish - 3 * microbatches == 3 * (ranks - 1)
    assert found.finish - 3 * microbatches == ranks - 1
    assert max(found.peak_live) <= max(plain.peak_live)


@given(st.integers(2, 9), st.integers(0, 30))
def test_splitting_1f1b_gives_zb_h1(ranks: int, more: int) -> None:
    split = split_backward(SCHEDULES["1f1b"].build(ranks, 1, ranks + more))
    assert split.actions == SCHEDULES["zb_h1"].build(ranks, 1, ranks + more).actions


@given(st.integers(2, 9), st.integers(0, 30))
def test_v_shaped_orders_idle_less_than_1f1b(ranks: int, more: int) -> None:
    microbatches = 2 * ranks + more
    v, dual = (SCHEDULES[name].build(ranks, 2, microbatches) for name in ("zb_v", "dualpipe_v"))
    assert simulate(v, per_stage(v)).finish - 3 * microbatches == pytest.approx((ranks - 1) / 2)
    assert simulate(dual, per_stage(dual)).finish - 3 * microbatches == pytest.approx(ranks - 1)
    # A stage is half as large as one of 1F1B, which holds P.
    assert max(map(peak_live, v.actions)) == 2 * ranks
    assert max(map(peak_live, dual.actions)) == 2 * ranks + 1


@given(orders(), st.booleans())
def test_splitting_never_takes_longer_nor_holds_more(order: Order, tight: bool) -> None:
    durations = per_stage(order)
    before = simulate(order, durations)
    bound = max(before.peak_live) - (1 if tight and max(before.peak_live) > order.num_stages else 0)
    after = simulate(split_backward(order, durations, bound), durations)
    assert max(after.peak_live) <= max(before.peak_live)
    assert tight or after.finish <= before.finish + 1e-9


@given(orders(OVERLAPPED))
def test_pairs_are_of_different_microbatches_and_the_warm_up_stays_alone(order: Order) -> None:
    for rank, actions in enumerate(order.actions):
        for action in actions:
            if action.pair:
                forward, backward = action.pair
                assert forward.microbatch != backward.microbatch
                assert (forward.kind, backward.kind) == (Kind.FORWARD, Kind.BACKWARD)
        alone = [action for action in actions if action.kind is Kind.FORWARD]
        if order.name != "dualpipe_v":
            # After the warm-up every forward has a partner; one microbatch more than without partners.
            assert actions[: len(alone)] == tuple(alone)
            size = max(1, order.num_microbatches // order.num_ranks)
            first_round = -(-order.num_microbatches // size)
            usual = (order.num_virtual - 1) * first_round + 2 * (order.num_ranks - 1 - rank)
            assert len(alone) == min(usual + 1, order.num_virtual * order.num_microbatches)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.sampled_from([0.6, 0.9, 1.0]))
def test_overlapped_orders_run_their_pairs_without_waiting(ranks: int, rounds: int, virtual: int, gain: float) -> None:
    """What a pair saves is saved: in the steady part no rank waits for another."""
    microbatches = ranks * rounds + ranks
    order = SCHEDULES["interleaved_overlapped"].build(ranks, virtual, microbatches)
    found = simulate(order, Durations(overlap=gain))
    pairs = sum(action.kind is Kind.OVERLAP for action in order.actions[-1])
    alone = virtual * microbatches - pairs
    last = found.spans[-1]
    first_pair = next(at for at, action in enumerate(order.actions[-1]) if action.pair)
    steady = last[first_pair + pairs - 1][1] - last[first_pair][0]
    assert steady == pytest.approx(3 * gain * pairs) and alone == (virtual - 1) * ranks + 1


def test_a_weight_gradient_follows_its_pair_at_once() -> None:
    order = split_backward(SCHEDULES["interleaved_overlapped"].build(4, 2, 16))
    for actions in order.actions:
        for action, following in pairwise(actions):
            if action.pair:
                backward = action.pair[1]
                assert backward.kind is Kind.BACKWARD_INPUT and following.kind is Kind.BACKWARD_WEIGHT
                assert (following.stage, following.microbatch) == (backward.stage, backward.microbatch)


@given(orders(["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"]))
def test_any_order_can_be_paired(order: Order) -> None:
    paired = pair_overlaps(order)
    assert problems(add_transfers(paired)) == []
    assert [list(compute_parts(actions)) for actions in paired.actions] == list(map(list, order.actions))


@given(orders())
def test_receives_come_right_before_their_use_unless_the_sequence_asks_for_more(order: Order) -> None:
    whole = add_transfers(order)
    computed = tuple(tuple(action for action in actions if not is_transfer(action.kind)) for actions in whole.actions)
    assert computed == order.actions
    for actions in whole.actions:
        for action, following in pairwise(actions):
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                assert following.kind not in SENDS and following.kind is not Kind.BACKWARD_WEIGHT


def is_transfer(kind: Kind) -> bool:
    return kind in (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)


def test_placements() -> None:
    assert place(4, 2, "loop") == (0, 1, 2, 3, 0, 1, 2, 3)
    assert place(4, 2, "v") == (0, 1, 2, 3, 3, 2, 1, 0)
    order = SCHEDULES["zb_v"].build(4, 2, 8)
    assert order.stages_of(1) == (1, 6) and not order.crosses(3) and order.crosses(4)
    # Where the V turns, the value is handed over.
    kinds = {(part.kind, part.stage) for actions in add_transfers(order).actions for part in actions}
    assert (Kind.SEND_F, 3) not in kinds and (Kind.SEND_F, 4) in kinds


def test_executable_is_built_once() -> None:
    first = executable("interleaved", 4, 2, 8)
    assert first is executable("interleaved", 4, 2, 8)
    assert first.has_transfers
    split = executable("interleaved", 4, 2, 8, split=True)
    assert not any(part.kind is Kind.BACKWARD for actions in split.actions for part in compute_parts(actions))


def test_per_stage_times_say_which_stage_is_slow() -> None:
    order = SCHEDULES["1f1b"].build(4, 1, 8)
    even, uneven = simulate(order), simulate(order, Durations(forward=(1.0, 1.0, 1.0, 2.0)))
    assert uneven.finish > even.finish
    assert uneven.bubbles[3] < uneven.bubbles[0]


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("1f1b", (4, 2, 8), "1f1b has 1 stages per rank, not 2"),
        ("zb_v", (4, 1, 8), "set parallel.vpp to 2, or parallel.schedule to one of gpipe, 1f1b"),
        ("dualpipe_v", (4, 2, 7), "dualpipe_v over 8 stages needs at least 8 microbatches, not 7"),
        ("interleaved", (0, 2, 8), "parallel.pp: must be positive, not 0"),
        ("gpipe", (4, 1, 0), "microbatches: must be positive, not 0"),
    ],
)
def test_sizes_that_have_no_order(name: str, sizes: tuple[int, int, int], said: str) -> None:
    assert any(said in str(problem) for problem in SCHEDULES[name].problems(*sizes))
    with pytest.raises(ConfigError) as raised:
        SCHEDULES[name].build(*sizes)
    assert said in str(raised.value)


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'interleaved'"):
        schedule_named("interleave")


def test_the_catalog_says_what_its_orders_do() -> None:
    for name, schedule in SCHEDULES.items():
        virtual = schedule.virtual or 3
        order = schedule.build(4, virtual, 12)
        assert order.name == name and order.rank_of_stage == place(4, virtual, schedule.placement)
        kinds = {action.kind for actions in order.actions for action in actions}
        assert schedule.overlaps == (Kind.OVERLAP in kinds)
        assert schedule.splits_backward == (Kind.BACKWARD_WEIGHT in kinds)
        assert kinds & set(PRODUCES_GRADIENT) or schedule.overlaps
