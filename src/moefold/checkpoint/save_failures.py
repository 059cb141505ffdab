"""What follows when a checkpoint could not be written: it is tried again, skipped, or ends the run.

A save has failed if one rank failed; all ranks then know it, with the reason of the first of them, and act alike:

    tried again     `retries` times, after 1, 2, 4, ... steps. The copies that `Saver.begin` made are still there, so
                    training goes on meanwhile, and what is written is the state of the save's own step. A save that is
                    due earlier takes the place of one that waits.
    skipped         with a warning, after the last retry; the next save is a new one
    ended           if `on_failure` is stop, or after `max_failures` in a row

Steps are counted, not seconds: clocks of ranks differ, and all must start the next attempt together.

Before an attempt the disk must have room for all ranks' files. They share one directory, so rank 0 asks once for all.
Where a file system does not know (no blocks, as some network ones say), nothing is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from moefold.checkpoint.files import UNKNOWN_FREE, free_bytes
from moefold.comm.collectives import all_gather_no_grad, all_reduce_no_grad
from moefold.comm.process_groups import Group
from moefold.errors import CheckpointError, FencedError, name_ranks
from moefold.units import format_bytes

_MAX_REASON_BYTES = 480


@dataclass(frozen=True)
class FailurePolicy:
    """The fields of `train.saving` about failures. By default, a failure is raised at once."""

    retries: int = 0
    # Steps to the first retry; each further one waits twice as long.
    retry_after: int = 1
    on_failure: Literal["skip", "stop"] = "stop"
    # In a row; 0: no limit.
    max_failures: int = 0
    # Times the bytes of the checkpoint; 0: not checked.
    free_space: float = 0.0

    def wait_before(self, attempt: int) -> int:
        """Steps to the ``attempt``-th retry, counted from 1."""
        return self.retry_after * 2 ** (attempt - 1)


@dataclass(frozen=True)
class FailedSave:
    """One attempt that failed. ``retry_after`` is in steps; None if there is no other attempt."""

    step: int
    reason: str
    retries_left: int
    retry_after: int | None

    def __str__(self) -> str:
        text = f"the checkpoint of step {self.step} was not written: {self.reason}"
        if self.retry_after is None:
            return f"{text}; it is skipped, and older ones are as they were"
        after = "1 step" if self.retry_after == 1 else f"{self.retry_after} steps"
        return f"{text}; tried again in {after} ({self.retries_left} left)"


class FailureCount:
    """Checkpoints in a row that were given up."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy, self.in_a_row = policy, 0

    def given_up(self, step: int, reason: str, attempts: int) -> None:
        """Raises if the run must end."""
        self.in_a_row += 1
        tries = f" ({attempts} attempts)" if attempts > 1 else ""
        text = f"the checkpoint of step {step} was not written: {reason}{tries}"
        if self.policy.on_failure == "stop":
            raise CheckpointError(text)
        if self.policy.max_failures and self.in_a_row >= self.policy.max_failures:
            raise CheckpointError(
                f"{text}; {self.in_a_row} checkpoints in a row have failed, and train.saving.max_failures is "
                f"{self.policy.max_failures}"
            )

    def committed(self) -> None:
        self.in_a_row = 0


def describe(error: BaseException) -> str:
    """One line, short enough to be sent to the other ranks."""
    text = (str(error) or "out of memory") if isinstance(error, MemoryError) else str(error)
    line = " ".join(text.split()) or type(error).__name__
    return line.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")


def agreed_reason(error: BaseException | None, world: Group, device: torch.device) -> tuple[str, bool]:
    """The ranks that failed with the reason of the first of them, and whether the run must end, as another start has
    taken over; called by all ranks, the same on all of them."""
    own = 0 if error is None else 2 if isinstance(error, FencedError) else 1
    flags = all_gather_no_grad(torch.tensor([[own]], device=device), (1,) * world.size, world).flatten()
    failed = flags.nonzero().flatten().tolist()
    said = describe(error).encode() if error is not None and world.index == failed[0] else b""
    letters = torch.tensor(list(said.ljust(_MAX_REASON_BYTES, b"\0")), dtype=torch.int32, device=device)
    reason = bytes(all_reduce_no_grad(letters, world).tolist()).rstrip(b"\0").decode(errors="replace")
    return reason if world.size == 1 else f"{name_ranks(failed)}: {reason}", bool((flags == 2).any())


@dataclass(frozen=True)
class Room:
    """What all ranks together need on the disk, what is free there, and how many ranks lack their copies."""

    needed: int
    free: int
    without_copy: int

    def lack(self, root: Path, times: float) -> str | None:
        """What to say if the disk has too little room."""
        if not times or self.free == UNKNOWN_FREE or self.free >= times * self.needed:
            return None
        factor = "" if times == 1 else f", and train.saving.free_space asks for {times:g} times as much"
        return (
            f"it needs {format_bytes(self.needed)} ({self.needed:,} bytes){factor}, and the disk of {root} has "
            f"{format_bytes(self.free)} free ({self.free:,} bytes)"
        )


def agreed_room(root: Path, needed: int, copied: bool, world: Group, device: torch.device) -> Room:
    """Called by all ranks before an attempt; the same on all of them."""
    free = free_bytes(root) if world.index == 0 else 0
    row = torch.tensor([needed, free, int(not copied)], dtype=torch.int64, device=device)
    return Room(*(int(number) for number in all_reduce_no_grad(row, world).tolist()))
