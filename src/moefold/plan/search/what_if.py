"""What if: the same workload with one thing changed, predicted again.

Some questions are about the machine (a larger domain of fast links, a faster network), some about the layout or the
framework (more experts' ranks, larger microbatches, no recompute). Each answer is a prediction or the rule that forbids
it. An answer that does not fit is still given its time: it says what memory costs.

One question is about the batch: its number of sequences decides over how many ranks it divides, and one sequence more
or less can cost most of the throughput.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from moefold.plan.predict import predict
from moefold.plan.prediction import Prediction
from moefold.plan.search.candidates import choice_of_workload, why_illegal, workload_of_choice
from moefold.plan.search.search import coarse_best
from moefold.plan.search.space import LayoutChoice, Space, limits_of, usual_space
from moefold.plan.workload import Workload, changed

_RACK, _NODE = 72, 8
# Batches are looked at up to this far from the one that was asked for, and told from this much more throughput on.
_OTHER_BATCH, _WORTH_A_BATCH = 0.1, 0.05
# The nearest batch is told that has this share of what the best of them gains.
_MOST_OF_IT = 0.8


@dataclass(frozen=True)
class Answer:
    """`prediction` is None where a rule forbids the change; `reason` then says which."""

    question: str
    about: str
    prediction: Prediction | None = None
    reason: str = ""

    def faster(self, than: Prediction) -> float:
        """By which share the step gets shorter; negative if it gets longer."""
        return 1 - self.prediction.time.step_seconds / than.time.step_seconds if self.prediction else 0.0


def answers(workload: Workload) -> list[Answer]:
    """Every question that makes sense for this workload."""
    return [*_about_machine(workload), *_about_layout(workload), *_about_framework(workload)]


def _about_machine(workload: Workload) -> Iterator[Answer]:
    cluster, gpu = workload.cluster, workload.cluster.gpu
    if cluster.machine is not None:
        # Measured as a whole: nobody knows what another network would change.
        return
    if workload.model.is_moe or workload.parallel.tp > 1:
        for domain in (_RACK, _NODE):
            made = replace(workload, cluster=replace(cluster, domain=domain))
            if domain != cluster.domain and made.cluster.usable_domain <= cluster.num_gpus:
                yield Answer(f"the NVLink domain were {domain}", "machine", predict(made))
    twice = replace(cluster, nic_gb_s=2 * cluster.nic_gb_s)
    yield Answer("the network were twice as fast", "machine", predict(replace(workload, cluster=twice)))
    links = replace(cluster, gpu=replace(gpu, link_gb_s=2 * gpu.link_gb_s))
    yield Answer("NVLink were twice as fast", "machine", predict(replace(workload, cluster=links)))
    # With the power that it takes: GPUs sustain a share of their peak that depends on their watts.
    rate = {name: 2 * getattr(gpu, name) for name in ("bf16_tflops", "fp8_tflops", "fp4_tflops", "watts")}
    matmuls = replace(cluster, gpu=replace(gpu, **rate))
    yield Answer("matmuls were twice as fast", "machine", predict(replace(workload, cluster=matmuls)))


def _about_layout(workload: Workload) -> Iterator[Answer]:
    own, space = choice_of_workload(workload), usual_space(workload)
    for name, label in (("ep", "EP"), ("tp", "TP"), ("pp", "PP"), ("vpp", "VPP"), ("cp", "CP"), ("sequences", "MBS")):
        size = getattr(own, name)
        for other in dict.fromkeys((size // 2, size * 2)):
            if other >= 1 and other != size and _worth_asking(workload, name, other):
                yield _changed(workload, own._replace(**{name: other}), space, f"{label} {other}", "layout")


def _worth_asking(workload: Workload, name: str, size: int) -> bool:
    if name == "ep":
        return workload.model.is_moe
    if name == "vpp":
        return workload.parallel.pp > 1
    return name != "cp" or workload.parallel.cp > 1 or workload.run.data.seq_len >= 16_384


def _about_framework(workload: Workload) -> Iterator[Answer]:
    own, space = choice_of_workload(workload), usual_space(workload)
    if own.recompute:
        yield _changed(workload, own._replace(recompute=frozenset()), space, "nothing were recomputed", "framework")
    if own.ep * own.etp > 1:
        hidden = "dispatch were not overlapped" if own.ep_overlap else "dispatch were overlapped"
        yield _changed(workload, own._replace(ep_overlap=not own.ep_overlap), space, hidden, "framework")
        for dispatcher in space.dispatcher:
            if dispatcher not in (own.dispatcher, "local"):
                yield _changed(
                    workload,
                    own._replace(dispatcher=dispatcher),
                    space,
                    f"the dispatcher were {dispatcher}",
                    "framework",
                )
    for clones in space.clones:
        if clones != own.clones:
            words = f"ranks had {clones} spare slots for hot experts" if clones else "no expert were cloned"
            yield _changed(workload, own._replace(clones=clones), space, words, "framework")
    for graphs in space.graphs:
        if graphs != own.graphs:
            words = "kernels were launched one by one" if graphs == "none" else f"graphs were {graphs}"
            yield _changed(workload, own._replace(graphs=graphs), space, words, "framework")
    for format in space.format:
        if format != own.format:
            yield _changed(workload, own._replace(format=format), space, f"matmuls were in {format}", "framework")
    balanced = replace(workload, imbalance=workload.imbalance + 0.3)
    if workload.model.is_moe and not workload.drops:
        words = f"the busiest rank got {balanced.imbalance:.1f} times the mean"
        yield Answer(words, "framework", predict(balanced))


def _changed(workload: Workload, choice: LayoutChoice, space: Space, question: str, about: str) -> Answer:
    limits = limits_of(workload)
    reason = why_illegal(choice, limits, space)
    if reason is not None:
        return Answer(question, about, reason=reason)
    made = workload_of_choice(choice, workload, limits, space)
    same_stages = (choice.pp, choice.vpp) == (workload.parallel.pp, workload.parallel.vpp)
    if same_stages:
        made = changed(made, parallel={"stages": workload.parallel.stages})
    return Answer(question, about, predict(made))


# ---- the batch ----


@dataclass(frozen=True)
class BatchAdvice:
    """The nearest batch that divides better, and what it would bring at least."""

    asked: int
    batch: int
    # Ranks over which each divides: the largest divisor that it shares with the number of GPUs.
    asked_divides: int
    divides: int
    asked_tokens_per_second_per_gpu: float
    tokens_per_second_per_gpu: float

    @property
    def gain(self) -> float:
        return self.tokens_per_second_per_gpu / self.asked_tokens_per_second_per_gpu - 1


def batches_near(batch: int, world: int) -> list[int]:
    """Batches that share more with the number of GPUs, the nearest first, each sharing more than those before it."""
    found: list[int] = []
    reach = int(_OTHER_BATCH * batch)
    for away in range(1, reach + 1):
        for other in (batch + away, batch - away):
            if gcd(other, world) > gcd(found[-1] if found else batch, world):
                found.append(other)
    return found


def better_batch(template: Workload, space: Space, headroom: float, chosen: Prediction) -> BatchAdvice | None:
    """None where the batch divides well: no batch nearby has much more throughput."""
    data, world = template.run.data, template.cluster.num_gpus
    # Where twice the data-parallel ranks would divide it too, it is not the batch that chose their number.
    free = data.packing == "bin_packed" or gcd(data.global_batch, world) >= 2 * chosen.workload.dp
    others = [] if free else batches_near(data.global_batch, world)
    # As the choice cuts layers and sequences, or not at all.
    degrees = chosen.workload.parallel
    kept = {axis: {1, getattr(degrees, axis)} for axis in ("tp", "cp", "etp")}
    space = replace(space, **{axis: tuple(v for v in getattr(space, axis) if v in kept[axis]) for axis in kept})

    def rate(batch: int) -> float:
        made = changed(template, data={"global_batch": batch})
        found = coarse_best(made, space, headroom)
        return 0.0 if found is None else batch * data.seq_len / world / found.seconds

    now = chosen.tokens_per_second_per_gpu
    best = rate(others[-1]) if others else 0.0
    if best < (1 + _WORTH_A_BATCH) * now:
        return None
    for other in others:
        found = best if other == others[-1] else rate(other)
        if found - now >= _MOST_OF_IT * (best - now):
            shared = (gcd(data.global_batch, world), gcd(other, world))
            return BatchAdvice(data.global_batch, other, *shared, now, found)
    raise AssertionError("the last of them is the best")
