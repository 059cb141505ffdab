"""What if: the same workload with one thing changed, predicted again.

Some questions are about the machine (a larger domain of fast links, a faster network), some about the layout or the
framework (more experts' ranks, larger microbatches, no recompute). Each answer is a prediction or the rule that forbids
it. An answer that does not fit is still given its time: it says what memory costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moefold.plan.predict import predict
from moefold.plan.prediction import Prediction
from moefold.plan.search.candidates import LayoutChoice, choice_of_workload, limits_of, why_illegal, workload_of_choice
from moefold.plan.search.space import Space, usual_space
from moefold.plan.workload import Workload, changed

_RACK, _NODE = 72, 8


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
