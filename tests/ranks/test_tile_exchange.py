"""GEMMs in progress while their input arrives or their output leaves, interpreted on ranks that share memory: as the
exchange and a GEMM after each other. Processes that run at once find out who does not wait."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.marks import slow_except
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

from moefold.comm.p2p import ThreadCommStream
from moefold.comm.peer_memory import PeerBuffer, PeerMemory, counter_bytes
from moefold.comm.spawn import spawn_ranks
from moefold.config.precision_recipes import PRECISION_RECIPES
from moefold.errors import ExchangeError
from moefold.moe.kernels import tile_exchange_triton as tiles
from moefold.moe.kernels import tile_experts_triton as experts
from moefold.ops.activations import weighted_activation
from moefold.ops.kernels.interpret import interpreting
from moefold.precision.quantize import quantize

BYTES = 1 << 16
# Sums are float32 in both, and rounded once; torch's reference of experts' sums rounds more often.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = tuple(TOLERANCE)


class Case(NamedTuple):
    """Unequal shards, some of them empty; dims that fill no block and that fill several."""

    seed: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    out: int
    dtype: torch.dtype = torch.float32

    @property
    def size(self) -> int:
        return len(self.rows)


def draw(seed: int) -> Case:
    dice = random.Random(seed)
    size = dice.choice((2, 3, 4))
    rows = tuple(dice.choice((0, 1, 5, 16, 21)) for _ in range(size))
    rows = rows if sum(rows) else (3,) * size
    return Case(
        seed,
        rows,
        tuple(dice.choice((1, 7, 16, 24)) for _ in range(size)),
        dice.choice((1, 15, 16, 40)),
        dice.choice(DTYPES),
    )


def shared_buffers(size: int) -> list[list[Tensor]]:
    """Two of every rank, made before ranks are forked."""
    num_bytes = BYTES + counter_bytes(size)
    return [[torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(size)] for _ in range(2)]


def peer_memory(rank: int, shared: list[list[Tensor]]) -> PeerMemory:
    first, second = (PeerBuffer(of_rank, dist.barrier) for of_rank in shared)
    return PeerMemory(rank, (first, second), ThreadCommStream())


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, block in {"BLOCK_S": 16, "BLOCK_N": 16, "BLOCK_K": 32, "BLOCK_SUM": 64}.items():
        monkeypatch.setattr(tiles, name, block)


def drawn(case: Case | ExpertCase, *shape: int, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * case.seed + seed)).to(case.dtype)


def gathered(memory: PeerMemory, case: Case) -> tuple[Tensor, Tensor]:
    x_SK, weight = drawn(case, sum(case.rows), sum(case.columns)), drawn(case, case.out, sum(case.columns), seed=1)
    y, arrived = tiles.gather_matmul(memory, x_SK.split(case.rows)[memory.rank], case.rows, weight)
    assert torch.equal(arrived, x_SK)
    return y, x_SK @ weight.t()


def gathered_transposed(memory: PeerMemory, case: Case) -> tuple[Tensor, Tensor]:
    """As for gradients of inputs."""
    x_SK, weight = drawn(case, sum(case.rows), case.out), drawn(case, case.out, sum(case.columns), seed=1)
    return tiles.gather_matmul(memory, x_SK.split(case.rows)[memory.rank], case.rows, weight.t())[0], x_SK @ weight


def columns_gathered(memory: PeerMemory, case: Case) -> tuple[Tensor, Tensor]:
    x_SK, weight = drawn(case, sum(case.rows), sum(case.columns)), drawn(case, case.out, sum(case.columns), seed=1)
    x_Sk = x_SK.split(case.columns, 1)[memory.rank]
    wanted = x_SK.split(case.rows)[memory.rank] @ weight.t()
    return tiles.columns_matmul(memory, x_Sk, case.rows, case.columns, weight), wanted


def scattered(memory: PeerMemory, case: Case, sent: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Every rank has an x and a weight of its own."""
    x = [drawn(case, sum(case.rows), case.columns[rank], seed=2 * rank) for rank in range(case.size)]
    weight = [drawn(case, case.out, case.columns[rank], seed=2 * rank + 1) for rank in range(case.size)]
    wanted = sum((a.float() @ b.float().t()).to(sent).float() for a, b in zip(x, weight, strict=True))
    y = tiles.matmul_scatter(memory, x[memory.rank], case.rows, weight[memory.rank], sent)
    return y, wanted.split(case.rows)[memory.rank]


def columns_scattered(memory: PeerMemory, case: Case) -> tuple[Tensor, Tensor]:
    x_SK, weight = drawn(case, sum(case.rows), case.out), drawn(case, sum(case.columns), case.out, seed=1)
    x_tK = x_SK.split(case.rows)[memory.rank]
    wanted = (x_SK @ weight.t()).split(case.columns, 1)[memory.rank]
    return tiles.matmul_to_columns(memory, x_tK, case.rows, case.columns, weight).clone(), wanted


EXCHANGES: tuple[Callable[[PeerMemory, Case], tuple[Tensor, Tensor]], ...] = (
    gathered, gathered_transposed, columns_gathered, scattered, partial(scattered, sent=torch.bfloat16),
    columns_scattered,
)  # fmt: skip


def errors(rank: int, case: Case, shared: list[list[Tensor]]) -> list[float]:
    """Each exchange three times in a row, so that buffers are used again."""
    memory, found = peer_memory(rank, shared), []
    with interpreting():
        for exchange in EXCHANGES * 3:
            ours, wanted = exchange(memory, case)
            found.append(off(ours, wanted))
    return found


@pytest.mark.parametrize("seed", slow_except(range(50), 0, 1, 2))
def test_as_an_exchange_and_a_gemm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    case = draw(seed)
    for rank, found in enumerate(spawn_ranks(partial(errors, case=case, shared=shared_buffers(case.size)), case.size)):
        assert max(found) < TOLERANCE[case.dtype], (rank, case, found)


# ---- experts ----


class ExpertCase(NamedTuple):
    """Experts without rows, dropped assignments (expert -1), more rows than a tile has, a bound above what is there."""

    seed: int
    rows: tuple[int, ...]
    local: int
    top_k: int
    dim: int
    hidden: int
    activation: str
    spare: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return len(self.rows)


def draw_experts(seed: int) -> ExpertCase:
    dice = random.Random(seed)
    size, local = dice.choice((1, 2, 3)), dice.choice((1, 2, 5))
    rows = tuple(dice.choice((0, 3, 16, 25)) for _ in range(size))
    return ExpertCase(
        seed, rows if sum(rows) else (7,) * size, local, dice.randint(1, min(3, local * size)),
        dice.choice((8, 24, 40)), dice.choice((8, 32, 40)), dice.choice(("swiglu", "clamped_swiglu")),
        dice.choice((0, 9)), dice.choice(DTYPES),
    )  # fmt: skip


def assignments(case: ExpertCase) -> Tensor:
    """[S, K] of all experts; some are dropped."""
    generator = torch.Generator().manual_seed(case.seed)
    scores = torch.rand(sum(case.rows), case.local * case.size, generator=generator)
    expert_SK = scores.argsort(1)[:, : case.top_k]
    return expert_SK.where(torch.rand(expert_SK.shape, generator=generator) < 0.9, -1)


def expert_outputs(case: ExpertCase, rank: int) -> tuple[Tensor, Tensor]:
    """Of one rank's experts, in plain torch: their hidden activations by assignment, and sums by token."""
    x_SL, expert_SK = drawn(case, sum(case.rows), case.dim, seed=1), assignments(case)
    prob_SK = drawn(case, *expert_SK.shape, seed=2).float()
    gate_up, down = expert_weights(case, rank)
    hidden_SKF = torch.zeros(*expert_SK.shape, case.hidden, dtype=case.dtype)
    y_SL = torch.zeros(sum(case.rows), case.dim)
    for expert in range(case.local):
        token, k = (expert_SK == rank * case.local + expert).nonzero(as_tuple=True)
        hidden = weighted_activation(x_SL[token] @ gate_up[expert].t(), prob_SK[token, k], case.activation)
        hidden_SKF[token, k] = hidden
        y_SL.index_add_(0, token, hidden.float() @ down[expert].float().t())
    return hidden_SKF, y_SL


def expert_weights(case: ExpertCase, rank: int) -> tuple[Tensor, Tensor]:
    gate_up = drawn(case, case.local, 2 * case.hidden, case.dim, seed=3 + 2 * rank)
    return gate_up, drawn(case, case.local, case.dim, case.hidden, seed=4 + 2 * rank)


def expert_errors(rank: int, case: ExpertCase, shared: list[list[Tensor]]) -> list[float]:
    memory, found, expert_SK = peer_memory(rank, shared), [], assignments(case)
    x_SL, prob_SK = drawn(case, sum(case.rows), case.dim, seed=1), drawn(case, *expert_SK.shape, seed=2)
    (gate_up, down), first = expert_weights(case, rank), rank * case.local
    num_rows = int(((expert_SK >= first) & (expert_SK < first + case.local)).sum())
    hidden_SKF, _ = expert_outputs(case, rank)
    y_SL = sum(expert_outputs(case, peer)[1] for peer in range(case.size))
    bound = max(1, min(num_rows + case.spare, expert_SK.numel()))
    with interpreting():
        for _ in range(3):
            rows = experts.sort_rows(expert_SK, case.rows, rank, (first, case.local), bound)
            assert int((rows.token_P >= 0).sum()) == num_rows == int(rows.rows_per_expert_e.sum())
            prob_P = prob_SK.flatten()[rows.place_P]
            made = experts.gather_experts(
                memory, x_SL.split(case.rows)[rank], case.rows, rows, prob_P, gate_up, case.activation
            )
            wanted_PF = hidden_SKF.flatten(0, 1)[rows.place_P][:num_rows]
            found.append(off(made.hidden_PF[:num_rows], wanted_PF))
            assert made.gate_up_PG is not None
            again_PF = weighted_activation(made.gate_up_PG[:num_rows], prob_P[:num_rows], case.activation)
            found.append(off(made.hidden_PF[:num_rows], again_PF))
            y_tL, _ = experts.experts_scatter(memory, made.hidden_PF, case.rows, rows, case.top_k, down)
            found.append(off(y_tL, y_SL.split(case.rows)[rank]))
    return found


def off(x: Tensor, wanted: Tensor) -> float:
    """The largest error, relative to the largest value."""
    assert x.shape == wanted.shape
    return float((x.float() - wanted.float()).abs().max() / wanted.abs().max().clamp(min=1e-3)) if x.numel() else 0.0


def small_expert_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    blocks = {"BLOCK_P": 16, "BLOCK_N": 16, "BLOCK_K": 32, "BLOCK_F": 32, "BLOCK_L": 16, "SENDERS": 3}
    for name, block in blocks.items():
        monkeypatch.setattr(experts, name, block)


@pytest.mark.parametrize("seed", slow_except(range(50), 0, 1, 2))
def test_experts_as_an_exchange_and_sequential_experts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_expert_blocks(monkeypatch)
    case = draw_experts(seed)
    work = partial(expert_errors, case=case, shared=shared_buffers(case.size))
    for rank, found in enumerate(spawn_ranks(work, case.size)):
        assert max(found) < TOLERANCE[case.dtype], (rank, case, found)


def narrowed(rank: int, case: ExpertCase, shared: list[list[Tensor]]) -> bool:
    memory, expert_SK = peer_memory(rank, shared), assignments(case)
    cast = PRECISION_RECIPES["mxfp8"].casts.x_fprop
    with interpreting():
        rows = experts.sort_rows(expert_SK, case.rows, rank, (rank * case.local, case.local), expert_SK.numel())
        x_tL = drawn(case, sum(case.rows), case.dim, seed=1).split(case.rows)[rank]
        gate_up, _ = expert_weights(case, rank)
        made = experts.gather_experts(memory, x_tL, case.rows, rows, None, gate_up, keep_gate_up=False, cast=cast)
    assert made.narrow is not None and made.gate_up_PG is None and cast is not None
    num_rows = int(rows.rows_per_expert_e.sum())
    wanted = quantize(made.hidden_PF[:num_rows], cast)
    return all(
        torch.equal(ours[:num_rows].view(torch.uint8), theirs.view(torch.uint8))
        for ours, theirs in ((made.narrow.codes_MK, wanted.codes_MK), (made.narrow.scale_rc, wanted.scale_rc))
    )


@pytest.mark.parametrize("seed", slow_except(range(12), 0))
def test_the_epilogue_narrows_to_the_bits_of_the_cast(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_expert_blocks(monkeypatch)
    case = draw_experts(seed)
    assert all(spawn_ranks(partial(narrowed, case=case, shared=shared_buffers(case.size)), case.size))


# ---- what waiting is for ----


class SlowStream(ThreadCommStream):
    """Copies that begin long after they were asked for."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def submit(self, work: Callable[[], object]) -> Future[object]:  # type: ignore[override]
        def late() -> object:
            time.sleep(self.seconds)
            return work()

        return super().submit(late)


def late_error(rank: int, case: Case, shared: list[list[Tensor]], waits: bool) -> float:
    memory = peer_memory(rank, shared)
    memory.stream = SlowStream(0.5 if waits else 5.0)
    if not waits:
        # Its last exchange is one that has not been.
        memory.arrived_W.fill_(1)
    with interpreting():
        x_SK, weight = drawn(case, sum(case.rows), sum(case.columns)), drawn(case, case.out, sum(case.columns), seed=1)
        y, _ = tiles.gather_matmul(memory, x_SK.split(case.rows)[rank], case.rows, weight)
    return off(y, x_SK @ weight.t())


@pytest.mark.parametrize("waits", [True, False])
def test_tiles_wait_for_rows_that_are_late(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without waiting they would be wrong, so that this is a test."""
    small_blocks(monkeypatch)
    case = Case(1, (16, 21), (16, 8), 16)
    for found in spawn_ranks(partial(late_error, case=case, shared=shared_buffers(2), waits=waits), 2):
        assert (found < 1e-5) == waits, found


def late_memory(rank: int, shared: list[list[Tensor]]) -> PeerMemory:
    """Rank 0 begins an exchange long after the others."""

    def barrier() -> None:
        dist.barrier()
        time.sleep(0.4 if rank == 0 else 0)

    first, second = (PeerBuffer(of_rank, barrier) for of_rank in shared)
    return PeerMemory(rank, (first, second), ThreadCommStream())


def scattered_experts(memory: PeerMemory, case: ExpertCase) -> tuple[Tensor, Tensor]:
    expert_SK, (_, down) = assignments(case), expert_weights(case, memory.rank)
    hidden_SKF, _ = expert_outputs(case, memory.rank)
    span = (memory.rank * case.local, case.local)
    rows = experts.sort_rows(expert_SK, case.rows, memory.rank, span, expert_SK.numel())
    hidden_PF = hidden_SKF.flatten(0, 1)[rows.place_P]
    y_SL = sum(expert_outputs(case, peer)[1] for peer in range(case.size))
    y_tL, _ = experts.experts_scatter(memory, hidden_PF, case.rows, rows, case.top_k, down)
    return y_tL, y_SL.split(case.rows)[memory.rank]


def after_an_exchange_without_rows(
    rank: int, scatter: Callable[[PeerMemory, Case], object], cases: Sequence[Case], shared: list[list[Tensor]]
) -> float:
    """Rank 1 has no rows in the first exchange; in the third, in the same buffer, it must wait for those of rank 0."""
    memory = late_memory(rank, shared)
    with interpreting():
        scatter(memory, cases[0])
        memory.next_parts((1, 1), torch.float32)
        return off(*scatter(memory, cases[1]))


WITHOUT_ROWS = {
    "gemm": (scattered, [Case(1, rows, (16, 8), 16) for rows in ((16, 0), (0, 16))]),
    "experts": (
        scattered_experts,
        [ExpertCase(1, rows, 2, 2, 24, 32, "swiglu", 0, torch.float32) for rows in ((16, 0), (0, 16))],
    ),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_a_rank_without_rows_waits_until_its_counters_are_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered before that, they were found raised two exchanges later, and sums were made of what was there before."""
    small_expert_blocks(monkeypatch)
    scatter, cases = WITHOUT_ROWS[name]
    work = partial(after_an_exchange_without_rows, scatter=scatter, cases=cases, shared=shared_buffers(2))
    assert max(spawn_ranks(work, 2)) < 1e-5


def test_a_buffer_that_is_too_small_is_refused() -> None:
    buffer = PeerBuffer([torch.zeros(64 + counter_bytes(1), dtype=torch.uint8)], lambda: None)
    memory = PeerMemory(0, (buffer, buffer), ThreadCommStream())
    with pytest.raises(ExchangeError, match="64 bytes, and this exchange needs 128"):
        memory.next_parts((4, 8), torch.float32)
