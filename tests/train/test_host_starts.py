"""Which hosts take part in a start: the decision, its record, and launchers that find each other on loopback."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moefold.checkpoint.host_record import read_record, record_start
from moefold.checkpoint.run_lock import check_incarnation, commit_gate, may_write, take_incarnation
from moefold.comm.launchers import Hosts
from moefold.comm.membership import ALIVE_SECONDS, Beats, Fit, HostStart, candidates_in_order, choose_start
from moefold.errors import FencedError, RankError, RunBusyError, TrainingError
from moefold.train.fault_tolerance.host_starts import Ended, HostStarts, _how_it_ended
from moefold.train.fault_tolerance.signals import StopRequest


def _fit(hosts: int) -> Fit:
    """Of four hosts with two ranks each: half of them at least, and three have a layout of two."""
    if hosts < 2:
        raise TrainingError("too few")
    return Fit({4: 8, 3: 4, 2: 4}[hosts], f"ep{hosts}")


def _choose(came: set[int], waited: float = 0.0, patience: float = 45.0, lost: tuple[int, ...] = (), leader: int = 0):  # type: ignore[no-untyped-def]
    return choose_start(4, 2, came, lost, waited, patience, _fit, 6, leader)


def test_all_hosts_start_at_once_and_fewer_after_the_patience() -> None:
    assert _choose({0, 1, 2, 3}) == HostStart(7, 0, (0, 1, 2, 3), 4, 2, 8, "ep4")
    assert "[2, 3] have not come" in _choose({0, 1}, waited=44.0)
    assert _choose({0, 3}, waited=45.0) == HostStart(7, 0, (0, 3), 2, 2, 4, "ep2")
    assert _choose({1, 2}, lost=(3, 0), leader=1).hosts == (1, 2), "hosts known to be lost are not waited for"
    assert "patience of 0" in _choose({0, 1}, waited=1e9, patience=0.0)
    assert "too few" in _choose({0}, waited=45.0)
    assert "does not reach" in _choose({1, 2, 3}, waited=45.0)


def test_hosts_that_a_layout_does_not_need_stand_by_but_not_the_one_that_decides() -> None:
    start = _choose({0, 1, 3}, waited=45.0, leader=3)
    assert (start.hosts, start.came, start.world) == ((0, 3), 3, 4)
    assert [start.first_rank(host) for host in start.hosts] == [0, 2]
    assert HostStart(1, 0, (0, 2), 2, 2, 3, "").ranks_of(2) == 1
    assert HostStart.from_json(start.to_json()) == start
    for wrong in ("[]", "{}", "7", start.to_json().replace("[0, 3]", '["0"]'), "{"):
        with pytest.raises(ValueError):
            HostStart.from_json(wrong)


def test_only_counters_that_advance_are_hosts_that_live() -> None:
    beats = Beats()
    assert beats.see([5, 0], 0.0) == set(), "from an earlier start"
    assert beats.see([6, 0], 1.0) == {0}
    assert beats.see([6, 1], 1.0 + ALIVE_SECONDS) == {1}


def test_the_store_moves_around_from_the_host_that_served_it_last() -> None:
    assert candidates_in_order(3, None) == (0,)
    assert candidates_in_order(3, 0) == (0, 1, 2)
    assert candidates_in_order(3, 2) == (2, 0, 1)


def _start(number: int, store: int, *hosts: int) -> HostStart:
    return HostStart(number, store, hosts, len(hosts), 1, len(hosts), "")


def test_of_two_sides_the_second_finds_that_the_first_has_gone_on(tmp_path: Path) -> None:
    record_start(tmp_path, None, both := _start(1, 0, 0, 1))
    record_start(tmp_path, both, first := _start(2, 1, 1))
    with pytest.raises(RunBusyError, match=r"decided by host 1, for hosts \[1\]"):
        record_start(tmp_path, both, _start(2, 0, 0))
    assert read_record(tmp_path) == first


class _Rank0:
    """A process that works on the run from ``begin`` to ``end``."""

    def __init__(self, directory: Path) -> None:
        asked, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        if not (pid := os.fork()):
            os.close(self._ask)
            os.read(asked, 1)
            os.write(answer, bytes([take_incarnation(directory)]))
            os.read(asked, 1)
            os._exit(0)
        self.pid = pid

    def begin(self) -> int:
        """Its incarnation."""
        os.write(self._ask, b"x")
        return os.read(self._answers, 1)[0]

    def end(self) -> None:
        os.close(self._ask)
        os.waitpid(self.pid, 0)


def test_no_side_goes_on_while_rank_0_of_the_other_lives(tmp_path: Path) -> None:
    record_start(tmp_path, None, both := _start(1, 0, 0, 1))
    rank_0 = _Rank0(tmp_path)
    old = rank_0.begin()
    with pytest.raises(RunBusyError, match=f"process {rank_0.pid}"):
        record_start(tmp_path, both, _start(2, 1, 1))
    assert read_record(tmp_path) == both
    rank_0.end()
    record_start(tmp_path, both, _start(2, 1, 1))
    # The side that went on has the next incarnation, and what a writer of the other had begun is not committed.
    own = take_incarnation(tmp_path)
    with commit_gate(tmp_path):
        check_incarnation(tmp_path, own)
    with pytest.raises(FencedError, match=f"started again as incarnation {own}"), may_write(tmp_path, old):
        pass


class _Launchers:
    """Three hosts on addresses of the loopback interface, each waiting in a thread."""

    def __init__(self, directory: Path, patience: float = 1.0, seconds: float = 30.0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.directory, self.patience, self.seconds = directory, patience, seconds
        self.found: dict[int, object] = {}
        self.threads: dict[int, threading.Thread] = {}

    def new(self, host: int) -> tuple[HostStarts, StopRequest]:
        addresses = tuple(f"127.0.0.{number + 1}" for number in range(3))
        stop = StopRequest()
        hosts = Hosts(3, host, 1, addresses, self.port, self.patience)
        return HostStarts(hosts, self.directory, self.seconds, lambda count: Fit(count, f"dp{count}"), stop), stop

    def wait(self, host: int, starts: HostStarts) -> None:
        def work() -> None:
            try:
                self.found[host] = starts.next()
            except (TrainingError, RankError) as error:
                self.found[host] = error

        self.found.pop(host, None)
        self.threads[host] = threading.Thread(target=work, daemon=True)
        self.threads[host].start()

    def results(self, *hosts: int) -> list[object]:
        for host in hosts:
            self.threads[host].join(60)
        return [self.found[host] for host in hosts]


def _until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_hosts_go_on_without_one_and_with_it_from_the_next_start_on(tmp_path: Path) -> None:
    launchers = _Launchers(tmp_path)
    (a, _), (b, _), (c, stop) = [launchers.new(host) for host in range(3)]
    for host, starts in enumerate((a, b, c)):
        launchers.wait(host, starts)
    assert launchers.results(0, 1, 2) == [HostStart(1, 0, (0, 1, 2), 3, 1, 3, "dp3")] * 3
    launchers.wait(0, a)
    launchers.wait(1, b)
    assert launchers.results(0, 1) == [HostStart(2, 0, (0, 1), 2, 1, 2, "dp2")] * 2
    launchers.wait(2, c)
    time.sleep(1.5)
    assert 2 not in launchers.found, "it stands by"
    launchers.wait(0, a)
    launchers.wait(1, b)
    assert launchers.results(0, 1, 2) == [HostStart(3, 0, (0, 1, 2), 3, 1, 3, "dp3")] * 3
    launchers.wait(0, a)
    launchers.wait(1, b)
    launchers.results(0, 1)
    launchers.wait(2, c)
    time.sleep(0.5)
    a.end(0)
    assert launchers.results(2) == [Ended(0)], "the run has ended without it"
    launchers.wait(2, c)
    stop.handle(signal.SIGTERM, None)
    assert isinstance(launchers.results(2)[0], RankError)


def test_the_next_host_serves_where_the_one_of_the_store_is_lost_and_it_follows_when_it_comes_back(
    tmp_path: Path,
) -> None:
    launchers = _Launchers(tmp_path)
    (a, _), (b, _), (c, _) = [launchers.new(host) for host in range(3)]
    for host, starts in enumerate((a, b, c)):
        launchers.wait(host, starts)
    launchers.results(0, 1, 2)
    a.store.close()
    launchers.wait(1, b)
    launchers.wait(2, c)
    assert launchers.results(1, 2) == [HostStart(2, 1, (1, 2), 2, 1, 2, "dp2")] * 2
    a, _ = launchers.new(0)
    launchers.wait(0, a)
    time.sleep(1.5)
    assert 0 not in launchers.found and not a.store.serves, "no second side"
    launchers.wait(1, b)
    launchers.wait(2, c)
    assert launchers.results(0, 1, 2) == [HostStart(3, 1, (0, 1, 2), 3, 1, 3, "dp3")] * 3


def test_of_two_sides_that_do_not_reach_each_other_one_goes_on(tmp_path: Path) -> None:
    record_start(tmp_path, None, _start(1, 0, 0, 1))
    # Forked first, or it would keep the stores' addresses.
    rank_0 = _Rank0(tmp_path)
    sides = [_Launchers(tmp_path, patience=1.5, seconds=5.0) for _ in range(2)]
    for host, side in enumerate(sides):
        # Each side has a port of its own, and so none is at the other's address.
        side.wait(host, side.new(host)[0])
    _until(lambda: any(side.found for side in sides))
    first = 0 if sides[0].found else 1
    gone_on = sides[first].found[first]
    assert isinstance(gone_on, HostStart) and (gone_on.number, gone_on.hosts) == (2, (first,))
    rank_0.begin()
    other = str(sides[1 - first].results(1 - first)[0])
    rank_0.end()
    assert f"process {rank_0.pid}" in other and "no start of the ranks within 5 s" in other
    assert read_record(tmp_path) == gone_on


def test_a_host_that_nobody_goes_on_with_ends_and_says_where_it_looked(tmp_path: Path) -> None:
    launchers = _Launchers(tmp_path, patience=0.0, seconds=1.0)
    (a, _), (b, _) = launchers.new(0), launchers.new(1)
    launchers.wait(1, b)
    assert f"127.0.0.1:{launchers.port}" in str(launchers.results(1)[0])
    launchers.wait(0, a)
    assert "hosts [1, 2] are missing" in str(launchers.results(0)[0])


@pytest.mark.parametrize("said", [b"{", b"3", b"null", b"{}", b'{"code": "75"}', b'{"code": [0]}'])
def test_an_end_that_no_launcher_wrote_is_refused(said: bytes) -> None:
    """Anybody who reaches the store can write there."""
    with pytest.raises(ValueError):
        _how_it_ended(said)


def test_ends_that_launchers_write() -> None:
    assert _how_it_ended(b'{"code": 75, "reason": ""}') == (75, "")
    assert _how_it_ended(b'{"code": null, "reason": "no disk"}') == (None, "no disk")
