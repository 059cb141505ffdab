"""`bench step`: a whole training step of one model, moefold's beside plain torch and beside transformers' Trainer."""

from __future__ import annotations

from collections.abc import Sequence

from moefold.bench.contest import Say, hold_contest
from moefold.bench.contestant import contestants_of
from moefold.bench.goals import AS_LAUNCHED, GOALS, Verdict, verdicts
from moefold.bench.layer_contest import Setting, threads_text
from moefold.bench.results import ALIKE, Contest, Entrant
from moefold.errors import UnknownNameError

HAND_WRITTEN = "hand-written"
BASES: tuple[str, ...] = (HAND_WRITTEN,)
# Who is not a peer. moefold and the hand-written step run under moefold's launcher.
ROLES = {"moefold": "ours", HAND_WRITTEN: "bare"}


def chosen_names(words: Sequence[str]) -> list[str]:
    """All of them where none is named."""
    known = contestants_of("step")
    for word in words:
        if word not in known:
            raise UnknownNameError("contestant", word, known)
    return [name for name in known if not words or name in words]


def bench_step(
    setting: Setting, names: Sequence[str], say: Say = lambda what, done, total: None
) -> tuple[Contest, list[Verdict]]:
    contest = hold_contest(
        "step",
        f"training step: 50M parameters, {setting.dtype}, {threads_text(setting.threads)}",
        [_entrant(name, setting) for name in names],
        rounds=setting.rounds,
        warm=setting.warm,
        routings=(ALIKE,),
        say=say,
    )
    return contest, verdicts(contest, GOALS["step", "50m"] if setting.threads == 1 else (), AS_LAUNCHED)


def _entrant(name: str, setting: Setting) -> Entrant:
    role = ROLES.get(name, "peer")
    options: dict[str, object] = {
        "dtype": setting.dtype,
        "threads": setting.threads,
        "allocator": "default" if role == "peer" else "kept",
    }
    return Entrant(name, role, options)
