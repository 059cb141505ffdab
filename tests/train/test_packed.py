"""Packed, padded or one at a time: the same documents make the same step, on any number of ranks."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.token_files import megatron
from torch import Tensor

from moefold.batching.document_packing import plan_for
from moefold.comm.process_groups import Groups, Ledger
from moefold.config.data import DataConfig
from moefold.config.moe import BalanceConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.run import RunConfig
from moefold.data.packing import document_lengths
from moefold.data.samples import AnySamples, open_samples
from moefold.nn.batch import IGNORED, Batch
from moefold.parallel.parallelize import LocalModel, build_local_model
from moefold.parallel.param_shards import local_part
from moefold.pipeline.pipeline_state import StepSums
from moefold.pipeline.runtime import run_schedule
from moefold.prove.proof_inputs import proof_init
from moefold.recipes.catalog import RECIPES
from moefold.topology.folded_layout import fold
from moefold.train.batches import StepData, step_batches

S, BATCH, VOCAB, CPU = 32, 24, 256, torch.device("cpu")


def corpus(path: Path) -> str:
    """Documents of long-tailed lengths: many short ones, some longer than a sequence."""
    rng = np.random.default_rng(5)
    lengths = np.clip(rng.lognormal(2.2, 1.0, 400), 1, 90).astype(int)
    return megatron(path / "tail", [rng.integers(1, VOCAB, length) for length in lengths])


def run_of(path: Path, documents: str, parallel: ParallelConfig | None = None, **data: Any) -> RunConfig:
    """Balance losses that look at documents and at tokens: others depend on who shares a microbatch with whom."""
    base = RECIPES["debug_mla"]()
    assert base.model.moe is not None
    moe = replace(base.model.moe, balance=BalanceConfig(sequence=0.1, z=0.05))
    settings: dict[str, Any] = {"seq_len": S, "global_batch": BATCH, "micro_batch": 2, **data}
    return replace(
        base,
        model=replace(base.model, moe=moe, num_mtp=1),
        data=DataConfig(packing=documents, train=corpus(path), validation=None, **settings),  # type: ignore[arg-type]
        parallel=parallel or ParallelConfig(),
        precision=PrecisionConfig(params="float64", compute="float64"),
        kernels=KernelsConfig(experts="sequential"),
    )


def alone(run: RunConfig) -> Groups:
    return Groups(fold(run.parallel, 1), 0, Ledger(), timedelta(seconds=120))


def opened(run: RunConfig) -> AnySamples:
    return open_samples(run.data, run.model.vocab_size, run.seed)


def step_of(run: RunConfig, first: int = 0) -> StepData:
    return step_batches(opened(run), first, run, alone(run), CPU)


def on_rank(run: RunConfig, rank: int, world: int, first: int = 0) -> StepData:
    """What a rank of a larger world would read; nothing is exchanged, so it need not exist."""
    stands: Any = SimpleNamespace(layout=fold(run.parallel, world), rank=rank)
    return step_batches(opened(run), first, run, stands, CPU)


def carried_out(local_model: LocalModel, batches: list[Batch]) -> tuple[StepSums, dict[str, Tensor]]:
    local_model.model.zero_grad()
    sums = run_schedule(local_model, batches)
    gradients = {
        name: local_part(value.grad).clone()
        for name, value in local_model.model.named_parameters()
        if value.grad is not None
    }
    return sums, gradients


def labels_ahead(batches: list[Batch]) -> int:
    return sum(int((batch.ahead[0].labels_S != IGNORED).sum()) for batch in batches)


def one_at_a_time(run: RunConfig) -> list[Batch]:
    """The reference of packing: every document a microbatch of its own."""
    data = replace(run.data, packing="bin_packed", micro_batch=1)
    samples, found = opened(run), []
    for i in range(run.data.global_batch):
        one = replace(run, data=replace(data, global_batch=1))
        (batch,) = step_batches(samples, i, one, alone(one), CPU).batches
        found.append(batch)
    tokens = sum(batch.num_tokens for batch in found)
    return [replace(batch, step_labels=tokens, step_tokens=tokens, step_sequences=len(found)) for batch in found]


def test_packed_padded_and_single_documents_make_the_same_step(tmp_path: Path) -> None:
    run = run_of(tmp_path, "bin_packed")
    local_model = build_local_model(run, alone(run), CPU, proof_init)
    ways = {
        "single": one_at_a_time(run),
        "bin_packed": step_of(run).batches,
        "packed into more": step_of(run_of(tmp_path, "bin_packed", micro_batch=1)).batches,
        "packed into one": step_of(run_of(tmp_path, "bin_packed", micro_batch=BATCH)).batches,
        "padded": step_of(run_of(tmp_path, "padded")).batches,
    }
    assert len(ways["packed into one"]) == 1 < len(ways["bin_packed"]) < len(ways["padded"]) < len(ways["single"])
    expected, gradients = carried_out(local_model, ways.pop("single"))
    assert expected.loss > 0 and all(gradient.abs().max() > 0 for gradient in gradients.values())
    for name, batches in ways.items():
        sums, found = carried_out(local_model, batches)
        for field in ("loss", "mtp_loss", "dropped"):
            torch.testing.assert_close(getattr(sums, field), getattr(expected, field), rtol=1e-11, atol=1e-12, msg=name)
        torch.testing.assert_close(torch.stack(sums.balance), torch.stack(expected.balance), rtol=1e-11, atol=1e-13)
        assert torch.equal(sums.counts_ME, expected.counts_ME), name
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-9, atol=1e-12, msg=f"{name} {parameter}")


def test_a_step_knows_its_real_tokens_without_reading(tmp_path: Path) -> None:
    for kind in ("bin_packed", "padded"):
        run = run_of(tmp_path, kind)
        samples, data = opened(run), step_of(run)
        real = sum(len(samples.sample(i).tokens) - 1 for i in range(BATCH))
        assert data.tokens == real < BATCH * S
        for batch in data.batches:
            assert batch.step_labels == batch.step_tokens == real
            assert batch.step_sequences == BATCH
        counted = sum(int((batch.labels_S != IGNORED).sum()) for batch in data.batches)
        assert {batch.step_labels_ahead for batch in data.batches} == {(labels_ahead(data.batches),)}
        held = sum(batch.num_tokens if batch.real_S is None else int(batch.real_S.sum()) for batch in data.batches)
        assert counted == held == real


def test_microbatches_stay_within_their_room(tmp_path: Path) -> None:
    for micro_batch in (1, 2, 5):
        for batch in step_of(run_of(tmp_path, "bin_packed", micro_batch=micro_batch)).batches:
            assert batch.num_tokens == sum(batch.lengths) <= micro_batch * S
            assert max(batch.lengths) <= S


LAYOUTS = [
    (2, ParallelConfig()),
    (4, ParallelConfig()),
    (4, ParallelConfig(cp=2)),
    (4, ParallelConfig(tp=2)),
    (8, ParallelConfig(cp=2, pp=2)),
    (4, ParallelConfig(cp=1, dynamic_cp=True)),
    (8, ParallelConfig(cp=2, dynamic_cp=True)),
]


@pytest.mark.parametrize("kind", ["bin_packed", "padded", "concat"])
@pytest.mark.parametrize("world,parallel", LAYOUTS)
def test_a_step_sees_the_same_documents_on_any_layout(
    tmp_path: Path, kind: str, world: int, parallel: ParallelConfig
) -> None:
    """Every token, label and MTP label of the step is on exactly one rank of each stage (and of each tp group)."""
    if parallel.dynamic_cp and kind != "bin_packed":
        pytest.skip("only packed documents are sorted by length")
    run = run_of(tmp_path, kind, parallel)
    layout = fold(parallel, world)
    speaking = [rank for rank in range(world) if layout.coordinate(rank, "tp") == layout.coordinate(rank, "pp") == 0]
    steps = [on_rank(run, rank, world, first=BATCH) for rank in range(world)]
    assert len({len(step.batches) for step in steps}) == 1
    assert {step.tokens for step in steps} == {step_of(run_of(tmp_path, kind), BATCH).tokens}
    found = sorted(row for rank in speaking for batch in steps[rank].batches for row in rows(batch))
    assert found == sorted(row for batch in step_of(run_of(tmp_path, kind), BATCH).batches for row in rows(batch))
    for rank in range(world):
        # Ranks that differ only along tp or pp have the same microbatches.
        same = steps[layout.ranks("tp", rank)[0] % (world // parallel.pp)]
        assert [rows(a) for a in steps[rank].batches] == [rows(b) for b in same.batches]
        assert all(batch.context_size in layout.context_sizes(parallel.dynamic_cp) for batch in steps[rank].batches)


def rows(batch: Batch) -> list[tuple[int, ...]]:
    real = torch.ones_like(batch.tokens_S) if batch.real_S is None else batch.real_S
    columns = [batch.tokens_S, batch.labels_S, batch.positions_S, real]
    columns += [x for ahead in batch.ahead for x in (ahead.tokens_S, ahead.labels_S)]
    return [tuple(row) for row in torch.stack(columns, 1).tolist()]


def test_the_union_of_ids_does_not_depend_on_the_world(tmp_path: Path) -> None:
    run = run_of(tmp_path, "bin_packed")
    samples = opened(run)
    sizes = [samples.length(i) for i in range(BATCH)]
    for world in (1, 2, 3, 4):
        plan = plan_for(run, sizes, fold(run.parallel, world))
        shares = [[i for wave in plan.waves for i in wave.documents[rank]] for rank in range(world)]
        assert sorted(i for local_model in shares for i in local_model) == list(range(BATCH))
        for rank, local_model in enumerate(shares):
            ids = "\n".join(samples.sample(i).id for i in local_model)
            assert on_rank(run, rank, world).ids == hashlib.sha256(ids.encode()).hexdigest()


def test_more_ranks_than_documents_run_empty_microbatches(tmp_path: Path) -> None:
    run = run_of(tmp_path, "bin_packed", global_batch=3)
    steps = [on_rank(run, rank, 8) for rank in range(8)]
    assert {len(step.batches) for step in steps} == {1}
    empty = [step.batches[0] for step in steps if not step.batches[0].num_tokens]
    assert len(empty) >= 5 and all(batch.lengths == () for batch in empty)
    # An empty microbatch still has a forward and a backward: other ranks wait for it in every layer.
    local_model = build_local_model(run, alone(run), CPU, proof_init)
    sums, gradients = carried_out(local_model, [empty[0]])
    assert sums.loss == 0 and not sums.counts_ME.any()
    assert all(not gradient.any() for gradient in gradients.values())


def test_documents_of_a_window_are_kept_apart(tmp_path: Path) -> None:
    run = run_of(tmp_path, "concat_masked")
    samples = opened(run)
    (first, *_), tokens = step_of(run).batches, step_of(run).tokens
    read = [samples.sample(i) for i in range(2)]
    assert tokens == BATCH * S
    assert first.lengths == tuple(n for sample in read for n in document_lengths(sample.document_starts, S))
    ends = np.cumsum(first.lengths) - 1
    inside = [int(end) for end in ends if (end + 1) % S]
    assert inside and all(first.labels_S[end] == IGNORED for end in inside)
    counted = sum(int((batch.labels_S != IGNORED).sum()) for batch in step_of(run).batches)
    assert first.step_labels == counted < tokens == first.step_tokens
    assert first.step_labels_ahead == (labels_ahead(step_of(run).batches),) < (counted,)
    assert first.step_sequences == sum(len(batch.lengths) for batch in step_of(run).batches) > BATCH
    # Otherwise it is the window that was always read.
    joined = step_of(run_of(tmp_path, "concat")).batches[0]
    assert torch.equal(joined.tokens_S, first.tokens_S) and joined.lengths == (S, S)
    kept = first.labels_S != IGNORED
    assert torch.equal(joined.labels_S[kept], first.labels_S[kept])
