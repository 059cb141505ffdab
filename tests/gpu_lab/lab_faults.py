"""Faults of the GPU path that the laboratory must find: each was in the code once, and has a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.gpu_lab.lab_cases import CASES, LabCase, case
from torch import Tensor

import moefold.comm.p2p as p2p
import moefold.comm.spawn as spawn
import moefold.dryrun.dry_run as dry_run
import moefold.pipeline.step as step
from moefold.comm.p2p import CudaCommStream
from moefold.comm.process_groups import Group


class LabFault(NamedTuple):
    """Seeds a fault; the laboratory's report of the case must have a finding of this kind with these words."""

    seed: Callable[[], AbstractContextManager[Any]]
    case: LabCase
    kind: str
    words: str


@contextmanager
def no_device_is_set() -> Iterator[None]:
    cuda = _Changed(torch.cuda, set_device=lambda device: None)
    with patch.object(spawn, "torch", _Changed(torch, cuda=cuda)):
        yield


@contextmanager
def no_device_for_communicators() -> Iterator[None]:
    init = dist.init_process_group

    def without_device(*args: Any, device_id: Any = None, **options: Any) -> Any:
        return dist.init_process_group(*args, **options)

    with patch.object(spawn, "dist", _Changed(dist, init_process_group=without_device)):
        assert init is dist.init_process_group
        yield


@contextmanager
def gloo_beside_nccl() -> Iterator[None]:
    def both(backend: str, **options: Any) -> Any:
        return dist.init_process_group("cpu:gloo,cuda:nccl", **options)

    with patch.object(spawn, "dist", _Changed(dist, init_process_group=both)):
        yield


class _Changed:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        return self._names[name] if name in self._names else getattr(self._module, name)


def one_communicator_for_both_directions() -> AbstractContextManager[Any]:
    return patch.object(Group, "channel", lambda group, sender, receiver: group.connected)


@contextmanager
def both_ends_of_a_sum_send_first() -> Iterator[None]:
    def one_by_one(transfers: Sequence[Any]) -> list[Any]:
        return [transfer.op(transfer.tensor, transfer.peer, group=transfer.group) for transfer in transfers]

    with patch.object(p2p, "dist", _Changed(dist, batch_isend_irecv=one_by_one)):
        yield


@contextmanager
def a_zero_on_the_cpu() -> Iterator[None]:
    norm = step.grad_norm_of

    def on_cpu(primary_shards: Any, world: Group, device: torch.device) -> Tensor:
        return norm(primary_shards, world, torch.device("cpu"))

    with patch.object(step, "grad_norm_of", on_cpu):
        yield


@contextmanager
def a_second_host_thread() -> Iterator[None]:
    from concurrent.futures import ThreadPoolExecutor

    class Threaded(CudaCommStream):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="comm-stream")

        def submit(self, work: Callable[[], Any]) -> Any:
            return self._thread.submit(partial(super().submit, work)).result()

    with patch.object(dry_run, "comm_stream", Threaded):
        yield


@contextmanager
def no_wait_for_the_communication() -> Iterator[None]:
    with patch.object(CudaCommStream, "wait", lambda stream, handle, meanwhile: handle[0]):
        yield


@contextmanager
def no_wait_for_the_computation() -> Iterator[None]:
    def submit(stream: Any, work: Callable[[], Any]) -> Any:
        with torch.cuda.stream(stream._stream):
            result = work()
        return result, stream._stream.record_event(), work

    with patch.object(CudaCommStream, "submit", submit):
        yield


OVERLAPPED = CASES["1f1b_overlapped"]
EMPTY_STAGE = case("qwen3_30b_a3b_proxy", 3, 3, parallel__pp=3, parallel__stages="Ett||L")

FAULTS: dict[str, LabFault] = {
    "no device is set": LabFault(no_device_is_set, CASES["data parallel"], "device", "the current device"),
    "no device for communicators": LabFault(
        no_device_for_communicators, CASES["data parallel"], "device", "device_id None"
    ),
    "gloo beside NCCL": LabFault(gloo_beside_nccl, CASES["data parallel"], "backend", "gloo"),
    "one communicator for both directions": LabFault(
        one_communicator_for_both_directions, CASES["1f1b on three"], "deadlock", "waits for"
    ),
    "both ends of a sum send first": LabFault(
        both_ends_of_a_sum_send_first, CASES["tied embeddings"], "deadlock", "waits for"
    ),
    "a zero on the CPU": LabFault(a_zero_on_the_cpu, EMPTY_STAGE, "ranks differ", "cpu"),
    "a second host thread": LabFault(a_second_host_thread, OVERLAPPED, "two host threads", "orders may differ"),
    "no wait for the communication": LabFault(
        no_wait_for_the_communication, OVERLAPPED, "no wait between streams", "may not have written"
    ),
    "no wait for the computation": LabFault(
        no_wait_for_the_computation, OVERLAPPED, "no wait between streams", "may not have written"
    ),
}
