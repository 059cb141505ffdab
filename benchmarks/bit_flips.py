"""Flip single bits of weights, moments and gradients on real ranks, and count what the comparison of hashes finds.

    python -m benchmarks.bit_flips --flips 200 --out docs/measured/bit_flips.json

Each flip is drawn: a layout, a rank, a tensor that this rank holds, one of its elements, and a bit of the sign, the
exponent or the mantissa. It happens after the backward pass of a step, in one of two kinds of steps:

    guarded     the step after a comparison: before its update, weights and moments are compared with their own hashes
    unguarded   any other step: what is left to find it is the comparison of replicas after this step

A flipped gradient is the reduced one, which the update reads. Whether a flip changes the state is known from the same
step without it. A flip counts as found if an error names the tensor, and as named if the right rank is the culprit, by
its own hash, by a majority, or, between two replicas, by taking the step again. A flip that makes the grad norm
infinite or NaN makes all ranks skip the step, which changes no state; it is counted as skipped, and must be named by
rank and tensor.

A clean run (`--clean-steps`) compares after and before every update; any error is a false alarm. The cost is the
processor time of one comparison (two hashes of everything, and the exchange) over that of one step, measured in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.comm.process_groups import Groups
from moefold.comm.spawn import spawn_ranks
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.data.samples import open_samples
from moefold.errors import CorruptionError
from moefold.optim.optimizer import ModelOptimizer
from moefold.parallel.parallelize import LocalModel, build_local_model, groups_of
from moefold.parallel.param_shards import local_part
from moefold.pipeline.step import StepSums, make_optimizer, run_step
from moefold.recipes.catalog import RECIPES
from moefold.train.batches import step_batches
from moefold.train.fault_tolerance.corruption import Finding, StateWatch, decided, read_findings
from moefold.train.fault_tolerance.non_finite import poisoned_gradients
from moefold.train.fault_tolerance.state_hash import hashes_of, held_state

# What replicates: nothing but buffers; everything; norms and routers over tp; flat buffers.
LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "dp2": (2, ParallelConfig()),
    "dp2 replicated": (2, ParallelConfig(dp_replicate=2, edp_replicate=2)),
    "dp4 replicated": (4, ParallelConfig(dp_replicate=4, edp_replicate=4)),
    "hsdp 2 x 2": (4, ParallelConfig(dp_replicate=2, edp_replicate=2)),
    "ep2 dp2": (4, ParallelConfig(ep=2, dp_replicate=2, edp_replicate=2)),
    "tp2 dp2": (4, ParallelConfig(tp=2, dp_replicate=2)),
    "flat dp2": (2, ParallelConfig(sharding="flat")),
}
# Bits of a float32.
BITS = {"mantissa": range(23), "exponent": range(23, 31), "sign": range(31, 32)}
KINDS = ("weight", "moment", "gradient")


class Draw(NamedTuple):
    rank: int
    kind: str
    # A number that picks one of the rank's tensors, and one that picks the element.
    tensor: int
    element: int
    bits: str
    bit: int
    guarded: bool


@dataclass(frozen=True)
class Outcome:
    """``changed``: the state after the step, or before its update; None if the run skipped the step."""

    draw: Draw
    tensor: str
    replicas: int
    changed: bool
    skipped: bool
    found: bool
    named: bool
    by: str


def draw_flips(count: int, world: int, seed: int) -> list[Draw]:
    draw = random.Random(seed)
    flips = []
    for number in range(count):
        bits = draw.choice(tuple(BITS))
        flips.append(
            Draw(
                draw.randrange(world),
                KINDS[number % len(KINDS)],
                draw.randrange(1 << 30),
                draw.randrange(1 << 30),
                bits,
                draw.choice(BITS[bits]),
                draw.random() < 0.5,
            )
        )
    return flips


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """One bit of a float32 element, in place."""
    flat = local_part(tensor.detach()).view(-1).view(torch.int32)
    flat[element % len(flat)] ^= 1 << bit if bit < 31 else -(1 << 31)


def small_run(parallel: ParallelConfig) -> RunConfig:
    base = RECIPES["debug_tiny"]()
    model = replace(base.model, num_layers=2)
    data = replace(base.data, seq_len=8, global_batch=4, micro_batch=1, validation=None)
    return replace(base, model=model, data=data, parallel=parallel)


class Laboratory:
    """A model on one rank after a few steps, to which it returns after each flip."""

    def __init__(self, run: RunConfig, groups: Groups, directory: Path) -> None:
        device = torch.device("cpu")
        self.local: LocalModel = build_local_model(run, groups, device)
        self.optimizer: ModelOptimizer = make_optimizer(self.local)
        samples = open_samples(run.data, run.model.vocab_size, run.seed, "train")
        self.batches = step_batches(samples, 0, run, groups, device).batches
        self.watch = StateWatch(self.local, self.optimizer, 1, directory)
        self.rank = groups.rank
        for _ in range(2):
            self.step()
        self.saved = [local_part(each.tensor.detach()).clone() for each in self.held()]
        self.clean = self.hashes_after(None)

    def held(self) -> list[Any]:
        return list(held_state(self.local, self.optimizer))

    def restore(self) -> None:
        with torch.no_grad():
            for each, saved in zip(self.held(), self.saved, strict=True):
                local_part(each.tensor).copy_(saved)
        self.local.sharding.weights_changed()

    def step(self, draw: Draw | None = None, watch: bool = False) -> bool:
        """Take a step with this flip in it; whether all ranks skipped it."""
        self.poison = ""

        def on_gradients(gradients: Mapping[str, Tensor]) -> None:
            if draw is not None and draw.rank == self.rank:
                flip(self.victim(draw, gradients)[1], draw.element, draw.bit)

        def reason_to_skip(sums: StepSums, grad_norm: Tensor) -> str | None:
            if watch:
                self.watch.before_update(3)
            if bool(torch.isfinite(grad_norm)):
                return None
            self.poison = poisoned_gradients(self.local)
            return "not finite"

        result = run_step(self.local, self.optimizer, self.batches, on_gradients, reason_to_skip)
        return result.skipped is not None

    def victim(self, draw: Draw, gradients: Mapping[str, Tensor]) -> tuple[str, Tensor, int]:
        """Name, tensor and number of replicas; of this rank's tensors of the kind, those that have elements."""
        replicas = {each.name: len(each.ranks) for each in self.held()}
        if draw.kind == "gradient":
            found = [(f"gradient/{name}", tensor, replicas[f"parameter/{name}"]) for name, tensor in gradients.items()]
        else:
            kinds = {"weight": ("parameter",), "moment": ("exp_avg", "exp_avg_sq")}[draw.kind]
            found = [
                (each.name, each.tensor, len(each.ranks))
                for each in self.held()
                if each.name.partition("/")[0] in kinds
            ]
        found = [each for each in found if local_part(each[1].detach()).numel()]
        return found[draw.tensor % len(found)]

    def hashes_after(self, draw: Draw | None) -> list[int]:
        self.step(draw)
        hashes = hashes_of(self.held(), self.watch.hash_bits)
        self.restore()
        return hashes

    def try_flip(self, draw: Draw) -> dict[str, Any]:
        """What this rank saw; the rank of the flip knows most."""
        mine = draw.rank == self.rank
        name, replicas = "", 0
        if mine:
            grads = {
                piece.name: piece.parameter.grad for piece in self.local.pieces() if piece.parameter.grad is not None
            }
            name, _, replicas = self.victim(draw, grads)
        error: CorruptionError | None = None
        skipped, changed, hashes = False, True, []
        self.watch.undecided = []
        written = len(read_findings(self.watch.directory))
        try:
            if draw.guarded:
                self.watch.after_update(2)
            skipped = self.step(draw, watch=True)
            hashes = hashes_of(self.held(), self.watch.hash_bits)
            self.watch.after_update(3)
        except CorruptionError as found:
            error = found
        if hashes:
            changed = hashes != self.clean and not skipped
        self.watch._baseline = None
        self.restore()
        findings = [] if self.rank else read_findings(self.watch.directory)[written:]
        return {
            "name": name,
            "replicas": replicas,
            "changed": changed,
            "skipped": skipped,
            "poison": self.poison,
            "found": error is not None,
            "findings": [asdict(each) for each in findings],
        }

    def clean_hashes(self) -> dict[str, str]:
        """By tensor, after a step without a flip."""
        names = (each.name for each in self.held())
        return {name: f"{value % 2**64:016x}" for name, value in zip(names, self.clean, strict=True)}


def outcome_of(draw: Draw, seen: Sequence[Mapping[str, Any]], clean: Sequence[Mapping[str, str]]) -> Outcome:
    own, first = seen[draw.rank], seen[0]
    parameter = own["name"].partition("/")[2]
    findings = [each for each in first["findings"] if each["tensor"].partition("/")[2] == parameter]
    findings = [each if each["culprits"] else _step_again(each, clean) for each in findings]
    culprits = {tuple(each["culprits"]) for each in findings}
    found = own["found"] and bool(findings)
    by = ", ".join(sorted({each["decided_by"] for each in findings}))
    named = found and culprits == {(draw.rank,)}
    if own["skipped"]:
        named = parameter in own["poison"] and str(draw.rank) in own["poison"].split(" on rank")[-1]
        by = "non-finite gradient"
    return Outcome(draw, own["name"], own["replicas"], own["changed"], own["skipped"], found, named, by)


def _step_again(found: Mapping[str, Any], clean: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Between two replicas: the step taken again, without the flip, has the right hash."""
    hashes = {int(rank): value for rank, value in found["hashes"].items()}
    right = clean[min(hashes)].get(found["tensor"])
    finding = Finding(**{**found, "hashes": hashes, "culprits": ()})
    return asdict(finding if right is None else decided(finding, right))


def flips_of(layout: str, count: int, seed: int) -> list[Outcome]:
    world, parallel = LAYOUTS[layout]
    run, draws = small_run(parallel), draw_flips(count, world, seed)
    with tempfile.TemporaryDirectory() as scratch:

        def work(rank: int) -> tuple[dict[str, str], list[dict[str, Any]]]:
            lab = Laboratory(run, groups_of(run, world, rank, timedelta(seconds=120)), Path(scratch))
            return lab.clean_hashes(), [lab.try_flip(draw) for draw in draws]

        clean, by_rank = zip(*spawn_ranks(work, world, seconds=1800), strict=True)
    return [outcome_of(draw, seen, clean) for draw, seen in zip(draws, zip(*by_rank, strict=True), strict=True)]


def coverable(outcome: Outcome) -> bool:
    """Whether it must be found: it changed the state, where a replica or the rank's own hash can show it."""
    guarded = outcome.draw.guarded and outcome.draw.kind != "gradient"
    return outcome.changed and not outcome.skipped and (outcome.replicas > 1 or guarded)


def summary(layout: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    must = [each for each in outcomes if coverable(each)]
    skipped = [each for each in outcomes if each.skipped]
    return {
        "layout": layout,
        "flips": len(outcomes),
        "must_be_found": len(must),
        "found": sum(each.found for each in must),
        "named": sum(each.named for each in must),
        "skipped": len(skipped),
        "skipped_named": sum(each.named for each in skipped),
        "without_effect": sum(not each.changed and not each.skipped for each in outcomes),
        "without_replica": sum(each.changed and not each.skipped and not coverable(each) for each in outcomes),
        "false_alarms": sum(each.found and not each.changed for each in outcomes),
        "missed": [asdict(each) for each in must if not (each.found and each.named)],
    }


# ---- a clean run, and what a comparison costs ----


def clean_steps(layout: str, steps: int) -> int:
    """Steps that were compared after and before each update without an error."""
    world, parallel = LAYOUTS[layout]
    run = small_run(parallel)

    def work(rank: int) -> int:
        groups, device = groups_of(run, world, rank, timedelta(seconds=120)), torch.device("cpu")
        with tempfile.TemporaryDirectory() as scratch:
            lab = Laboratory(run, groups, Path(scratch))
            samples = open_samples(run.data, run.model.vocab_size, run.seed, "train")
            for step in range(steps):
                lab.batches = step_batches(samples, step * run.data.global_batch, run, groups, device).batches
                lab.step(watch=True)
                lab.watch.after_update(step)
        return steps

    return min(spawn_ranks(work, world, seconds=7200))


def cost(recipe: str, parallel: ParallelConfig, world: int, times: int) -> dict[str, Any]:
    """Processor seconds of a step and of a comparison, the middle of ``times`` of each, in turns."""
    run = replace(RECIPES[recipe](), parallel=parallel)

    def work(rank: int) -> list[float]:
        with tempfile.TemporaryDirectory() as scratch:
            lab = Laboratory(run, groups_of(run, world, rank, timedelta(seconds=600)), Path(scratch))
            taken: list[tuple[float, float]] = []
            for step in range(times):
                began = time.process_time()
                lab.step()
                middle = time.process_time()
                lab.watch.after_update(step)
                lab.watch.before_update(step + 1)
                taken.append((middle - began, time.process_time() - middle))
        return [median(column) for column in zip(*taken, strict=True)]

    step, compare = (max(column) for column in zip(*spawn_ranks(work, world, seconds=3600), strict=True))
    every = run.train.corruption.every
    return {
        "recipe": recipe,
        "world": world,
        "step_seconds": round(step, 5),
        "comparison_seconds": round(compare, 5),
        "every": every,
        "fraction_of_step": round(compare / step / every, 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clean-steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows = []
    for number, layout in enumerate(LAYOUTS):
        share = args.flips // len(LAYOUTS) + (number < args.flips % len(LAYOUTS))
        rows.append(summary(layout, flips_of(layout, share, args.seed + number)))
        print(json.dumps(rows[-1]), flush=True)
    costs = [cost("debug_small", ParallelConfig(), 1, 12), cost("debug_tiny", LAYOUTS["dp2 replicated"][1], 2, 40)]
    print(json.dumps(costs), flush=True)
    clean = {"layout": "dp2 replicated", "steps": clean_steps("dp2 replicated", args.clean_steps), "false_alarms": 0}
    facts = {"flips": args.flips, "seed": args.seed, "layouts": rows, "cost": costs, "clean": clean}
    if args.out is not None:
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
