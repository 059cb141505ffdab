"""A measured machine: its table as a file, and what the planner makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moefold.api.plans import plan
from moefold.config.loading import override
from moefold.config.run import RunConfig
from moefold.errors import ConfigError
from moefold.hardware.cluster import cluster_of_machine
from moefold.hardware.machine import Crowd, Machine, Operation, Wire, machine_json, over_link, read_machine
from moefold.plan.predict import predict
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload, workload_of_run
from moefold.recipes.debug import debug_10m

OPERATIONS: tuple[Operation, ...] = ("tokens", "exchange", "context", "send", "sum", "parameters", "gradients")


def made_up(us: float = 100.0) -> Machine:
    """Two cores, four ranks, and messages that cost ``us`` microseconds and one more per kilobyte."""
    return Machine(
        name="two cores",
        cores=2,
        memory_gb=16.0,
        gemm_gflops=100.0,
        gemm_gb_s=10.0,
        grouped=1.0,
        attention_forward_gflops=30.0,
        attention_backward_gflops=40.0,
        traffic_gb_s=4.0,
        operation_us=10.0,
        expert_us=5.0,
        update_ns=5.0,
        wires=tuple(
            Wire(operation, world, group, (1e3, 1e6), (us + 1, us + 1e3))
            for operation in OPERATIONS
            for world, group in ((2, 2), (4, 2), (4, 4))
        ),
        crowds=(Crowd(1, 1.0, 2000.0), Crowd(2, 1.0, 2000.0), Crowd(4, 2.0, 4000.0)),
    )


def workload(world: int, machine: Machine, **parallel: object) -> Workload:
    run = override(debug_10m(), {f"parallel.{name}": str(value) for name, value in parallel.items()})
    return workload_of_run(run, cluster_of_machine(machine, world))


def seconds(world: int, machine: Machine, **parallel: object) -> float:
    return predict_time(workload(world, machine, **parallel)).step_seconds


def test_a_table_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_json(made_up()))
    assert read_machine(path) == made_up()


def test_every_problem_of_a_table_is_told_at_once(tmp_path: Path) -> None:
    data = json.loads(machine_json(made_up()))
    data["gemm_gflops"] = -1.0
    data["crowds"] = data["crowds"][1:]
    data["wires"] = [wire for wire in data["wires"] if wire["operation"] != "send"]
    data["wires"][0]["us"] = [1.0]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as raised:
        read_machine(path)
    told = str(raised.value)
    assert all(word in told for word in ("gemm_gflops", "one rank alone", "send", "wires.0", "bench calibrate"))


@pytest.mark.parametrize("text", ["", "[]", '{"name": 1}', "\x00", '{"cores": "2"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="bench calibrate"):
        read_machine(path)


def test_messages_lie_on_lines_between_measured_sizes() -> None:
    wire = Wire("send", 2, 2, (1e3, 2e3, 4e3), (10.0, 12.0, 20.0))
    us = [1e6 * wire.seconds(size) for size in (0.0, 1e3, 1.5e3, 2e3, 3e3, 6e3)]
    assert us == pytest.approx([10.0, 10.0, 11.0, 12.0, 16.0, 28.0])


def test_crowds_are_interpolated_and_continued() -> None:
    machine = made_up()
    assert [machine.slowdown(ranks) for ranks in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 4.0])


def test_ranks_that_share_cores_are_slower() -> None:
    """Twice the ranks on the same cores: half the work each, at half the speed."""
    quick = made_up(us=1e-3)
    two, four = predict_time(workload(2, quick)), predict_time(workload(4, quick))
    assert four.of("compute") == pytest.approx(two.of("compute"), rel=0.15)


def test_waiting_stages_leave_their_core_to_others() -> None:
    """Four stages on two cores: all work on two cores, however long the pipeline waits."""
    machine = made_up(us=1e-3)
    assert seconds(4, machine, pp=4) < 1.6 * seconds(2, machine, pp=2)


def test_messages_cost_what_they_were_measured_to_cost() -> None:
    cheap, dear = made_up(us=1.0), made_up(us=10_000.0)
    assert seconds(1, cheap) == seconds(1, dear)
    for parallel in ({}, {"tp": 2}, {"ep": 2}, {"cp": 2}, {"pp": 2}):
        assert seconds(2, dear, **parallel) > 1.2 * seconds(2, cheap, **parallel)


def test_bytes_cross_a_link_as_often_as_they_are_sent() -> None:
    """A gigabyte per second is a microsecond per kilobyte; an exchange crosses four times, keys and values three."""
    before, after = made_up(), over_link(made_up(), 1.0)
    for wire, slower in zip(before.wires, after.wires, strict=True):
        times = {"exchange": 4, "context": 3}.get(wire.operation, 1)
        assert slower.us == pytest.approx([wire.us[0] + times * 1.0, wire.us[1] + times * 1e3])
    assert replace(after, wires=before.wires) == before
    # A link that is fast enough changes nothing, a slow one becomes the wall.
    walls = [predict(workload(2, over_link(before, gb_s), ep=2)).wall for gb_s in (1e6, 1e-3)]
    assert walls == ["compute", "communication"]
    assert seconds(2, over_link(before, 1e9), ep=2) == pytest.approx(seconds(2, before, ep=2))


def test_what_the_host_does_beside_is_added_to_the_step() -> None:
    busy = replace(made_up(), host_ms=250.0)
    assert seconds(2, busy, ep=2) == pytest.approx(seconds(2, made_up(), ep=2) + 0.25)
    assert predict(workload(2, replace(busy, host_ms=1e4), ep=2)).wall == "host"


def test_a_plan_takes_the_link_of_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(machine_json(made_up()))
    run = override(debug_10m(), {"parallel.ep": "2"})
    near, far = (plan(run, gpus=2, machine=path, nic_gb_s=gb_s, search=False) for gb_s in (None, 1e-3))
    assert (near.wall, far.wall) == ("compute", "communication")


def test_imbalance_counts_where_experts_are_spread() -> None:
    machine = made_up()

    def uneven(world: int, **parallel: object) -> float:
        asked = workload(world, machine, **parallel)
        return predict_time(replace(asked, imbalance=1.5)).step_seconds

    assert uneven(2) == seconds(2, machine)
    assert uneven(2, ep=2) > seconds(2, machine, ep=2)


def test_formats_that_were_not_measured_are_refused() -> None:
    run: RunConfig = override(debug_10m(), {"precision.compute": "bfloat16"})
    with pytest.raises(ConfigError, match="measured in float32"):
        predict_time(workload_of_run(run, cluster_of_machine(made_up(), 1)))
