"""`bench layer`: one contest per shape, in the setting that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from moefold.bench.comparison import ROUNDS, WARM, Say, hold_contest
from moefold.bench.layer_shapes import SHAPES, LayerShape
from moefold.bench.layers import BARE, CONTESTANTS, OURS, PEERS
from moefold.bench.results import CHANGING, FIXED, Contest, Entrant
from moefold.bench.targets import AS_LAUNCHED, GOALS, SAME, Verdict, verdicts
from moefold.errors import UnknownNameError

BASES = tuple(BARE)
GROUPS = {"bare": tuple(BARE), "ours": tuple(OURS), "peers": tuple(PEERS)}
# The twin is slow and of interest to its authors only.
USUAL = ("bare", "moefold fused", "peers")
# An answer further away than this is another function, or another format. A router that rounds its scores to bfloat16
# flips a few choices, and each costs a token a good part of its answer.
TOLERANCES = {"bfloat16": 0.1, "float32": 1e-3}


@dataclass(frozen=True)
class Setting:
    dtype: str = "bfloat16"
    threads: int = 1
    same_allocator: bool = False
    rounds: int = ROUNDS
    warm: int = WARM
    routings: tuple[str, ...] = (FIXED, CHANGING)

    @property
    def allocator(self) -> str:
        return SAME if self.same_allocator else AS_LAUNCHED


def chosen_names(words: Sequence[str]) -> list[str]:
    """Contestants by name or by group, in the order of the table."""
    wanted: set[str] = set()
    for word in words:
        if word not in GROUPS and word not in CONTESTANTS:
            raise UnknownNameError("contestant", word, [*GROUPS, *CONTESTANTS])
        wanted |= set(GROUPS.get(word, (word,)))
    return [name for name in CONTESTANTS if name in wanted]


def bench_layer(
    shape: LayerShape, setting: Setting, names: Sequence[str], say: Say = lambda what, done, total: None
) -> tuple[Contest, list[Verdict]]:
    """Verdicts where the project has promised something: on its three shapes, in bfloat16, with one thread."""
    known = next((name for name, each in SHAPES.items() if each == shape), None)
    title = f"layer {known or 'of your own'}: {shape}, {setting.dtype}, {threads_text(setting.threads)}, "
    title += f"forward and backward, allocator {setting.allocator}"
    contest = hold_contest(
        "layer",
        title,
        [_entrant(name, shape, setting) for name in names],
        rounds=setting.rounds,
        warm=setting.warm,
        routings=setting.routings,
        tolerance=TOLERANCES[setting.dtype],
        say=say,
    )
    promised = setting.dtype == "bfloat16" and setting.threads == 1 and known is not None
    goals = GOALS["layer", known or ""] if promised else ()
    return contest, verdicts(contest, goals, setting.allocator)


def threads_text(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _entrant(name: str, shape: LayerShape, setting: Setting) -> Entrant:
    role = "bare" if name in BARE else "ours" if name in OURS else "peer"
    allocator = "kept" if setting.same_allocator or role == "ours" else "default"
    options = {
        "shape": asdict(shape),
        "dtype": setting.dtype,
        "threads": setting.threads,
        "allocator": allocator,
    }
    return Entrant(name, role, options)
