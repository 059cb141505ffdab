"""Flat buffers: ranges are a partition, boxes are exactly the elements of a range, buckets hold each parameter once."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefold.blueprint.flat_layout import (
    ALIGNMENT,
    boxes_of_range,
    even_part,
    flat_buckets,
    owned_range,
    place_of_rank,
    shifted,
)
from moefold.blueprint.parameters import parameters
from moefold.blueprint.sharding import grid_of, local_shape
from moefold.blueprint.stages import stages_of
from moefold.config.precision import PrecisionConfig
from moefold.plan.stage_contents import parts_by_rank
from moefold.recipes.catalog import RECIPES
from moefold.schedule.actions import place
from moefold.schedule.names import schedule_named
from moefold.topology.folded_layout import fold

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    """numpy's own row-major numbering is the oracle."""
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = boxes_of_range(shape, start, stop)
    numbers = np.arange(size).reshape(shape)
    found = [number for box in boxes for number in numbers[box].flatten().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1
    assert all(part.start < part.stop for box in boxes for part in box)


@given(shapes, st.data())
def test_shifted_boxes_are_inside_the_outer_one(shape: tuple[int, ...], data: st.DataObject) -> None:
    starts = data.draw(st.tuples(*[st.integers(0, 3)] * len(shape)))
    corner = tuple(slice(at, at + size) for at, size in zip(starts, shape))
    outer = np.arange(prod(part.stop for part in corner)).reshape([part.stop for part in corner])
    boxes = boxes_of_range(shape, 0, prod(shape))
    assert [outer[box].tolist() for box in shifted(boxes, corner)] == [outer[corner][box].tolist() for box in boxes]


@given(st.integers(0, 5000), st.integers(1, 9))
def test_ranges_are_a_partition_and_start_aligned(size: int, ways: int) -> None:
    ranges = [owned_range(size, ways, index) for index in range(ways)]
    assert [number for part in ranges for number in part] == list(range(size))
    assert all(part.start % ALIGNMENT == 0 for part in ranges) or ways == 1
    assert all(len(part) == even_part(size, ways) for part in ranges[:-1])
    assert len(ranges[-1]) - even_part(size, ways) < ways * ALIGNMENT or ways == 1


@pytest.mark.parametrize("recipe", ["debug_mla", "deepseek_v3_proxy", "deepseek_v3"])
@pytest.mark.parametrize("schedule", ["interleaved", "dualpipe_v"])
def test_every_parameter_lies_in_one_bucket(recipe: str, schedule: str) -> None:
    run = RECIPES[recipe]()
    run = replace(
        run,
        parallel=replace(run.parallel, tp=1, cp=1, ep=1, etp=1, pp=2, vpp=2, schedule=schedule, stages=None),
        precision=PrecisionConfig(compute="bfloat16"),
    )
    layout, stages, limit = fold(run.parallel, 4), stages_of(run.model, run.parallel), 1 << 12
    holder, parts = place(2, 2, schedule_named(schedule).placement), parts_by_rank(run)
    sizes_of_shared = []
    for rank in range(2):
        specs = [spec for spec in parameters(run.model) if parts[rank].holds(spec.name)]
        held = [(spec, parts[1 - rank].holds(spec.name)) for spec in specs]
        here = [stage for stage in stages if holder[stage.index] == rank]
        buckets = flat_buckets(run.model, run.precision, layout, held, here, limit)
        placed = {parameter.name: parameter for bucket in buckets for parameter in bucket.parameters}
        assert sum(len(bucket.parameters) for bucket in buckets) == len(placed)
        assert {name: parameter.shape for name, parameter in placed.items()} == {
            spec.name: local_shape(spec, layout) for spec in specs
        }
        for bucket in buckets:
            ends = [0, *(parameter.stop for parameter in bucket.parameters)]
            assert [parameter.start for parameter in bucket.parameters] == ends[:-1]
            assert bucket.size <= limit or len(bucket.parameters) == 1
            assert {grid_of(parameter.name) for parameter in bucket.parameters} == {bucket.grid}
            odd = [parameter.size % ALIGNMENT > 0 for parameter in bucket.parameters]
            assert odd == sorted(odd)
            assert {stage.index for stage in here} >= set(bucket.stages) and bucket.stages
            routers = {"router" in parameter.name for parameter in bucket.parameters}
            assert routers == {bucket.format == "float32"}
        shared = [spec.name for spec, also in held if also]
        alone = {bucket.parameters[0].name for bucket in buckets if len(bucket.parameters) == 1}
        assert alone >= set(shared)
        sizes_of_shared.append({name: placed[name].start for name in shared})
    assert sizes_of_shared[0] == sizes_of_shared[1] == dict.fromkeys(sizes_of_shared[0], 0)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 5000))
def test_four_steps_leave_a_rank_its_range(hosts: int, inside: int, size: int) -> None:
    """By the steps themselves: a host's i-th rank keeps the i-th run of a bucket, the j-th host its j-th part."""
    each = even_part(size, hosts * inside)
    for rank in range(hosts * inside):
        host, place = divmod(rank, inside)
        run = range(size)[place * hosts * each :][: hosts * each]
        owned = owned_range(size, hosts * inside, place_of_rank(hosts * inside, rank, inside))
        assert owned[:each] == run[host * each :][:each]
