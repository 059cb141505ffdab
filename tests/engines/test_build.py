"""From a run to a dispatcher of another library: sizes come from the run, and all layers share what is made once."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import cast, get_args

import pytest
import torch
from tests.engines.dispatch_cases import CHOICES, DIM, EXPERTS, WORLD, Outcome, expected, microbatch, outcome
from tests.engines.fake_deepep import fake_deep_ep
from tests.engines.fake_deepep_elastic import ElasticBuffer
from tests.engines.fake_symm_mem import FakeSymmetricMemory
from tests.engines.rank_threads import ThreadProcessGroup, on_rank_threads
from tests.support import on_ranks

from moefold.checks.engine_limits import RULES
from moefold.checks.run_all import _flat
from moefold.comm.process_groups import Group, Groups
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import EngineDispatcher, ParallelConfig
from moefold.config.precision import PrecisionConfig
from moefold.config.run import RunConfig
from moefold.errors import BackendError
from moefold.moe.dispatch import deepep, deepep_elastic, symmetric_memory
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES
from moefold.parallel.dispatchers import ENGINE_DISPATCHERS
from moefold.parallel.parallelize import build_on_meta
from moefold.recipes.catalog import recipe

# Packed documents: ranks differ in how many tokens they hold, up to seven.
RUN = RunConfig(
    model=ModelConfig(dim=DIM, moe=MoEConfig(num_experts=EXPERTS, top_k=CHOICES)),
    data=DataConfig(packing="bin_packed", seq_len=7, micro_batch=1),
    precision=PrecisionConfig(compute="bfloat16"),
)


class ThreadGroups:
    """What ``build`` needs of a rank's groups."""

    def __init__(self, ep: Group) -> None:
        self.ep = ep
        self.layout = SimpleNamespace(size=lambda name: WORLD if name in ("ep", "dp") else 1)

    def __getitem__(self, name: str) -> Group:
        assert name == "ep"
        return self.ep


def run_of(name: EngineDispatcher) -> RunConfig:
    run = RunConfig(
        model=RUN.model,
        data=RUN.data,
        precision=RUN.precision,
        parallel=ParallelConfig(ep=WORLD, dispatcher=name),
    )
    assert not _flat(rule(run) for rule in RULES)
    return run


@pytest.mark.parametrize("name", ["deepep", "deepep_elastic"])
def test_deepep_is_built_from_a_run(name: EngineDispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_deep_ep(ElasticBuffer=ElasticBuffer)
    for adapter in (deepep, deepep_elastic):
        monkeypatch.setattr(adapter, "load_engine", lambda name: module)
    assert_two_layers(name)


def test_symmetric_memory_is_built_from_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = []
    made = symmetric_memory.SymmetricExchange

    def with_fake(library: ModuleType, ops: ModuleType, group: Group, sizes: symmetric_memory.Sizes) -> object:
        fake = FakeSymmetricMemory(cast(ThreadProcessGroup, group.connected))
        ranks.append(group.index)
        return made(fake.module(), cast(ModuleType, fake), group, sizes)

    monkeypatch.setattr(symmetric_memory, "SymmetricExchange", with_fake)
    library = SimpleNamespace(is_nvshmem_available=lambda: True)
    monkeypatch.setattr(symmetric_memory, "load_engine", lambda name: library)
    assert_two_layers("symmetric_memory")
    assert sorted(ranks) == list(range(WORLD))


def test_symmetric_memory_without_nvshmem_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(is_nvshmem_available=lambda: False)
    monkeypatch.setattr(symmetric_memory, "load_engine", lambda name: library)
    with pytest.raises(BackendError, match=r"finds no NVSHMEM .*use parallel.dispatcher all_to_all"):
        assert_two_layers("symmetric_memory")


@pytest.mark.parametrize("name", get_args(EngineDispatcher))
def test_a_model_on_cpus_is_refused_with_the_dispatchers_that_work(name: EngineDispatcher) -> None:
    def work(groups: Groups) -> None:
        run = replace(recipe("debug_tiny"), parallel=ParallelConfig(ep=2, dispatcher=name))
        with pytest.raises(
            BackendError, match=f"parallel.dispatcher: {name} cannot do dispatch: runs on cuda.*all_to_all,"
        ):
            build_on_meta(run, groups, torch.device("cpu"))

    on_ranks(work, 2, ep=2)


def test_a_model_on_cpus_is_refused_with_the_linear_that_works() -> None:
    def work(groups: Groups) -> None:
        debug = recipe("debug_tiny")
        run = replace(debug, kernels=replace(debug.kernels, linear="transformer_engine"))
        with pytest.raises(
            BackendError, match=r"kernels.linear: transformer_engine cannot do linear: runs on cuda.* cpu: torch;"
        ):
            build_on_meta(run, groups, torch.device("cpu"))

    on_ranks(work, 1)


def assert_two_layers(name: EngineDispatcher) -> None:
    batch = microbatch(3, dropping=True)
    wanted = expected(batch)

    def work(group: Group) -> list[Outcome]:
        groups = cast(Groups, ThreadGroups(group))
        layers = [ENGINE_DISPATCHERS[name](run_of(name), groups, SYNC_SPLIT_SIZES) for _ in range(2)]
        assert layers[0] is not layers[1]
        assert layers[0].exchange is layers[1].exchange  # type: ignore[attr-defined]
        return [outcome(layer, batch.of(group.index), group.index * (EXPERTS // WORLD)) for layer in layers]

    of_rank = on_rank_threads(WORLD, work)
    for layer in range(2):
        for place, reference in enumerate(wanted):
            got = torch.cat([found[layer][place] for found in of_rank])
            assert torch.equal(got.float(), reference), Outcome._fields[place]
