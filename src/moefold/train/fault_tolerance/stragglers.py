"""Slow ranks: each rank measures its own work, and a rank that is slower than its peers for long is named.

All ranks step at the pace of the slowest one, so step times show no culprit: they are the same on all of them. What
differs is how much of a step a rank works and how much it waits for others in collectives. Waiting is not timed call by
call, since FSDP's collectives are not ours: a rank that waits for gloo sleeps, and the processor time of its thread
stands still. So, from the beginning of a step to the end of its backward pass,

    own work = processor time of the thread that trains + time it was blocked by the reading of data,

and the rest of the step is waiting. Processor time grows with a slow or throttled processor, slow memory, or other work
in the rank, and does not grow when another process takes the processor away, which on a busy host strikes all ranks by
turns. That time, in which the thread could have run (the kernel counts it), is shown beside the other numbers and
accuses nobody. Nothing waits for a device. On a GPU the processor time of a host that polls the GPU says nothing, and
nothing is measured there.

Peers do the same work by design: the ranks of one pipeline stage. What a stage does is not compared with what another
does; a rank that is alone in its stage has no peers and is not judged. Experts make the work of peers differ too: a
rank whose experts computed r times as many tokens as the median of its peers may take 1 + f (r - 1) times as long, with
the fraction f of the model's FLOPs that is in routed experts. The update is left out, because the optimizers of ranks
may own different parameters.

Each window of ``window`` steps costs one all-gather of five numbers per rank. A rank whose peers' median is below
``ratio`` of its own work in ``windows`` windows in a row is slow from then on, until it is not in as many windows. All
ranks come to the same verdict.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.blueprint.flops import forward_flops_per_token
from moefold.comm.collectives import all_gather_no_grad, device_of
from moefold.config.train import StragglersConfig
from moefold.errors import ExclusionError, name_ranks
from moefold.parallel.parallelize import LocalModel


class Pace(NamedTuple):
    """One rank's mean step of a window, in seconds. ``tokens`` are those that its experts computed."""

    step: float
    compute: float
    data: float
    # The thread could have run, and no processor was free.
    queued: float
    tokens: float

    @property
    def own(self) -> float:
        return self.compute + self.data

    @property
    def waited(self) -> float:
        return max(self.step - self.own - self.queued, 0.0)


class SlowRank(NamedTuple):
    """A rank that becomes slow, or that is no longer slow (``slow`` is False)."""

    step: int
    rank: int
    slow: bool
    pace: Pace
    # The median of its peers' own work, and how many peers it has.
    peers_own: float
    num_peers: int

    @property
    def seconds(self) -> dict[str, float]:
        """For `metrics.jsonl` and callbacks, per step."""
        pace = self.pace
        named = {"own": pace.own, "peers_own": self.peers_own, "waited": pace.waited, "queued": pace.queued}
        return {name: round(value, 6) for name, value in (named | {"data": pace.data, "step": pace.step}).items()}

    def __str__(self) -> str:
        said = "is slow" if self.slow else "is no longer slow"
        blocked = (
            f" ({self.pace.data * 1e3:.0f} ms of it blocked by data)" if self.pace.data > self.pace.own / 2 else ""
        )
        return (
            f"rank {self.rank} {said}: {self.pace.own * 1e3:.0f} ms of own work per step{blocked}, "
            f"median of its {self.num_peers} peer(s) {self.peers_own * 1e3:.0f} ms"
        )


def slow_ranks(paces: Sequence[Pace], peers: Sequence[Sequence[int]], ratio: float, routed: float) -> dict[int, float]:
    """The ranks that are slow in one window, with the median of their peers' own work.

    ``routed``: the fraction of the work that is in routed experts, and grows with their tokens.
    """
    found = {}
    for rank, pace in enumerate(paces):
        others = [paces[peer] for peer in peers[rank] if peer != rank]
        if not others:
            continue
        usual, usual_tokens = median(other.own for other in others), median(other.tokens for other in others)
        more_tokens = max(pace.tokens / usual_tokens - 1, 0.0) if usual_tokens > 0 else 0.0
        if ratio * pace.own > usual * (1 + routed * more_tokens):
            found[rank] = usual
    return found


@dataclass
class Streaks:
    """Which ranks are slow, from what single windows say; a change needs ``windows`` of them in a row."""

    windows: int
    slow: set[int] = field(default_factory=set)
    # By rank, how many windows in a row have said otherwise than `slow`.
    _against: dict[int, int] = field(default_factory=dict)

    def changes(self, found: Mapping[int, float]) -> list[int]:
        """The ranks that have changed with this window."""
        against = self.slow.symmetric_difference(found)
        self._against = {rank: self._against.get(rank, 0) + 1 for rank in against}
        changed = sorted(rank for rank, count in self._against.items() if count >= self.windows)
        for rank in changed:
            del self._against[rank]
        self.slow.symmetric_difference_update(changed)
        return changed


class StragglerWatch:
    """One rank's side: ``begin``, ``computed`` and ``ended`` in every step, and ``verdict`` after it."""

    def __init__(self, config: StragglersConfig, local_model: LocalModel) -> None:
        self.config, self.local_model = config, local_model
        self.world = local_model.groups["world"]
        self.enabled = config.window > 0 and not self.world.alone and local_model.device.type == "cpu"
        self.streaks = Streaks(config.windows)
        flops = forward_flops_per_token(local_model.run.model, local_model.run.data.seq_len)
        self.routed = flops.routed / flops.total
        # The first step of a start is unlike the others.
        self._steps, self._sums = -1, [0.0] * 4
        self._tokens: Tensor | None = None
        self._began, self._work = (0.0, 0.0, 0.0), (0.0, 0.0)

    def begin(self) -> None:
        """A step begins; one that began before and has not ended does not count."""
        if self.enabled:
            self._began = time.perf_counter(), time.thread_time(), queued_seconds()

    def computed(self) -> None:
        """Gradients are there; own work ends here."""
        if self.enabled:
            _, compute, queued = self._began
            self._work = time.thread_time() - compute, queued_seconds() - queued

    def ended(self, kept_ME: Tensor, data: float) -> None:
        """``kept_ME``: the step's tokens of every layer and expert, of all ranks. ``data``: seconds blocked by it."""
        if not self.enabled:
            return
        self._steps += 1
        if not self._steps:
            return
        measured = time.perf_counter() - self._began[0], self._work[0], data, self._work[1]
        self._sums = [total + value for total, value in zip(self._sums, measured, strict=True)]
        tokens = self._of_this_rank(kept_ME)
        self._tokens = tokens if self._tokens is None else self._tokens + tokens

    def _of_this_rank(self, kept_ME: Tensor) -> Tensor:
        """Tokens of the experts that this rank has; the ranks that share an expert share its tokens."""
        groups, rows = self.local_model.groups, list(self.local_model.model.routers())
        each = kept_ME.shape[1] // groups["ep"].size
        return kept_ME[rows, groups["ep"].index * each :][:, :each].sum()

    def verdict(self, step: int) -> list[SlowRank]:
        """What has changed with this step, the same on all ranks: something only if a window ends with it."""
        if not self.enabled or self._steps < self.config.window:
            return []
        tokens = 0.0 if self._tokens is None else float(self._tokens)
        own = torch.tensor([[*self._sums, tokens]], dtype=torch.float64, device=device_of(self.world))
        everyone = all_gather_no_grad(own, (1,) * self.world.size, self.world) / self._steps
        self._steps, self._sums, self._tokens = 0, [0.0] * 4, None
        return self._judge(step, [Pace(*row) for row in everyone.tolist()])

    def exclusion(self) -> ExclusionError | None:
        """What ends this start, with the ranks that the next one leaves out; None if there are none."""
        slow = tuple(sorted(self.streaks.slow))
        return (
            ExclusionError(f"slow, and train.stragglers.on_found is exclude: {name_ranks(slow)}", slow)
            if slow
            else None
        )

    def _judge(self, step: int, paces: Sequence[Pace]) -> list[SlowRank]:
        layout = self.local_model.groups.layout
        stages: dict[int, list[int]] = {}
        for rank in range(len(paces)):
            stages.setdefault(layout.coordinate(rank, "pp"), []).append(rank)
        peers = [stages[layout.coordinate(rank, "pp")] for rank in range(len(paces))]
        found = slow_ranks(paces, peers, self.config.ratio, self.routed)
        changes = []
        for rank in self.streaks.changes(found):
            others = [paces[peer].own for peer in peers[rank] if peer != rank]
            slow = rank in self.streaks.slow
            changes.append(SlowRank(step, rank, slow, paces[rank], median(others), len(others)))
        return changes


def queued_seconds() -> float:
    """How long this thread has been ready to run while no processor was free; 0 where the kernel does not say."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
