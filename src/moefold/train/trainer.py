"""`Trainer`: a run and its callbacks, trained in this process, on the ranks of a launcher, or on local ranks.

torch is imported when training starts and not before: `moefold train` handles signals and reports problems first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from moefold.checks.run_all import problems_to_train
from moefold.comm.launchers import die_with_agent, place_of
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, MoefoldError
from moefold.train.callback import Callback
from moefold.train.fault_tolerance.signals import StopRequest, nothing_to_save, print_stderr, stop_on_signals
from moefold.train.state import Outcome

if TYPE_CHECKING:
    import torch

    from moefold.comm.heartbeat import Heartbeat
    from moefold.moe.routing_policies import PolicyOrName


class Trainer:
    """Trains a run: from its beginning, or from its newest checkpoint if it has one.

    The world is one process; or, under torchrun or a cluster's launcher, the processes that it started; or, with
    `nproc`, that many CPU ranks that are forked from this process, and forked again when one is lost. Forked ranks have
    their own copies of the callbacks: what a callback keeps in itself does not come back to this process.

    `callbacks` run first and `reporters` after them, so that reporters see the metrics that callbacks add. `reporters`
    are those of `moefold train` unless given: `metrics.jsonl`, console lines, a progress bar on a terminal,
    TensorBoard and Weights & Biases as the run says. A collective waits `patience` seconds for its peers.
    `routing_policy` is as for `build_model`. `device` is "cpu" or "cuda"; by default cuda if there is a GPU.

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
        patience: float = 600.0,
        routing_policy: PolicyOrName | None = None,
        device: str | None = None,
    ) -> None:
        # With nproc, this process starts its ranks itself, also inside a job that counts more tasks.
        place = place_of(os.environ) if nproc is None or "RANK" in os.environ else None
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
        self.world = nproc or 1 if place is None else place.world
        if found := problems_to_train(run, self.world):
            raise ConfigError(*found)
        self.run, self.patience, self.routing_policy = run, patience, routing_policy
        self.device = device
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
            elif self.world > 1 and not self.launched:
                code = self._fit_on_local_ranks(request)
            else:
                code = self._fit_here(request)
        return Outcome(code).name.lower()

    def _fit_here(self, stop: StopRequest) -> int:
        """This process is one rank of a launched world, or all of it."""
        from moefold.comm.spawn import join_world, this_device

        if this_device(self.device).type == "cuda":
            self._record_flights()
        rank, world = join_world(self.patience, self.device)
        return self._fit_rank(rank, world, this_device(self.device), stop)

    def _record_flights(self) -> None:
        """torch reads the variables when a process group is made."""
        from moefold.train.fault_tolerance.flight_recorder import FOLDER, recorder_environment
        from moefold.train.train_context import run_directory

        directory = run_directory(self.run)
        (directory / FOLDER).mkdir(0o700, parents=True, exist_ok=True)
        os.environ |= recorder_environment(os.environ, directory)

    def _fit_on_local_ranks(self, stop: StopRequest) -> int:
        import torch

        from moefold.train.fault_tolerance.supervise import supervise
        from moefold.train.fault_tolerance.warm_up import warm_up
        from moefold.train.fault_tolerance.watchdog import Watchdog
        from moefold.train.train_context import run_directory

        directory = run_directory(self.run)
        watchdog = Watchdog(self.world, self.run.train.watchdog, self.patience, directory)

        def work(rank: int) -> int:
            return self._fit_rank(rank, self.world, torch.device("cpu"), stop, watchdog.enter(rank))

        warm_up(self.run, self.world)
        if stop:
            print_stderr(nothing_to_save())
            return Outcome.INTERRUPTED
        with closing(watchdog):
            return supervise(
                work, self.world, directory / "checkpoints", self.patience, stop=stop, spawn=watchdog.spawn
            )

    def _fit_rank(
        self, rank: int, world: int, device: torch.device, stop: StopRequest, heartbeat: Heartbeat | None = None
    ) -> int:
        from moefold.train.train_context import build_train_context
        from moefold.train.train_loop import train

        context, state = build_train_context(
            self.run, rank, world, device, self.patience, self.routing_policy, heartbeat
        )
        return train(context, state, (*self.callbacks, *self._default_reporters()), stop)

    def _default_reporters(self) -> Sequence[Callback]:
        from moefold.train.callbacks.registry import default_callbacks

        return default_callbacks() if self._reporters is None else self._reporters


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
