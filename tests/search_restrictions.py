"""The search against its own subspaces: no restriction of what may be chosen gives a faster answer than none.

A restriction leaves some values of a few choices, as `moefold plan --fix` does. Whatever is best under it is a
candidate without it too, so a search that finds something faster there has lost it elsewhere. Spaces that are small
enough are also tried in full. A command draws many; the tests draw a few of the same. The search itself tries spaces of
up to 4,096 combinations whole: `--most 16000` draws larger ones, which it does not.

    python -m tests.search_restrictions --count 500 --brute 50 --seed 1
    python -m tests.search_restrictions --count 0 --brute 50 --most 16000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from moefold.config.loading import override
from moefold.hardware.cluster import cluster_of
from moefold.plan.framework_rules import FrameworkName
from moefold.plan.memory.peak import predict_memory, usable_bytes
from moefold.plan.search.candidates import described, why_illegal, workload_of_choice
from moefold.plan.search.cheapest_savings import Candidate
from moefold.plan.search.proposal import with_framework
from moefold.plan.search.search import NothingFitsError, search
from moefold.plan.search.space import CHOICES, LayoutChoice, Space, limits_of, usual_space
from moefold.plan.timing.step_time import predict_time
from moefold.plan.workload import Workload, workload_of_run
from moefold.recipes.catalog import recipe

HEADROOM = 0.05
# Of one restriction: choices that lose values.
_MOST_CHOICES = 4


@dataclass(frozen=True)
class Place:
    """A model on a cluster in a framework."""

    model: str
    gpu: str
    gpus: int
    batch: int
    framework: FrameworkName
    recipes: bool = False

    def __str__(self) -> str:
        return f"{self.model} on {self.gpus} {self.gpu}, batch {self.batch}, {self.framework}"


PLACES = (
    Place("qwen3_235b_a22b", "H100", 64, 1024, "megatron"),
    Place("qwen3_30b_a3b", "H100", 8, 256, "megatron"),
    Place("qwen3_30b_a3b", "GB200", 8, 512, "megatron"),
    Place("deepseek_v3", "GB300", 256, 4096, "megatron"),
    Place("deepseek_v3", "H100", 1024, 8192, "megatron"),
    Place("mixtral_8x7b", "H100", 64, 256, "megatron"),
    Place("gpt_oss_120b", "B200", 64, 512, "megatron"),
    Place("qwen3_30b_a3b", "H100", 64, 512, "fsdp2"),
    Place("deepseek_v3", "H100", 512, 4096, "fsdp2"),
    Place("mixtral_8x7b", "H100", 32, 128, "moefold"),
    Place("qwen3_30b_a3b", "H100", 32, 256, "moefold"),
    Place("deepseek_v3", "H100", 256, 1024, "moefold"),
    Place("qwen3_235b_a22b", "GB200", 64, 512, "moefold", recipes=True),
)


def template_of(place: Place) -> Workload:
    one = {f"parallel.{axis}": 1 for axis in ("tp", "pp", "ep", "etp")}
    run = override(recipe(place.model), one | {"data.global_batch": place.batch})
    return with_framework(workload_of_run(run, cluster_of(place.gpu, place.gpus)), place.framework)


@lru_cache(maxsize=32)
def asked(place: Place) -> tuple[Workload, Space]:
    template = template_of(place)
    space = usual_space(template, place.recipes)
    # Moments in 16 bits change numbers: the search takes them where nothing else fits, and not for their speed.
    exact = tuple(step for step in space.savings if not any("moments" in entry for entry in step - space.savings[0]))
    return template, replace(space, savings=exact)


def best_of(template: Workload, space: Space) -> Candidate | None:
    """None where nothing is legal or fits."""
    try:
        return search(template, space, from_own=False, headroom=HEADROOM).best
    except NothingFitsError:
        return None


@lru_cache(maxsize=32)
def best_anywhere(place: Place) -> Candidate | None:
    return best_of(*asked(place))


def restricted(space: Space, draw: random.Random) -> Space:
    """A few choices keep a part of their values. What is always saved stays, and so does the order of values."""
    open_choices = [name for name in CHOICES if name != "schedule" and len(getattr(space, name)) > 1]
    changes: dict[str, object] = {}
    for name in draw.sample(open_choices, min(draw.randint(1, _MOST_CHOICES), len(open_choices))):
        values = getattr(space, name)
        always, free = (values[:1], values[1:]) if name == "savings" else ((), values)
        kept = set(draw.sample(range(len(free)), draw.randint(1, len(free))))
        changes[name] = (*always, *(value for number, value in enumerate(free) if number in kept))
    return replace(space, **changes)  # type: ignore[arg-type]


def words_of(whole: Space, part: Space) -> str:
    """What the restriction leaves, as `--fix` would be given it."""
    left = ((name, getattr(part, name)) for name in CHOICES if getattr(part, name) != getattr(whole, name))
    return "; ".join(f"{name}={','.join(map(_word, values))}" for name, values in left)


def _word(value: object) -> str:
    return "+".join(sorted(value)) or "none" if isinstance(value, frozenset) else str(value)


def lost(place: Place, draw: random.Random) -> str | None:
    """Draws one restriction; what was found under it that the search without it lost, or None."""
    template, space = asked(place)
    part = restricted(space, draw)
    inside = best_of(template, part)
    if inside is None:
        return None
    whole = best_anywhere(place)
    if whole is not None and whole.seconds <= inside.seconds * (1 + 1e-9):
        return None
    found = "nothing" if whole is None else f"{whole.seconds:.4f} s ({described(whole.choice)})"
    return f"{place}: {words_of(space, part)}: {inside.seconds:.4f} s ({described(inside.choice)}), without it {found}"


# ---- trying everything ----


def small_space(place: Place, draw: random.Random, most: int) -> Space:
    """A restriction with at most so many combinations of values."""
    _, space = asked(place)
    while size_of(space) > most:
        names = [name for name in CHOICES if name != "schedule" and len(getattr(space, name)) > 1]
        name = max(draw.sample(names, min(4, len(names))), key=lambda name: len(getattr(space, name)))
        values = getattr(space, name)
        first = int(name == "savings")
        gone = draw.randrange(first, len(values))
        space = replace(space, **{name: values[:gone] + values[gone + 1 :]})
    return space


def size_of(space: Space) -> int:
    size = 2 ** (len(space.savings) - 1)
    for name in LayoutChoice._fields:
        size *= len(getattr(space, name)) if name != "savings" else 1
    return size


def everything(template: Workload, space: Space) -> tuple[float, LayoutChoice] | None:
    """The fastest that fits, by trying every legal candidate; each set of savings too."""
    limits, capacity = limits_of(template), usable_bytes(template) * (1 - HEADROOM)
    best: tuple[float, LayoutChoice] | None = None
    names = [name for name in LayoutChoice._fields if name != "savings"]
    for values in product(
        *(getattr(space, name) for name in names), product((False, True), repeat=len(space.savings) - 1)
    ):
        *plain, on = values
        saved = space.savings[0].union(*(step for step, is_on in zip(space.savings[1:], on) if is_on))
        choice = LayoutChoice(**dict(zip(names, plain)), savings=saved)
        if why_illegal(choice, limits, space) is not None:
            continue
        workload = workload_of_choice(choice, template, limits, space)
        if choice.clones and not workload.clones.clones:
            continue
        seconds = predict_time(workload).step_seconds
        if (best is None or seconds < best[0]) and predict_memory(workload).total <= capacity:
            best = seconds, choice
    return best


def missed(place: Place, draw: random.Random, most: int) -> str | None:
    """One small space, tried in full: what the search of it missed, or None."""
    template, _ = asked(place)
    space = small_space(place, draw, most)
    truth, found = everything(template, space), best_of(template, space)
    if truth is None or (found is not None and found.seconds <= truth[0] * (1 + 1e-9)):
        return None
    words = "nothing" if found is None else f"{found.seconds:.4f} s ({described(found.choice)})"
    return f"{place}: {truth[0]:.4f} s ({described(truth[1])}), the search found {words}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="random restrictions")
    parser.add_argument("--brute", type=int, default=50, help="small spaces that are tried in full")
    parser.add_argument("--most", type=int, default=4000, help="candidates of a small space")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw: to go on where a run ended")
    args = parser.parse_args(words)
    began = time.monotonic()
    found = 0
    for name, count in (("restrictions", args.count), ("small spaces", args.brute)):
        worse = 0
        for done, number in enumerate(range(args.first, args.first + count), 1):
            # Each has draws of its own, so that any of them can be drawn again without those before it.
            place, draw = PLACES[number % len(PLACES)], random.Random(f"{args.seed} {name} {number}")
            said = lost(place, draw) if name == "restrictions" else missed(place, draw, args.most)
            if said is not None:
                worse += 1
                print(f"{name} {number}: {said}", flush=True)
            if done % 10 == 0 or done == count:
                seconds = time.monotonic() - began
                print(f"{name}: {done - worse} of {done} without loss, {seconds:.0f} s", flush=True)
        found += worse
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
