"""The launcher of one of several hosts waits here for the next start of the ranks.

A launcher whose ranks have ended, or that has just been started, beats in the store until a decision names its host.
One launcher serves the store and decides (`comm/membership.py`): the host that decided last, which the record in the
run's directory names (`checkpoint/host_record.py`). Where it is not reached for ``hosts.patience`` seconds, the next
host with an address serves on it, and gives way when one before it comes back. What two hosts that both serve decide
is settled by the record: the second to write finds it changed, and follows the first.

A host that is not named stands by: it beats until a later start names it, or until the run has ended.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from moefold.checkpoint.host_record import read_record, record_start
from moefold.comm.launchers import Hosts
from moefold.comm.membership import Beats, Fit, FitHosts, HostStart, candidates_in_order, choose_start
from moefold.comm.rendezvous import HostStore
from moefold.errors import RankError, RunBusyError, TrainingError
from moefold.train.fault_tolerance.signals import StopRequest, print_stderr

_DECISION, _ENDED = "moefold/decision", "moefold/ended"
_POLL_SECONDS = 0.1
# Between two looks for a host that would serve before this one.
_LOOK_SECONDS = 5.0
_FAREWELL_SECONDS = 5.0


class Ended(NamedTuple):
    """The run has ended while this host stood by."""

    code: int


class HostStarts:
    """``fit`` chooses the layout of a number of hosts; hosts that do not meet within ``seconds`` end with an error."""

    def __init__(self, hosts: Hosts, run_dir: Path, seconds: float, fit: FitHosts, stop: StopRequest) -> None:
        self.hosts, self.run_dir, self.seconds, self.fit, self.stop = hosts, run_dir, seconds, fit, stop
        self.store = HostStore(hosts)
        self._all_take_part = False

    def next(self) -> HostStart | Ended:
        """Wait for a start that this host takes part in."""
        found = _Wait(self).until_decided()
        self._all_take_part = isinstance(found, HostStart) and len(found.hosts) == self.hosts.count
        return found

    def end(self, code: int | None, reason: str = "") -> None:
        """Tell hosts that stand by how the run ended, where this one serves the store; None: with an error."""
        if not self.store.serves or (self._all_take_part and code is not None):
            return
        said = json.dumps({"code": code, "reason": reason})
        self.store.ask(self.hosts.index, lambda store: store.set(_ENDED, said))
        beats, ends = Beats(), time.monotonic() + _FAREWELL_SECONDS
        # One that has heard it beats no more.
        while time.monotonic() < ends:
            counts = self.store.ask(self.hosts.index, lambda store: _counts(store, self.hosts))
            waiting = beats.see(counts or (), time.monotonic())
            if time.monotonic() > ends - _FAREWELL_SECONDS + 1 and not waiting:
                break
            time.sleep(_POLL_SECONDS)
        self.store.close()


class _Wait:
    """One wait for a start, from the end of the ranks before it."""

    def __init__(self, starts: HostStarts) -> None:
        self.hosts, self.store, self.run_dir = starts.hosts, starts.store, starts.run_dir
        self.starts, self.index = starts, starts.hosts.index
        self.seen = read_record(self.run_dir)
        # Decisions up to this one belong to starts that have ended, or that go on without this host.
        self.before = 0 if self.seen is None else self.seen.number
        self.follows: int | None = None
        now = time.monotonic()
        self.reached, self.leads_since, self.looked = now, now, now
        self.beats, self.said = Beats(), ""
        self._fits: dict[int, Fit | TrainingError] = {}
        if self.store.serves and self._order[0] != self.index:
            # Others have gone on since this host served it.
            self.store.close()

    def until_decided(self) -> HostStart | Ended:
        while not self.starts.stop:
            found = self._lead() if self._is_leader() else self._follow()
            if found is not None:
                return found
            time.sleep(_POLL_SECONDS)
        raise RankError("stopped while this host waited for the next start of the ranks")

    @property
    def _order(self) -> tuple[int, ...]:
        return candidates_in_order(len(self.hosts.addresses), None if self.seen is None else self.seen.store)

    def _is_leader(self) -> bool:
        """Whether this host serves the store now, or begins to."""
        order, now = self._order, time.monotonic()
        if self.index not in order:
            return False
        first = order[0] == self.index
        # In turns: whoever is next in the order is there to be followed before this host is.
        turn = order.index(self.index) * self.hosts.patience
        alone = bool(self.hosts.patience) and now - self.reached > turn
        if not (first or alone or self.store.serves):
            return False
        if not first and self.store.serves and now - self.looked > _LOOK_SECONDS:
            self.looked = now
            earlier = order[: order.index(self.index)]
            if (host := next((one for one in earlier if self._is_there(one)), None)) is not None:
                self._tell(f"host {host} serves the store again")
                self._follow_now(host)
                return False
        if not self.store.serves:
            if not first:
                self._tell(f"host {order[0]} was not reached for {turn:g} s; this one serves the store")
            self.store.serve()
            self.leads_since, self.follows, self.beats = now, None, Beats()
        return True

    def _lead(self) -> HostStart | None:
        now = time.monotonic()
        counts = self.store.ask(self.index, lambda store: _counts(store, self.hosts, self.index))
        came = self.beats.see(counts or (), now)
        order = self._order
        # Those before this one in the order were not reached, or they would serve.
        lost = set(order[: order.index(self.index)])
        waited = now - self.leads_since
        hosts = self.hosts
        chosen = choose_start(
            hosts.count, hosts.ranks, came, lost, waited, hosts.patience, self._fit, self.before, self.index
        )
        if isinstance(chosen, HostStart):
            try:
                record_start(self.run_dir, self.seen, chosen)
            except RunBusyError as error:
                chosen = str(error)
                if (newest := read_record(self.run_dir)) != self.seen:
                    self._other_side_went_on(newest)
        if isinstance(chosen, HostStart):
            decided = chosen.to_json()
            self.store.ask(self.index, lambda store: store.set(_DECISION, decided))
            self._tell_start(chosen)
            return chosen
        if waited > self.starts.seconds:
            raise TrainingError(f"no start of the ranks within {self.starts.seconds:g} s: {chosen}")
        if waited > _LOOK_SECONDS:
            self._tell(chosen)
        return None

    def _fit(self, hosts: int) -> Fit:
        """Asked at every poll, and takes a while."""
        if hosts not in self._fits:
            try:
                self._fits[hosts] = self.starts.fit(hosts)
            except TrainingError as error:
                self._fits[hosts] = error
        found = self._fits[hosts]
        if isinstance(found, TrainingError):
            raise found
        return found

    def _follow(self) -> HostStart | Ended | None:
        now = time.monotonic()
        if self.follows is None:
            others = (host for host in self._order if host != self.index)
            if (host := next((one for one in others if self._is_there(one)), None)) is not None:
                self._follow_now(host)
        answer = None if self.follows is None else self.store.ask(self.follows, self._beat)
        if answer is None:
            self.follows = None
            if (newest := read_record(self.run_dir)) != self.seen:
                self._other_side_went_on(newest)
            if now - self.reached > self.starts.seconds:
                where = ", ".join(f"{self.hosts.addresses[host]}:{self.hosts.port}" for host in self._order)
                raise TrainingError(
                    f"host {self.index} reached no store at {where} within {self.starts.seconds:g} s; "
                    "the same command joins the run again"
                )
            return None
        self.reached = time.monotonic()
        decision, ended = answer
        try:
            code, reason = (None, None) if ended is None else _how_it_ended(ended)
            start = None if decision is None else HostStart.from_json(decision)
        except ValueError as error:
            raise TrainingError(f"the store of host {self.follows} has what no launcher wrote: {error}") from None
        if code is not None:
            return Ended(code)
        if reason is not None:
            raise TrainingError(f"host {self.follows} has ended the run: {reason}")
        if start is None:
            return None
        if self.index not in start.hosts:
            self._tell(f"start {start.number} goes on with hosts {list(start.hosts)}; this one stands by for the next")
        if start.number <= self.before:
            return None
        self.before, self.seen = start.number, start
        if self.index not in start.hosts:
            return None
        self._tell_start(start)
        return start

    def _beat(self, store: Store) -> tuple[bytes | None, bytes | None]:
        store.add(_beats(self.index), 1)
        return _value(store, _DECISION), _value(store, _ENDED)

    def _is_there(self, host: int) -> bool:
        return self.store.ask(host, lambda store: store.add(_beats(self.index), 1)) is not None

    def _follow_now(self, host: int) -> None:
        self.store.close()
        self.follows, self.reached = host, time.monotonic()

    def _other_side_went_on(self, newest: HostStart | None) -> None:
        """Its store comes first from now on, also where this host served one."""
        self.seen = newest
        self.before = 0 if newest is None else newest.number
        if newest is not None:
            self._tell(f"start {newest.number} goes on with hosts {list(newest.hosts)}; this one waits for it to end")
        self.store.close()
        self.follows, self.reached = None, time.monotonic()

    def _tell_start(self, start: HostStart) -> None:
        if len(start.hosts) < self.hosts.count:
            away = sorted(set(range(self.hosts.count)) - set(start.hosts))
            print_stderr(
                f"start {start.number}: without hosts {away}, going on with world {start.world}: {start.layout}"
            )

    def _tell(self, what: str) -> None:
        if what != self.said:
            self.said = what
            print_stderr(f"host {self.index}: {what}")


def _how_it_ended(said: bytes) -> tuple[int | None, str]:
    """The exit code, or None and the error. Raises ValueError if it is something else."""
    data = json.loads(said)
    if not isinstance(data, dict) or not isinstance(data.get("code", ""), int | None):
        raise ValueError("not the end of a run")
    return data["code"], str(data.get("reason", ""))


def _beats(host: int) -> str:
    return f"moefold/host_{host}"


def _counts(store: Store, hosts: Hosts, own: int | None = None) -> list[int]:
    return [store.add(_beats(host), int(host == own)) for host in range(hosts.count)]


def _value(store: Store, key: str) -> bytes | None:
    return bytes(store.get(key)) if store.check([key]) else None
