"""Why this layout, in words: compared with another line by line, which wall binds, and what would move it.

Also why memory is used as it is: how data parallelism shards, which savings are on, and what each of them costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moefold.config.parallel import RankOrderConfig
from moefold.plan.memory.peak import predict_memory
from moefold.plan.memory.saving_steps import Savings, SavingStep, is_trained, offered, saving, savings_of
from moefold.plan.prediction import Prediction, Wall
from moefold.plan.search.candidates import choice_of_workload
from moefold.plan.search.space import LayoutChoice
from moefold.plan.search.what_if import Answer, BatchAdvice
from moefold.plan.timing.layer_time import shards_by_layer
from moefold.plan.timing.step_time import predict_time, step_time
from moefold.plan.traffic import data_reach, dense_reach, expert_data_reach, expert_grid_reach, expert_reach
from moefold.plan.workload import Workload, changed
from moefold.units import format_bytes

# Differences below this share of the whole are not worth a word.
_WORTH_A_WORD = 0.01
_GROUPS = ("weights", "gradients", "optimizer", "activations", "buffers", "overhead")
_OPTION_NAMES = {
    "sequences": "microbatch",
    "ep_overlap": "overlapped dispatch",
    "delay_wgrad": "delayed wgrad",
    "dense_order": "order of dense ranks",
    "expert_order": "order of experts' ranks",
}
# Standard deviation of log(predicted / measured) within a sweep of layouts of one model, cluster and batch: the median
# of nine published sweeps by constants that had seen them, 0.05 to 0.19 for MoE models, 0.03 to 0.17 for dense ones.
SWEEP_SPREAD = {"moe": 0.16, "dense": 0.09}
_MEANING: dict[Wall, str] = {
    "memory": "it does not fit",
    "communication": "ranks wait for each other's data",
    "compute": "the GPU's arithmetic and memory are busy",
    "host": "the GPU waits for the host to launch work",
}


@dataclass(frozen=True)
class SwitchedOn:
    """A saving of a chosen workload: what the fullest rank would hold more and the step take less without it."""

    words: str
    entries: Savings
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Difference:
    """One line of two predictions; positive is more in the second."""

    name: str
    first: float
    second: float

    @property
    def more(self) -> float:
        return self.second - self.first


def seconds(time: float) -> str:
    """Steps are compared with each other, so all of them are in seconds."""
    return f"{time:.2f} s" if time >= 0.1 else f"{1000 * time:.1f} ms"


def time_differences(first: Prediction, second: Prediction) -> list[Difference]:
    """Exposed seconds by cause, the largest difference first."""
    return _differences(_exposed(first), _exposed(second))


def memory_differences(first: Prediction, second: Prediction) -> list[Difference]:
    """Bytes by group, the largest difference first."""
    return _differences(_held(first), _held(second))


def layout_words(workload: Workload) -> str:
    """The layout for someone who does not read its letters, and which of its groups leave a domain of fast links."""
    parallel = workload.parallel
    parts = []
    if parallel.pp > 1:
        each = f" of {parallel.vpp} stages each" if parallel.vpp > 1 else ""
        parts.append(f"a pipeline of {parallel.pp} ranks{each}")
    if parallel.tp > 1:
        parts.append(f"every layer cut over {parallel.tp}")
    if parallel.cp > 1:
        parts.append(f"every sequence over {parallel.cp}")
    if parallel.ep * parallel.etp > 1:
        domains = expert_grid_reach(workload, "ep", "etp").domains
        where = "inside one domain" if domains == 1 else f"over {domains} domains of fast links"
        wide = f", each cut over {parallel.etp}" if parallel.etp > 1 else ""
        parts.append(f"experts distributed over {parallel.ep} ranks{wide} ({where})")
    parts.append(f"{workload.dp} data-parallel copies of the attention, which shard {_SHARDED[parallel.sharding]}")
    size = "1 sequence" if workload.run.data.micro_batch == 1 else f"{workload.run.data.micro_batch} sequences"
    return f"That is {', '.join(parts)}. Each copy runs {workload.microbatches} microbatches of {size} per step."


def rank_order_words(workload: Workload) -> str:
    """Which groups an unusual order of ranks puts near, and what the usual one would cost; else nothing."""
    parallel, usual = workload.parallel, RankOrderConfig()
    if parallel.rank_order == usual:
        return ""
    groups = (
        ("cp", dense_reach(workload, "cp")),
        ("dp and cp", data_reach(workload)),
        ("ep", expert_reach(workload)),
        ("edp", expert_data_reach(workload)),
    )
    where = [
        f"{name} {'inside one domain' if found.domains == 1 else f'over {found.domains}'}"
        for name, found in groups
        if found.size > 1 and (name != "cp" or found.size < data_reach(workload).size)
    ]
    order = parallel.rank_order
    again = predict_time(changed(workload, parallel={"rank_order": usual})).step_seconds
    more = again / predict_time(workload).step_seconds - 1
    cost = f"{abs(more):.1%} {'slower' if more > 0 else 'faster'}" if abs(more) >= 5e-4 else "as fast"
    return (
        f"Ranks are ordered {order.dense} and {order.expert}, innermost first: {', '.join(where)}. "
        f"In the usual order ({usual.dense}, {usual.expert}) the step would be {cost}."
    )


_SHARDED = {
    "none": "nothing",
    "zero1": "optimizer states",
    "zero2": "gradients and optimizer states",
    "fsdp": "weights, gradients and optimizer states",
    "flat": "main weights and optimizer states",
}


def changed_choices(first: LayoutChoice, second: LayoutChoice) -> str:
    """What the second chooses differently: `ep 64 instead of 32, no graphs instead of full`."""
    words = []
    for name, a, b in zip(LayoutChoice._fields, first, second):
        if a != b and name != "savings":
            words.append(f"{_OPTION_NAMES.get(name, name)} {_shown(b)} instead of {_shown(a)}")
    # Layouts that need savings share most of them.
    words += [f"also {_short(entry)}" for entry in sorted(second.savings - first.savings)]
    words += [f"no {_short(entry)}" for entry in sorted(first.savings - second.savings)]
    return ", ".join(words) or "the same choices"


def _short(entry: str) -> str:
    return entry.removeprefix("memory.").removeprefix("precision.")


def versus(best: Prediction, other: Prediction, name: str) -> str:
    """One paragraph: the choice against another layout called `name`."""
    choices = changed_choices(choice_of_workload(best.workload), choice_of_workload(other.workload))
    own, others = best.time.step_seconds, other.time.step_seconds
    share = others / own - 1
    if abs(share) < 0.0005:
        speed = f"takes the same time ({seconds(others)})"
    else:
        speed = f"is {abs(share):.1%} {'slower' if share > 0 else 'faster'} ({seconds(others)} against {seconds(own)})"
    error = sweep_spread(best.workload)
    unsure = (
        "" if abs(share) > error else f"; errors within one sweep differ by {error:.0%}, so it may be the other way"
    )
    time = _listed(time_differences(best, other), own, seconds)
    memory = _listed(memory_differences(best, other), best.memory.total, format_bytes)
    fit = "" if other.memory.fits else f" It does not fit: {format_bytes(other.memory.total)}."
    return (
        f"{name} has {choices}. It {speed}{unsure}."
        + (f" Time: {time}." if time else "")
        + (f" Memory: {memory}." if memory else "")
        + fit
    )


def wall_words(prediction: Prediction) -> str:
    """Which wall binds, with the share of the step that each takes."""
    time = prediction.time
    shares = {wall: time.of(wall) / time.step_seconds for wall in ("compute", "communication", "host", "bubble")}
    listed = ", ".join(f"{wall} {share:.0%}" for wall, share in sorted(shares.items(), key=lambda item: -item[1]))
    largest = max(
        (line for line in time.lines if line.wall == prediction.wall),
        key=lambda line: line.seconds - line.hidden,
        default=None,
    )
    if prediction.wall == "memory":
        over = prediction.memory.total - prediction.memory.capacity
        first = f"Memory binds: {format_bytes(over)} more than the GPU has"
    else:
        part = f", most of it {largest.name}" if largest else ""
        first = f"{prediction.wall.capitalize()} binds: {_MEANING[prediction.wall]}{part}"
    return f"{first}. Exposed time: {listed}."


def what_would_move(prediction: Prediction, answers: Sequence[Answer]) -> str:
    """The changes that help most, and those that memory alone forbids."""
    faster = [each for each in answers if each.prediction and each.faster(prediction) > _WORTH_A_WORD]
    faster.sort(key=lambda each: -each.faster(prediction))
    fitting = [each for each in faster if each.prediction and each.prediction.memory.fits]
    words = [f"if {each.question}, {each.faster(prediction):.0%} faster" for each in fitting[:4]]
    sentence = f"What would move it: {'; '.join(words)}." if words else "No single change makes it faster."
    held_back = [each for each in faster if each.prediction and not each.prediction.memory.fits]
    if held_back and held_back[0].prediction:
        first = held_back[0]
        needs = held_back[0].prediction.memory.total - prediction.memory.capacity
        sentence += (
            f" With {format_bytes(needs)} more memory, if {first.question}: {first.faster(prediction):.0%} faster."
        )
    return sentence


def _exposed(prediction: Prediction) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in prediction.time.lines:
        found[line.name] = found.get(line.name, 0.0) + line.seconds - line.hidden
    return found


def _held(prediction: Prediction) -> dict[str, float]:
    return {group: prediction.memory.of(group) for group in _GROUPS}


def _differences(first: dict[str, float], second: dict[str, float]) -> list[Difference]:
    names = dict.fromkeys((*first, *second))
    found = [Difference(name, first.get(name, 0.0), second.get(name, 0.0)) for name in names]
    return sorted(found, key=lambda each: -abs(each.more))


def _listed(differences: list[Difference], whole: float, shown: Callable[[float], str]) -> str:
    worth = [each for each in differences if abs(each.more) > _WORTH_A_WORD * whole][:4]
    return ", ".join(f"{each.name} {'+' if each.more > 0 else '-'}{shown(abs(each.more))}" for each in worth)


def sweep_spread(workload: Workload) -> float:
    """How far apart errors of predictions are within one measured sweep of layouts."""
    return SWEEP_SPREAD["moe" if workload.model.is_moe else "dense"]


def _shown(value: object) -> str:
    if isinstance(value, frozenset):
        return "+".join(sorted(value)) or "nothing"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


_SHARDING_NAMES = {"flat": "flat sharding", "fsdp": "FSDP2"}
_OTHER_SHARDING = {"flat": "fsdp", "fsdp": "flat"}


def sharding_words(chosen: Prediction) -> str:
    """The chosen one of our own framework's two shardings against the other; empty where there is no other."""
    workload = chosen.workload
    here = workload.parallel.sharding
    if not workload.is_own or here not in _OTHER_SHARDING or workload.cluster.num_gpus == 1:
        return ""
    there = _OTHER_SHARDING[here]
    if not is_trained(frozenset({f"parallel.sharding={there}"})):
        return ""
    # Remainders are of flat main weights.
    kept = savings_of(workload.run) - {"precision.master=remainder"}
    other = saving(changed(workload, parallel={"sharding": there}), kept)
    more = predict_memory(other).total - chosen.memory.total
    slower = predict_time(other).step_seconds / chosen.time.step_seconds - 1
    size = f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'}"
    time = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}" if abs(slower) >= 5e-4 else "as fast"
    chosen_words = f"Data parallelism is {_SHARDING_NAMES[here]}: {sent_words(workload)}."
    return f"{chosen_words} {_SHARDING_NAMES[there]} would hold {size} and be {time}: {sent_words(other)}."


def sent_words(workload: Workload) -> str:
    """What sharding sends and holds."""
    grads, weights = workload.gradient_bytes, workload.gather_bytes
    if shards_by_layer(workload):
        each = f"{2 * weights + grads:g} bytes per parameter and microbatch, {workload.microbatches} of them"
        return f"weights are gathered layer by layer ({each})"
    held = "one copy of the weights" if workload.is_flat else "gathered weights beside their shards"
    return f"{grads + weights:g} bytes per parameter and step, and {held} for the whole step"


def switched_on(workload: Workload, start: Savings) -> tuple[SwitchedOn, ...]:
    """What each saving beyond ``start`` frees and costs, the largest first."""
    now = savings_of(workload.run, workload.is_own)
    held, seconds = predict_memory(saving(workload, now)).total, step_time(saving(workload, now)).total
    found = []
    for step in offered_on(workload, now - start):
        without = saving(workload, now - (step.entries - start))
        freed, cost = predict_memory(without).total - held, seconds - step_time(without).total
        found.append(SwitchedOn(step.words, step.entries, freed, cost))
    return tuple(sorted(found, key=lambda one: -one.bytes))


def offered_on(workload: Workload, entries: Savings) -> tuple[SavingStep, ...]:
    bare = saving(workload, savings_of(workload.run, workload.is_own) - entries)
    return tuple(step for step in offered(bare) if step.entries <= entries)


def savings_words(chosen: Prediction, saved: Sequence[SwitchedOn]) -> str:
    """What was switched on, what each frees on the fullest rank and costs; each is taken back alone."""
    step = chosen.time.step_seconds
    words = [
        f"{', '.join(sorted(one.entries))} ({one.words}) frees {format_bytes(max(0.0, one.bytes))} for "
        f"{max(0.0, one.seconds) / step:.1%} of the step"
        for one in saved
        if one.bytes > 0
    ]
    # Beside others some free nothing more: they are on because less travels.
    quicker = [
        f"{', '.join(sorted(one.entries))} ({one.words}) makes the step {max(0.0, -one.seconds) / step:.2%} shorter"
        for one in saved
        if one.bytes <= 0
    ]
    if not words:
        return f"Switched on: {'; '.join(quicker)}."
    words += quicker
    return f"Switched on so that it fits: {'; '.join(words)}."


def would_fit_words(chosen: Prediction, fitting: Workload | None) -> str:
    """For a layout that does not fit: the cheapest savings with which it would."""
    needs = f"{format_bytes(chosen.memory.total)} of {format_bytes(chosen.memory.capacity)}"
    if fitting is None:
        return f"It needs {needs}, and all savings together do not suffice: search another layout, or use more GPUs."
    entries = ", ".join(sorted(savings_of(fitting.run) - savings_of(chosen.workload.run)))
    slower = predict_time(fitting).step_seconds / chosen.time.step_seconds - 1
    held = format_bytes(predict_memory(fitting).total)
    return f"It needs {needs}. It would fit with {entries}: {held}, and the step takes {slower:.1%} longer."


def alike_words(chosen: Prediction, fastest: Prediction, alike: int) -> str:
    """How many layouts cannot be told from the fastest, and why the chosen one is not it."""
    error = sweep_spread(chosen.workload)
    words = (
        f"Predictions of layouts in one sweep err by {error:.0%} against each other. {alike} of the layouts that "
        "nobody beats in both time and memory are that close to the fastest."
    )
    slower = chosen.time.step_seconds / fastest.time.step_seconds - 1
    if slower <= 0:
        return words
    time, more = seconds(fastest.time.step_seconds), format_bytes(fastest.memory.total - chosen.memory.total)
    return (
        f"{words} The fastest would take {time} and {format_bytes(fastest.memory.total)}; the chosen one takes "
        f"{slower:.1%} longer, less than predictions can tell, and leaves {more} more free."
    )


def headroom_words(chosen: Prediction, headroom: float, faster: Prediction | None) -> str:
    """That memory is left free, and what would be gained without."""
    words = f"{headroom:.0%} of the GPU's memory stays free, because memory is predicted within a few percent."
    if faster is None:
        return f"{words} Nothing faster was found that would fill it (--headroom 0)."
    gain = 1 - faster.time.step_seconds / chosen.time.step_seconds
    share = faster.memory.total / faster.memory.capacity
    choices = changed_choices(choice_of_workload(chosen.workload), choice_of_workload(faster.workload))
    return (
        f"{words} Filled to {share:.0%} (--headroom 0) the step would take {seconds(faster.time.step_seconds)}, "
        f"{gain:.1%} less, with {choices}."
    )


def batch_words(advice: BatchAdvice) -> str:
    """Of a batch that divides badly: the nearest that is better, with the numbers of both."""
    now, then = advice.asked_tokens_per_second_per_gpu, advice.tokens_per_second_per_gpu
    return (
        f"A batch of {advice.asked:,} divides badly: with the GPUs it shares a divisor of {advice.asked_divides:,}, "
        f"and the best layout has {now:,.0f} tokens/s per GPU. {advice.batch:,} shares {advice.divides:,}: at least "
        f"{then:,.0f} tokens/s per GPU, {advice.gain:+.0%}."
    )
