"""A machine that was measured: what one rank gets of it, and what ranks cost each other.

Accelerators have data sheets; the computer on the desk has none that helps. `moefold bench calibrate` measures it and
writes this table as JSON, and the planner reads it in place of nominal figures and fitted shares. Nothing here runs
beside anything else: a rank computes, then waits for its collective, then computes on.

    gemm       a matmul takes arithmetic / gemm_gflops + bytes of its operands / gemm_gb_s
    traffic    what only moves memory, counted as `plan/op_costs.py` counts it, and a fixed time per operation
    wires      how long messages of some sizes take, by operation, group and how many ranks are at work
    crowds     so many ranks at once slow each other down by this factor: they share cores

What is not measured can be described: ``over_link`` puts every rank on a host of its own, behind a link of a rate, and
``host_ms`` is what a rank's host does in every step beside training: collect garbage, read a batch late.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from moefold.config.strict import STRICT
from moefold.errors import ConfigError, Problem

# What ranks do together, by bytes that one of them receives.
#   tokens       all_gather before a sharded matmul, reduce_scatter after it
#   exchange     what an MoE layer takes longer with experts on other ranks, forward and backward, by rows one way
#   context      what attention takes longer over ranks, forward and backward, by keys and values
#   send, sum    one message; one all-reduce
#   parameters, gradients   gathered and summed by sharded data parallelism, its copies included
Operation = Literal["tokens", "exchange", "context", "send", "sum", "parameters", "gradients"]
# A machine's table is a few kilobytes.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Wire:
    """One operation among ``group`` ranks while ``world`` ranks are at work, in groups side by side.

    ``us[i]`` is its time when a rank receives ``received[i]`` bytes, in rising order. Large buffers cost more per byte
    than small ones, so this is no straight line.
    """

    __pydantic_config__ = STRICT

    operation: Operation
    world: int
    group: int
    received: tuple[float, ...]
    us: tuple[float, ...]

    def seconds(self, received: float) -> float:
        """On the line between two measured sizes; beyond the largest, at its rate."""
        last = len(self.us) - 1
        index = min(last, next((i for i, each in enumerate(self.received) if each >= received), last))
        if index == 0:
            return self.us[0] * 1e-6
        low, high = self.received[index - 1], self.received[index]
        share = (received - low) / (high - low)
        return (self.us[index - 1] + share * (self.us[index] - self.us[index - 1])) * 1e-6

    @property
    def gb_s(self) -> float:
        """Of the largest message."""
        return self.received[-1] / self.us[-1] / 1e3


@dataclass(frozen=True)
class Crowd:
    """How many times longer everything takes when so many ranks compute at once, and how long the reference then does.

    The reference is a matmul of 512 x 512 x 512: hold it against this to know how busy the machine is.
    """

    __pydantic_config__ = STRICT

    ranks: int
    slowdown: float
    reference_us: float


@dataclass(frozen=True)
class Machine:
    """Rates are those of one rank with one thread that has the machine to itself, in float32."""

    __pydantic_config__ = STRICT

    name: str
    cores: int
    memory_gb: float
    gemm_gflops: float
    gemm_gb_s: float
    # Arithmetic of experts' matmuls against one large matmul's.
    grouped: float
    attention_forward_gflops: float
    attention_backward_gflops: float
    traffic_gb_s: float
    # Framework time of one operation, and of one expert in a loop over experts.
    operation_us: float
    expert_us: float
    # Norm, clipping and update of one parameter.
    update_ns: float
    wires: tuple[Wire, ...]
    crowds: tuple[Crowd, ...]
    host_ms: float = 0.0

    def slowdown(self, ranks: int) -> float:
        """Between measured numbers of ranks, in proportion; beyond them, cores are shared evenly."""
        known = sorted((crowd.ranks, crowd.slowdown) for crowd in self.crowds)
        if ranks >= known[-1][0]:
            return known[-1][1] * ranks / known[-1][0]
        low = max(pair for pair in known if pair[0] <= ranks)
        high = min(pair for pair in known if pair[0] >= ranks)
        if low == high:
            return low[1]
        return low[1] + (high[1] - low[1]) * (ranks - low[0]) / (high[0] - low[0])

    def seconds(self, operation: Operation, received: float, group: int, world: int, calls: float = 1.0) -> float:
        """``calls`` equal operations that bring a rank so many bytes together."""
        return calls * self._wire(operation, group, world).seconds(received / calls) if calls else 0.0

    def _wire(self, operation: Operation, group: int, world: int) -> Wire:
        """The one that was measured nearest to this: first by how many ranks are at work, then by the group."""
        same = [wire for wire in self.wires if wire.operation == operation]
        return min(same, key=lambda wire: (abs(wire.world - world), abs(wire.group - group)))


# How often the bytes by which an operation is measured cross a link: rows of an exchange go out and home, in both
# passes; keys and values go round once forward, and twice with their gradients. The others are one way.
_CROSSINGS: dict[Operation, int] = {"exchange": 4, "context": 3}


def over_link(machine: Machine, gb_s: float) -> Machine:
    """The same computer with every rank on a host of its own that sends and receives 1e9 * ``gb_s`` bytes per second.

    Messages take as long as measured, and the time of their bytes on the link.
    """
    wires = []
    for wire in machine.wires:
        crossings = _CROSSINGS.get(wire.operation, 1)
        us = tuple(us + crossings * received / gb_s / 1e3 for us, received in zip(wire.us, wire.received, strict=True))
        wires.append(replace(wire, us=us))
    return replace(machine, wires=tuple(wires))


def read_machine(path: str | Path) -> Machine:
    """The table in a file, or every problem with it."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES)
        machine = _adapter().validate_json(content, strict=True)
    except OSError as error:
        raise ConfigError(Problem(str(path), f"cannot be read: {error.strerror}", _REMEDY)) from None
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)[:20]
        raise ConfigError(*(Problem(_place(path, each["loc"]), each["msg"], _REMEDY) for each in errors)) from None
    if problems := _problems(str(path), machine):
        raise ConfigError(*problems)
    return machine


def machine_json(machine: Machine) -> str:
    return json.dumps(asdict(machine), indent=2) + "\n"


_REMEDY = "make one with `moefold bench calibrate --out machine.json`"


def _place(path: str | Path, loc: tuple[Any, ...]) -> str:
    return ": ".join((str(path), ".".join(str(part) for part in loc)))


def _problems(path: str, machine: Machine) -> list[Problem]:
    """Every rate is a positive number, one rank alone is the measure of crowds, and every operation was measured."""
    found = []
    numbers = {field.name: getattr(machine, field.name) for field in fields(machine)}
    for name, value in numbers.items():
        # What an operation costs beyond its bytes may be too little to measure.
        least_is_zero = name in ("operation_us", "expert_us", "host_ms")
        if isinstance(value, int | float) and not (isfinite(value) and (value > 0 or (least_is_zero and value == 0))):
            found.append(Problem(f"{path}: {name}", f"is {value:g}, not a positive number", _REMEDY))
    if not any(crowd.ranks == 1 for crowd in machine.crowds):
        found.append(Problem(f"{path}: crowds", "one rank alone is missing", _REMEDY))
    for index, crowd in enumerate(machine.crowds):
        if crowd.ranks < 1 or not all(isfinite(each) and each > 0 for each in (crowd.slowdown, crowd.reference_us)):
            found.append(Problem(f"{path}: crowds.{index}", f"{crowd} is not a slowdown of ranks", _REMEDY))
    for index, wire in enumerate(machine.wires):
        rising = all(low < high for low, high in pairwise(wire.received))
        if len(wire.us) != len(wire.received) or len(wire.us) < 2 or not rising:
            message = f"{wire.operation} has {len(wire.us)} times for {len(wire.received)} sizes in rising order"
            found.append(Problem(f"{path}: wires.{index}", message, _REMEDY))
        elif not all(isfinite(each) and each > 0 for each in (*wire.us, *wire.received)):
            found.append(
                Problem(f"{path}: wires.{index}", f"{wire.operation} is not made of positive numbers", _REMEDY)
            )
    missing = set(Operation.__args__) - {wire.operation for wire in machine.wires}  # type: ignore[attr-defined]
    if missing:
        found.append(Problem(f"{path}: wires", f"without {', '.join(sorted(missing))}", _REMEDY))
    return found


@cache
def _adapter() -> TypeAdapter[Machine]:
    return TypeAdapter(Machine)
