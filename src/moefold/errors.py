"""Typed errors.

An error says what happened, where in the configuration, with the actual numbers, and what would work. All problems of a
configuration are reported at once. The command line prints these errors without a traceback; any other exception is a
bug in moefold. No message has the login of an address in it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from moefold.redaction import without_login

# Longer words are not typing mistakes, and comparing them takes time.
_LONGEST_WORD = 64
# Of the letters of both words, the share that is common to them in order.
_CLOSE = 0.65


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the dotted key it is about, what is wrong with it, and what would work.

    >>> import moefold
    >>> run = moefold.load_run("debug_tiny", {"model.moe.top_k": 9})
    >>> (problem,) = moefold.check(run)
    >>> isinstance(problem, moefold.Problem), problem.path, problem.fix
    (True, 'model.moe.top_k', 'use at most 8')
    """

    path: str
    message: str
    fix: str = ""

    def __post_init__(self) -> None:
        for name in ("path", "message", "fix"):
            object.__setattr__(self, name, without_login(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f"; {self.fix}" if self.fix else "")


class MoefoldError(Exception):
    """The base of every error that a user can cause and fix; the message says what would work.

    >>> import moefold
    >>> try:
    ...     moefold.load_run("debug_tiny", {"model.moe.topk": 2})
    ... except moefold.MoefoldError as error:
    ...     print(str(error)[:64])
    model.moe.topk: unknown key; did you mean 'top_k'? known here: n
    """

    def __init__(self, *args: object) -> None:
        # Errors are printed and logged, and addresses of data may have a login in them.
        super().__init__(*(without_login(each) if isinstance(each, str) else each for each in args))


class ProblemsError(MoefoldError):
    """Carries every problem that was found; `path`, `message` and `fix` are those of the first."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    @property
    def path(self) -> str:
        return self.problems[0].path

    @property
    def message(self) -> str:
        return self.problems[0].message

    @property
    def fix(self) -> str:
        return self.problems[0].fix

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


class ConfigError(ProblemsError):
    """The configuration cannot be read, or is not valid."""


class LayoutError(ProblemsError):
    """These degrees do not fold into two grids over this many ranks."""


class OrderError(MoefoldError):
    """A pipeline order that cannot be executed; the message shows the place."""


class BackendError(MoefoldError):
    """A backend that cannot run on this machine; the message names the alternatives."""


class ExchangeError(MoefoldError):
    """Ranks disagree about the sizes of a message between them."""


class LostPeerError(MoefoldError):
    """A rank that was waited for has ended, or is absent. Nothing is left to the user: another start may mend it."""


class RankError(MoefoldError):
    """A rank failed; the message is the first failed rank's. ``mendable``: by the user, so a restart will not help.

    ``exclude``: ranks that must not be started again, as an `ExclusionError` of a rank says. ``ranks``: those that
    failed by themselves, as far as is known; the others lost their peers.
    """

    def __init__(
        self, message: str, mendable: bool = False, exclude: tuple[int, ...] = (), ranks: Iterable[int] = ()
    ) -> None:
        super().__init__(message)
        self.mendable = mendable
        self.exclude = exclude
        self.ranks = tuple(sorted(ranks))
        # No rank had ended a step of this start.
        self.at_once = False


class CheckpointError(MoefoldError):
    """A checkpoint that must not be loaded, or could not be written; the message names file and reason."""


class FencedError(CheckpointError):
    """The run has been started again, so this start may not write any more; it must end."""


class MismatchError(CheckpointError):
    """A checkpoint that is intact, but of another model, so that an older one does not help either."""


class RunBusyError(MoefoldError):
    """Another process holds the lock of this run; the message names it."""


class ConversionError(ProblemsError):
    """Weights in another format that are inconsistent, or that have no counterpart in ours; nothing was written."""


class TrainingError(MoefoldError):
    """A run that cannot continue without the user."""


class CorruptionError(TrainingError):
    """Parameters or optimizer states that changed where nothing may change them; the message names tensor and ranks.

    ``newest_good``: checkpoints up to this step are not affected. ``culprits``: the ranks that are wrong, if known.
    ``from_the_beginning``: there is no such checkpoint, and a launcher starts the run again.
    """

    def __init__(
        self, message: str, newest_good: int, culprits: tuple[int, ...] = (), from_the_beginning: bool = False
    ) -> None:
        super().__init__(message)
        self.newest_good = newest_good
        self.culprits = culprits
        self.from_the_beginning = from_the_beginning


class ExclusionError(TrainingError):
    """Ranks on whose machines the run must not go on; whoever started them starts the others, without these.

    ``exclude`` are their numbers in the world that raised it, on all ranks the same.
    """

    def __init__(self, message: str, exclude: tuple[int, ...]) -> None:
        super().__init__(message)
        self.exclude = exclude


class DataError(MoefoldError):
    """Token files or their data mixture cannot be used; the message names file, field and numbers."""


class DamagedDataError(DataError):
    """Tokens that were read are not what was written: another hash, or values that no tokenizer writes."""


# torch is an extra of the package, so that plans need no torch and each machine has the build for its GPU.
WITHOUT_TORCH = 'pip install "moefold[torch]", or first the build of torch for your GPU'


class MissingPackageError(MoefoldError, ImportError):
    """A package that is not installed; the message says how to install it."""


def missing_torch(error: ModuleNotFoundError, who: str) -> MissingPackageError | None:
    """What to say when ``who`` failed to import torch; None if another module is missing, which is a bug."""
    if (error.name or "").partition(".")[0] != "torch":
        return None
    return MissingPackageError(f"{who} needs torch, which is not installed: {WITHOUT_TORCH}")


class UnknownNameError(MoefoldError):
    """A name that no registry has."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(
            f"no {kind} named {name[:_LONGEST_WORD]!r}; {did_you_mean(name, known)}known: {', '.join(known)}"
        )


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is closest to `word`, if it is close enough to be what was meant."""
    if len(word) > _LONGEST_WORD:
        return None
    close = [found for found in difflib.get_close_matches(word, list(known), n=3, cutoff=0.5) if _is_close(word, found)]
    # The first letter is rarely mistyped.
    return min(close, key=lambda found: found[0] != word[0], default=None)


def _is_close(word: str, found: str) -> bool:
    """Two thirds of the letters in order, one letter for another, or the beginning of one another: 'qwen3' means
    'qwen3_30b_a3b' and 'tq' means 'tp'.

    Below, two words merely share letters, as 'mamba' and 'llama' do.
    """
    begins = found.startswith(word) or word.startswith(found)
    one_letter = len(word) == len(found) and sum(a != b for a, b in zip(word, found, strict=True)) == 1
    return begins or one_letter or difflib.SequenceMatcher(None, found, word).ratio() > _CLOSE


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A phrase for the front of a list of known words; empty when none is close."""
    found = nearest(word, known)
    return f"did you mean {found!r}? " if found else ""


def name_ranks(ranks: Iterable[int]) -> str:
    """'rank 3', or 'ranks 0, 3'."""
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
