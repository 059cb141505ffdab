"""`bench step`: a whole training step of one model, moefold's beside plain torch and beside transformers' Trainer.

Every round has a new batch, the same for all; tokens then choose other experts, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moefold.bench.comparison import Say, hold_contest
from moefold.bench.layer_comparison import Setting, threads_text
from moefold.bench.results import CHANGING, Contest, Entrant
from moefold.bench.steps.table import BARE, CONTESTANTS, OURS
from moefold.bench.steps.task import RECIPE
from moefold.bench.targets import AS_LAUNCHED, GOALS, Verdict, verdicts
from moefold.errors import UnknownNameError

BASES: tuple[str, ...] = tuple(BARE)


def chosen_names(words: Sequence[str]) -> list[str]:
    """All of them where none is named."""
    for word in words:
        if word not in CONTESTANTS:
            raise UnknownNameError("contestant", word, CONTESTANTS)
    return [name for name in CONTESTANTS if not words or name in words]


def bench_step(
    setting: Setting,
    names: Sequence[str],
    changes: Mapping[str, str] | None = None,
    say: Say = lambda what, done, total: None,
) -> tuple[Contest, list[Verdict]]:
    """``changes``: dotted keys of the run and their values, for other sizes."""
    contest = hold_contest(
        "step",
        f"training step of {RECIPE}{' with changes' if changes else ''}, {setting.dtype}, "
        f"{threads_text(setting.threads)}",
        [_entrant(name, setting, changes or {}) for name in names],
        rounds=setting.rounds,
        warm=setting.warm,
        routings=(CHANGING,),
        say=say,
    )
    promised = setting.threads == 1 and not changes
    return contest, verdicts(contest, GOALS["step", RECIPE] if promised else (), AS_LAUNCHED)


def _entrant(name: str, setting: Setting, changes: Mapping[str, str]) -> Entrant:
    role = "bare" if name in BARE else "ours" if name in OURS else "peer"
    options: dict[str, object] = {
        "dtype": setting.dtype,
        "threads": setting.threads,
        "allocator": "default" if role == "peer" else "kept",
        "set": dict(changes),
    }
    return Entrant(name, role, options)
