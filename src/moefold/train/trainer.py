"""`Trainer`: a run and its callbacks, trained in this process, on the ranks of a launcher, or on local ranks.

torch is imported when training starts and not before: `moefold train` handles signals and reports problems first.

A run that has checkpoints goes on with any number of ranks. If its own layout does not fold over them, because some are
gone for good or because it was started with another number, `layout_for_world` chooses another; ranks that this one
does not need stand by. The next start with all ranks has the run's own layout again. A run that has no checkpoint is
refused instead: nothing is lost, and the number of ranks may be a mistake.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moefold.checks.run_all import problems_to_train
from moefold.comm.launchers import Hosts, die_with_agent, place_of, place_on_host
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, LayoutError, MoefoldError, Problem, TrainingError
from moefold.plan.elastic_layout import ElasticLayout, layout_for_world, what_layouts_change
from moefold.plan.preflight import Device
from moefold.train.callback import Callback
from moefold.train.fault_tolerance.signals import StopRequest, nothing_to_save, print_stderr, stop_on_signals
from moefold.train.state import Outcome

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from moefold.comm.heartbeat import Heartbeat
    from moefold.comm.membership import HostStart
    from moefold.moe.routing_policies import PolicyOrName


class Trainer:
    """Trains a run: from its beginning, or from its newest checkpoint if it has one.

    The world is one process; or, under torchrun or a cluster's launcher, the processes that it started; or, with
    `nproc`, that many CPU ranks that are forked from this process, and forked again when one is lost; where one is lost
    for good, one of `spares` places takes over, or the run goes on with fewer (`train.elastic`). Forked ranks have
    their own copies of the callbacks: what a callback keeps in itself does not come back to this process.

    `callbacks` run first and `reporters` after them, so that reporters see the metrics that callbacks add. `reporters`
    are those of `moefold train` unless given: `metrics.jsonl`, console lines, a progress bar on a terminal,
    TensorBoard and Weights & Biases as the run says. A collective waits `patience` seconds for its peers.
    `routing_policy` is as for `build_model`. `device` is "cpu" or "cuda"; by default cuda if there is a GPU. With
    `hosts` this process is the launcher of one of several hosts, whose ranks train together.

    Raises `ConfigError` with every problem of the run if it has any.

    >>> import moefold
    >>> run = moefold.load_run("debug_tiny", {"train.steps": 2, "train.directory": tmp})
    >>> moefold.Trainer(run, reporters=[]).fit()
    'finished'
    """

    def __init__(
        self,
        run: RunConfig,
        callbacks: Iterable[Callback] = (),
        *,
        reporters: Iterable[Callback] | None = None,
        nproc: int | None = None,
        spares: int = 0,
        patience: float = 600.0,
        routing_policy: PolicyOrName | None = None,
        device: str | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        # With nproc, this process starts its ranks itself, also inside a job that counts more tasks.
        place = place_of(os.environ) if (nproc is None and hosts is None) or "RANK" in os.environ else None
        self.launched = place is not None
        die_with_agent()
        if self.launched and nproc is not None:
            raise MoefoldError(
                "nproc starts ranks itself, but a launcher has started this one already; leave nproc out"
            )
        if device == "cuda" and nproc is not None:
            raise MoefoldError(
                f"nproc starts ranks on CPUs; on GPUs, start {nproc} ranks by "
                f"`torchrun --master-port 29500 --nproc-per-node {nproc} -m moefold.cli.main train ...`"
            )
        if spares < 0 or (spares and nproc is None):
            problem = f"is {spares}" if spares < 0 else "are places for ranks that nproc starts, and there is no nproc"
            raise ConfigError(Problem("spares", problem, "use nproc as well, or leave spares out"))
        if self.launched and hosts is not None:
            raise MoefoldError("nnodes starts ranks itself, but a launcher has started this one already; leave it out")
        self.world = nproc or 1 if place is None else place.world
        if hosts is not None:
            self.world = hosts.world
            # Which hosts would have fewer ranks is not known to a launcher of one of them.
            if found := problems_to_train(run, self.world):
                raise ConfigError(*found)
        self.hosts = hosts
        self.run, self.patience, self.routing_policy = run, patience, routing_policy
        self.device, self.spares = device, spares
        # What the ranks run; another than `run` where some of them are gone.
        self.layout = ElasticLayout(run, self.world)
        if found := problems_to_train(run, self.world):
            self.layout = self._layout_of_another_world(found)
            if place is None or place.rank == 0:
                print_stderr(self._said(f"{self.world} ranks do not fold into {_own(run)}"))
        self.callbacks, self._reporters = tuple(callbacks), None if reporters is None else tuple(reporters)
        _require_services(run)

    def fit(self, stop: StopRequest | None = None) -> str:
        """Train to the last step. Returns "finished", "stopped" (a callback asked) or "interrupted" (a signal asked).

        SIGINT and SIGTERM finish the step under way, save and return. `stop` is for programs that handle signals
        themselves.
        """
        with _stop_requests(stop) as request:
            # A launched rank must meet its peers first, which may not have received the signal.
            code: int = Outcome.INTERRUPTED
            if request and not self.launched:
                print_stderr(nothing_to_save())
            elif self.world + self.spares > 1 and not self.launched:
                code = self._fit_on_local_ranks(request)
            else:
                code = self._fit_here(request)
        return Outcome(code).name.lower()

    def _layout_of_another_world(self, found: list[Problem]) -> ElasticLayout:
        """For a run that has been started before; ``found`` is why its own layout does not do."""
        started = any(_checkpoints(self.run).glob("step_*"))
        if not started or problems_to_train(self.run):
            raise ConfigError(*found)
        try:
            # Every rank of a launcher asks for itself, so only what they have in common may count.
            return layout_for_world(self.run, self.world, None if self.launched else _host_memory(self.world))
        except LayoutError:
            raise ConfigError(*found) from None

    def _said(self, why: str) -> str:
        """That and how the run goes on in another layout."""
        idle = self.world - self.layout.world
        standing_by = f"; {idle} rank{'s' if idle > 1 else ''} stand by" if idle else ""
        notes = "".join(f"; not the same on another layout: {line}" for line in what_layouts_change(self.run))
        return f"{why}: going on with world {self.layout.world}: {self.layout.describe()}{standing_by}{notes}"

    def _fit_here(self, stop: StopRequest) -> int:
        """This process is one rank of a launched world, or all of it."""
        from moefold.comm.spawn import join_world, meeting_store, this_device

        if this_device(self.device).type == "cuda":
            self._record_flights()
        place, used = place_of(os.environ), self.layout.world
        if place is None or used == place.world:
            rank, world = join_world(self.patience, self.device)
            return self._fit_rank(rank, world, this_device(self.device), stop)
        store = meeting_store(place, self.patience)
        if place.rank >= used:
            return _stand_by(store, stop)
        rank, world = join_world(self.patience, self.device, store, used)
        code = self._fit_rank(rank, world, this_device(self.device), stop)
        if rank == 0:
            _release(store, code, place.world - used)
        return code

    def _record_flights(self) -> None:
        """torch reads the variables when a process group is made."""
        from moefold.train.fault_tolerance.flight_recorder import FOLDER, recorder_environment

        directory = _directory(self.run)
        (directory / FOLDER).mkdir(0o700, parents=True, exist_ok=True)
        os.environ |= recorder_environment(os.environ, directory)

    def _fit_on_local_ranks(self, stop: StopRequest) -> int:
        import torch

        from moefold.train.fault_tolerance.supervise import SmallerWorld, supervise
        from moefold.train.fault_tolerance.warm_up import warm_up
        from moefold.train.fault_tolerance.watchdog import Watchdog

        directory = _directory(self.run)
        enter: Callable[[int], Heartbeat] | None = None
        first_rank = 0

        def work(rank: int) -> int:
            assert enter is not None
            return self._fit_rank(first_rank + rank, self.layout.world, torch.device("cpu"), stop, enter(rank))

        def spawn(at_place: Callable[[int], int], world: int, first: int = 0, **words: object) -> list[int]:
            """Watched by a watchdog of so many ranks; ``first``: the number of the first of them."""
            nonlocal enter, first_rank
            first_rank = first
            with closing(Watchdog(world, self.run.train.watchdog, self.patience, directory, first_rank)) as watchdog:
                enter = watchdog.enter
                return watchdog.spawn(at_place, world, **words)  # type: ignore[arg-type]

        def shrink(left: int) -> SmallerWorld:
            self._shrink(left)
            return SmallerWorld(self.layout.world, self.layout.describe())

        warm_up(self.layout.run, self.layout.world)
        if stop:
            print_stderr(nothing_to_save())
            return Outcome.INTERRUPTED
        checkpoints, memory = _checkpoints(self.run), None
        if self.run.train.saving.memory_every:
            from moefold.checkpoint.memory_copies import memory_directory

            memory = memory_directory(directory, 0 if self.hosts is None else self.hosts.index)
        if self.hosts is not None:
            supervised = partial(
                supervise, work, self.hosts.ranks, checkpoints, self.patience, stop=stop, memory=memory
            )
            return self._fit_with_other_hosts(self.hosts, supervised, spawn, stop)
        idle = self.world - self.layout.world
        return supervise(
            work,
            self.layout.world,
            checkpoints,
            self.patience,
            stop=stop,
            spawn=spawn,
            spares=self.spares + idle,
            shrink=shrink,
            memory=memory,
        )

    def _fit_with_other_hosts(
        self, hosts: Hosts, supervised: Callable[..., int], spawn: Callable[..., list[int]], stop: StopRequest
    ) -> int:
        """Every start has the ranks that a decision of all hosts gives this one."""
        from moefold.comm.membership import Fit
        from moefold.train.fault_tolerance.host_starts import Ended, HostStarts

        def fit(count: int) -> Fit:
            layout = self._layout_of_ranks(count * hosts.ranks)
            return Fit(layout.world, layout.describe())

        starts = HostStarts(hosts, _directory(self.run), self.patience, fit, stop)

        def spawn_decided(at_place: Callable[[int], int], world: int, **words: object) -> list[int]:
            start = starts.next()
            if isinstance(start, Ended):
                return [start.code]
            self._take_layout_of(start)
            join = partial(starts.store.join, start, self.patience)
            return spawn(at_place, start.ranks_of(hosts.index), start.first_rank(hosts.index), join=join, **words)

        try:
            code = supervised(spawn=spawn_decided)
        except MoefoldError as error:
            starts.end(None, str(error).splitlines()[0])
            raise
        starts.end(code)
        return code

    def _take_layout_of(self, start: HostStart) -> None:
        self.layout = self._layout_of_ranks(start.came * start.ranks)
        if (self.layout.world, self.layout.describe()) != (start.world, start.layout):
            raise TrainingError(
                f"host {start.store} has decided on world {start.world}: {start.layout}; the configuration here gives "
                f"{self.layout.world}: {self.layout.describe()}; start all hosts with the same configuration"
            )
        if self.layout.world < self.world:
            for line in what_layouts_change(self.run):
                print_stderr(f"not the same on another layout: {line}")

    def _layout_of_ranks(self, ranks: int) -> ElasticLayout:
        """From what all hosts have in common, so that all find the same."""
        if ranks == self.world:
            return ElasticLayout(self.run, self.world)
        if not any(_checkpoints(self.run).glob("step_*")):
            raise TrainingError("it has no checkpoint yet, and begins with all of them")
        return self._smaller(ranks, None)

    def _shrink(self, left: int) -> None:
        """Go on with at most ``left`` ranks, or say why not."""
        self.layout = self._smaller(left, _host_memory(left))
        for line in what_layouts_change(self.run):
            print_stderr(f"not the same on another layout: {line}")

    def _smaller(self, left: int, device: Device | None) -> ElasticLayout:
        elastic = self.run.train.elastic
        fewest = (self.world + 1) // 2 if elastic.min_world is None else elastic.min_world
        what = f"of {self.world} places {left} are left"
        if left < fewest:
            raise TrainingError(f"{what}, and train.elastic.min_world is {_or_half(elastic.min_world, fewest)}")
        try:
            layout = layout_for_world(self.run, left, device)
        except LayoutError as error:
            raise TrainingError(f"{what}, and {error}") from None
        if layout.world < fewest:
            best = f"their best layout takes {layout.world} ({layout.describe()})"
            raise TrainingError(f"{what}, {best}, and train.elastic.min_world is {_or_half(elastic.min_world, fewest)}")
        return layout

    def _fit_rank(
        self, rank: int, world: int, device: torch.device, stop: StopRequest, heartbeat: Heartbeat | None = None
    ) -> int:
        from moefold.train.host_switches import bind_rank
        from moefold.train.train_context import build_train_context
        from moefold.train.train_loop import train

        asked = ElasticLayout(self.run, self.world)
        bind_rank(self.run.train.host, *place_on_host(os.environ, rank, world, self.hosts), device)
        context, state = build_train_context(
            self.layout.run,
            rank,
            world,
            device,
            self.patience,
            self.routing_policy,
            heartbeat,
            None if self.layout == asked else asked,
            0 if self.hosts is None else self.hosts.index,
        )
        return train(context, state, (*self.callbacks, *self._default_reporters()), stop)

    def _default_reporters(self) -> Sequence[Callback]:
        from moefold.train.callbacks.registry import default_callbacks

        return default_callbacks() if self._reporters is None else self._reporters


def _directory(run: RunConfig) -> Path:
    return Path(run.train.directory) / run.name


def _checkpoints(run: RunConfig) -> Path:
    return _directory(run) / "checkpoints"


def _own(run: RunConfig) -> str:
    parallel = run.parallel
    degrees = ((axis, getattr(parallel, axis)) for axis in ("tp", "cp", "pp", "ep", "etp"))
    return " ".join(f"{axis}{size}" for axis, size in degrees if size > 1) or "data-parallel ranks of this batch"


def _or_half(min_world: int | None, fewest: int) -> str:
    return str(fewest) if min_world is not None else f"not set, which means half of the ranks: {fewest}"


def _host_memory(ranks: int) -> Device | None:
    """Of this host, for so many ranks; None if nothing is known."""
    from moefold.ops.host_probe import available_host_bytes

    free = available_host_bytes()
    return None if free is None else Device(free, host_ranks=ranks)


# ---- ranks of a launcher that the layout does not need ----

_ENDED, _HEARD = "moefold/ended", "moefold/heard"
_POLL_SECONDS, _RELEASE_SECONDS = 0.5, 10.0


def _stand_by(store: Store, stop: StopRequest) -> int:
    """Wait for the end of the run, and end like it: a launcher takes a rank that ends otherwise for lost."""
    while not stop:
        try:
            if store.check([_ENDED]):
                code = int(store.get(_ENDED))
                store.add(_HEARD, 1)
                return code
        except RuntimeError as error:
            raise TrainingError(f"the store of the ranks is gone, and with it the run: {error}") from None
        time.sleep(_POLL_SECONDS)
    return Outcome.INTERRUPTED


def _release(store: Store, code: int, standing_by: int) -> None:
    """Say how the run ended; where this process serves the store, it must not be gone before the others have read."""
    store.set(_ENDED, str(code))
    ends = time.monotonic() + _RELEASE_SECONDS
    while store.add(_HEARD, 0) < standing_by and time.monotonic() < ends:
        time.sleep(_POLL_SECONDS / 5)


@contextmanager
def _stop_requests(given: StopRequest | None) -> Iterator[StopRequest]:
    """Python handles signals in the main thread only; elsewhere a run cannot be interrupted by one."""
    if given is not None:
        yield given
    elif threading.current_thread() is threading.main_thread():
        with stop_on_signals() as stop:
            yield stop
    else:
        yield StopRequest()


def _require_services(run: RunConfig) -> None:
    """A missing package is reported before any rank starts."""
    from moefold.train.callbacks.registry import services

    services(run.train)
    if run.train.saving.upload is not None:
        from moefold.checkpoint.object_store import require_store

        require_store(run.train.saving.upload)
