"""A slow rank, a slow link, slow data and garbage collection, put into real ranks one by one: a profile names each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from tests.marks import slow_except
from tests.ranks.test_accounted_step import profiled

from moefold.cli.main import main
from moefold.pipeline import runtime
from moefold.schedule.actions import Kind
from moefold.train import train_loop
from moefold.train.profile.causes import causes_of

FAULTY = 1


@contextmanager
def around_forward(extra: Callable[[], object]) -> Iterator[None]:
    real = runtime.forward

    def forward(state: Any, action: Any) -> None:
        if dist.get_rank() == FAULTY:
            extra()
        real(state, action)

    with patch.dict(runtime._RUN_ACTION, {Kind.FORWARD: forward}):
        yield


@contextmanager
def slow_data() -> Iterator[None]:
    real = train_loop.read_local_step

    def read(*given: Any) -> Any:
        if dist.get_rank() == FAULTY:
            time.sleep(1.5)
        return real(*given)

    with patch.object(train_loop, "read_local_step", read):
        yield


@contextmanager
def slow_link() -> Iterator[None]:
    """Whatever ranks 2 and 3 exchange takes longer, once both are there."""
    real = dist.all_to_all_single

    def exchange(output: Any, *given: Any, group: Any = None, **named: Any) -> Any:
        done = real(output, *given, group=group, **named)
        if dist.get_process_group_ranks(group) == [2, 3] and output.numel() > 4096:
            time.sleep(0.1)
        return done

    with patch.object(dist, "all_to_all_single", exchange):
        yield


# Shared memory between ranks of one host would go past the exchange that is slowed down.
BY_GLOO = {"parallel.cpu_exchange": "gloo"}
# By the kind of cause: what is put in, how many ranks, changes, and the ranks that must be named.
FAULTS: dict[str, tuple[Any, int, dict[str, Any], tuple[int, ...], str]] = {
    "rank": (lambda: around_forward(lambda: time.sleep(0.25)), 2, {}, (FAULTY,), "slow rank: rank 1"),
    "gc": (lambda: around_forward(lambda: [gc.collect() for _ in range(3)]), 2, {}, (FAULTY,), "garbage collection"),
    "data": (slow_data, 2, {"data.prefetch": 0}, (FAULTY,), "slow data: rank 1"),
    "link": (slow_link, 4, BY_GLOO | {"parallel.ep": 2}, (2, 3), "slow link between ranks 2 and 3"),
}


@pytest.mark.parametrize("kind", slow_except(FAULTS))
def test_what_was_put_in_is_named_first(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault, nproc, changes, ranks, words = FAULTS[kind]
    with fault():
        accounts, _, directory = profiled(tmp_path, {"train.profile.trace": False} | changes, nproc)
    single = [cause for cause in causes_of(accounts[1:]) if cause.ranks]
    assert single, accounts[-1]
    assert (single[0].kind, single[0].ranks) == (kind, ranks), single
    assert max(each.residue() for each in accounts) < 0.02
    # The page of the run says it too.
    assert main(["report", str(directory)]) == 0
    assert words in (directory / "report.html").read_text()
