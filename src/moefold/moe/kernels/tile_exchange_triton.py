"""GEMMs that wait for their input, or send their output, tile by tile (MegaScale-MoE, section 4.2).

A chunk of tokens is exchanged whole before the next kernel starts (``parallel.overlap``). Here one kernel is in
progress while its input arrives or its output leaves. Ranks of a host map each other's memory (`comm/peer_memory.py`):

    all-gather + GEMM       copy engines bring rows of other ranks; a tile waits for the rank that its rows come from
    all-to-all + GEMM       the same for columns: a tile adds up its sum source by source, in the order of arrival
    GEMM + all-to-all       a tile of columns is stored in the memory of the rank that has these heads
    GEMM + reduce-scatter   a tile of rows is stored with the rank that they belong to, which sums the ranks' parts

The first two need no SM for what arrives. Whoever writes raises a counter after it, at system scope; whoever reads
waits for the counter first. Tiles are swizzled: rank r begins with its own part where it reads, and with that of rank
r + 1 where it writes, so that no two ranks use the same link first. Sums of ranks are float32 and in the order of
ranks, so a result does not depend on who was first.

The reference is the exchange and ``torch.nn.functional.linear``. Interpreted on CPUs between processes that share
memory, and compiled; never run on a GPU, and no layer of a model calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefold.comm.peer_memory import PeerMemory
from moefold.ops.kernels.aot_specs import Build, refuse_wide
from moefold.ops.kernels.attention_triton import matmul

# Rows, columns, what is multiplied at a time; for 16-bit inputs.
BLOCK_S, BLOCK_N, BLOCK_K = 128, 128, 64
BLOCK_SUM = 1024


# ---- shared with experts' GEMMs ----


@triton.jit
def wait_for(counter, wanted):
    """What was written before this counter was raised can be read afterwards."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="sys") < wanted:
        pass


@triton.jit
def signal(counters_W, rank, index):
    """Of the rank whose address this is. All threads of the program have stored before one raises the counter."""
    tl.debug_barrier()
    counter = tl.load(counters_W + rank).to(tl.pointer_type(tl.int32)) + index
    tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def multiply_rows(
    acc, x, row, inside, x_row, weight, column, columns, weight_row, weight_column, K,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """acc + x W^T, of some rows of x and some rows of W."""
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * x_row + k[None, :]
    weight_at = weight + column[None, :].to(tl.int64) * weight_row + k[:, None] * weight_column
    for first in range(0, K, BLOCK_K):
        there = first + k < K
        x_SK = tl.load(x_at, mask=inside[:, None] & there[None, :], other=0.0)
        weight_KN = tl.load(weight_at, mask=there[:, None] & (column < columns)[None, :], other=0.0)
        acc += matmul(x_SK, weight_KN, PRECISION, UPCAST)
        x_at += BLOCK_K
        weight_at += BLOCK_K * weight_column
    return acc


# ---- kernels ----


@triton.jit
def rows_matmul_kernel(
    x_SK, weight_NK, y_SN, first_W, arrived_W, wanted, rank, num_ranks, tiles_each, N, K, weight_row, weight_column,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows [first_W[r], first_W[r + 1]) come from rank r."""
    source = (rank + tl.program_id(1) // tiles_each) % num_ranks
    row = tl.load(first_W + source) + tl.program_id(1) % tiles_each * BLOCK_S + tl.arange(0, BLOCK_S)
    inside, row = row < tl.load(first_W + source + 1), row.to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for(arrived_W + source, wanted)
    acc = multiply_rows(
        tl.zeros((BLOCK_S, BLOCK_N), tl.float32), x_SK, row, inside, K, weight_NK, column, N, weight_row,
        weight_column, K, BLOCK_K, PRECISION, UPCAST,
    )  # fmt: skip
    place = y_SN + row[:, None] * N + column[None, :]
    tl.store(place, acc.to(y_SN.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def columns_matmul_kernel(
    x_SK, weight_NK, y_SN, first_W, arrived_W, wanted, rank, num_ranks, num_rows, N, weight_row, weight_column,
    ALIGNED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Columns [first_W[r], first_W[r + 1]) of all rows come from rank r and lie together, rank after rank. ``ALIGNED``:
    every rank has a multiple of 16, so that the compiler may load 16 bytes at a time."""
    row = tl.program_id(1).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < num_rows
    acc = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
    for step in range(num_ranks):
        source = (rank + step) % num_ranks
        first = tl.load(first_W + source)
        size = tl.load(first_W + source + 1) - first
        if ALIGNED:
            first, size = tl.multiple_of(first, 16), tl.multiple_of(size, 16)
        wait_for(arrived_W + source, wanted)
        acc = multiply_rows(
            acc, x_SK + first.to(tl.int64) * num_rows, row, inside, size, weight_NK + first * weight_column, column, N,
            weight_row, weight_column, size, BLOCK_K, PRECISION, UPCAST,
        )  # fmt: skip
    place = y_SN + row[:, None] * N + column[None, :]
    tl.store(place, acc.to(y_SN.dtype.element_ty), mask=inside[:, None] & (column < N)[None, :])


@triton.jit
def matmul_to_ranks_kernel(
    x_SK, weight_NK, sent_type, buffers_W, counters_W, first_W, rank, num_ranks, tiles_each, own_row, num_rows, N, K,
    weight_row, weight_column, BY_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rank r gets rows [first_W[r], first_W[r + 1]), in the ``rank``-th of its parts; or, not ``BY_ROWS``, these
    columns of all rows, in its rows from ``own_row`` on. Every program raises the counter, so it is known how many
    will."""
    destination = (rank + 1 + tl.program_id(1) // tiles_each) % num_ranks
    first, end = tl.load(first_W + destination), tl.load(first_W + destination + 1)
    row = tl.program_id(1) % tiles_each * BLOCK_S + tl.arange(0, BLOCK_S)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if BY_ROWS:
        there, row_there, row = rank.to(tl.int64) * (end - first) + row, N, first + row
        inside, column_there, columns = row < end, column, N
    else:
        there, row_there, inside = own_row + row.to(tl.int64), end - first, row < num_rows
        column_there, column, columns = column, first + column, end
    acc = multiply_rows(
        tl.zeros((BLOCK_S, BLOCK_N), tl.float32), x_SK, row.to(tl.int64), inside, K, weight_NK, column, columns,
        weight_row, weight_column, K, BLOCK_K, PRECISION, UPCAST,
    )  # fmt: skip
    buffer = tl.load(buffers_W + destination).to(tl.pointer_type(sent_type.dtype.element_ty))
    place = buffer + there[:, None] * row_there + column_there[None, :]
    tl.store(place, acc.to(sent_type.dtype.element_ty), mask=inside[:, None] & (column < columns)[None, :])
    signal(counters_W, destination, rank)


@triton.jit
def sum_parts_kernel(parts_Wn, sum_n, arrived_W, wanted, num_ranks, size, BLOCK: tl.constexpr):
    """Of every rank's part, in the order of ranks, in float32."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    acc = tl.zeros((BLOCK,), tl.float32)
    for source in range(num_ranks):
        wait_for(arrived_W + source, wanted)
        acc += tl.load(parts_Wn + tl.cast(source, tl.int64) * size + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(sum_n + place, acc.to(sum_n.dtype.element_ty), mask=inside)


@triton.jit
def wait_kernel(arrived_W, wanted, num_ranks):
    """One program: kernels after it on its stream find what all ranks have sent."""
    for source in range(num_ranks):
        wait_for(arrived_W + source, wanted)


# ---- launches ----


def gather_matmul(memory: PeerMemory, x_tK: Tensor, sizes: Sequence[int], weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of all ranks, of which rank r has ``sizes[r]``, times W^T. Returns [S, N], and the rows [S, K] where they
    arrived: valid until the next exchange but one."""
    refuse_wide("gather and GEMM", x_tK, weight_NK)
    first, dim = memory.starts(sizes), x_tK.shape[1]
    gathered_SK = memory.gather_rows(x_tK, sizes)
    y_SN = x_tK.new_empty(sum(sizes), len(weight_NK))
    tiles = triton.cdiv(max(sizes), BLOCK_S)
    rows_matmul_kernel[triton.cdiv(len(weight_NK), BLOCK_N), memory.size * tiles](
        gathered_SK, weight_NK, y_SN, first, memory.arrived_W, memory.use, memory.rank, memory.size, tiles,
        len(weight_NK), dim, *weight_NK.stride(), **_constants(x_tK),
    )  # fmt: skip
    return y_SN, gathered_SK


def columns_matmul(
    memory: PeerMemory, x_Sk: Tensor, rows: Sequence[int], columns: Sequence[int], weight_NK: Tensor
) -> Tensor:
    """Rank r has ``columns[r]`` columns of all rows, and gets all columns of its ``rows[r]`` rows, times W^T."""
    refuse_wide("all-to-all and GEMM", x_Sk, weight_NK)
    num_rows = rows[memory.rank]
    arriving_tK = memory.gather_columns(x_Sk, rows, columns)
    y_tN = x_Sk.new_empty(num_rows, len(weight_NK))
    columns_matmul_kernel[triton.cdiv(len(weight_NK), BLOCK_N), max(triton.cdiv(num_rows, BLOCK_S), 1)](
        arriving_tK, weight_NK, y_tN, memory.starts(columns), memory.arrived_W, memory.use, memory.rank, memory.size,
        num_rows, len(weight_NK), *weight_NK.stride(), ALIGNED=not any(size % 16 for size in columns),
        **_constants(x_Sk),
    )  # fmt: skip
    return y_tN


def matmul_scatter(
    memory: PeerMemory, x_SK: Tensor, sizes: Sequence[int], weight_NK: Tensor, sent: torch.dtype = torch.float32
) -> Tensor:
    """x W^T of every rank, summed over the ranks: [t, N], this rank's ``sizes[rank]`` rows."""
    refuse_wide("GEMM and reduce-scatter", x_SK, weight_NK)
    columns = len(weight_NK)
    parts = memory.next_parts((memory.size, sizes[memory.rank], columns), sent)
    programs = _send(memory, x_SK, weight_NK, sizes, columns, sent, own_row=0, by_rows=True)
    return sum_arrived(memory, parts, x_SK.new_empty(sizes[memory.rank], columns), programs)


def matmul_to_columns(
    memory: PeerMemory, x_tK: Tensor, rows: Sequence[int], columns: Sequence[int], weight_NK: Tensor
) -> Tensor:
    """x W^T of this rank's ``rows[rank]`` rows: rank r gets ``columns[r]`` of its columns. Returns [S, n], this rank's
    columns of all rows, valid until the next exchange but one."""
    refuse_wide("GEMM and all-to-all", x_tK, weight_NK)
    received_Sn = memory.next_parts((sum(rows), columns[memory.rank]), x_tK.dtype)
    own_row, most = sum(rows[: memory.rank]), max(rows)
    programs = _send(memory, x_tK, weight_NK, columns, max(columns), x_tK.dtype, own_row, by_rows=False, most=most)
    wait_kernel[(1,)](memory.counters, programs, memory.size)
    memory.lower_counters()
    return received_Sn


def sum_arrived(memory: PeerMemory, parts: Tensor, y: Tensor, programs: int) -> Tensor:
    """Into y, when ``programs`` of every rank have stored what they have for this rank."""
    if y.numel():
        sum_parts_kernel[(triton.cdiv(y.numel(), BLOCK_SUM),)](
            parts, y, memory.counters, programs, memory.size, y.numel(), BLOCK=BLOCK_SUM
        )
    else:
        # Peers raise the counters of a rank without rows as well. Lowered before that, they would be found raised in
        # the next exchange but one, which would then read what has not arrived.
        wait_kernel[(1,)](memory.counters, programs, memory.size)
    memory.lower_counters()
    return y


def _send(
    memory: PeerMemory, x: Tensor, weight_NK: Tensor, sizes: Sequence[int], columns: int, sent: torch.dtype,
    own_row: int, by_rows: bool, most: int = 0,
) -> int:  # fmt: skip
    """Returns how many programs every rank has for each of the others. ``most``: rows of any rank, if not ``sizes``."""
    tiles = triton.cdiv(max(sizes) if by_rows else most, BLOCK_S)
    grid = triton.cdiv(columns, BLOCK_N), memory.size * tiles
    matmul_to_ranks_kernel[grid](
        x, weight_NK, x.new_empty(0, dtype=sent), memory.buffers_W, memory.counters_W, memory.starts(sizes),
        memory.rank, memory.size, tiles, own_row, len(x), len(weight_NK), x.shape[1], *weight_NK.stride(),
        BY_ROWS=by_rows, **_constants(x),
    )  # fmt: skip
    return grid[0] * tiles


def _constants(x: Tensor) -> dict[str, object]:
    wide = x.dtype == torch.float32
    return {
        "BLOCK_S": BLOCK_S, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K // 2 if wide else BLOCK_K,
        "PRECISION": "ieee" if wide else "tf32", "UPCAST": x.device.type == "cpu", "num_warps": 8, "num_stages": 3,
    }  # fmt: skip


# ---- builds ----

_BLOCKS = {"BLOCK_S": BLOCK_S, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "PRECISION": "tf32", "UPCAST": False}
_WEIGHT = {"weight_NK": "*bf16", "N": "i32:16", "weight_row": "i32:16"}
_RANKS = {"first_W": "*i32", "rank": "i32", "num_ranks": "i32"}
_ARRIVING = {"x_SK": "*bf16", "y_SN": "*bf16", "arrived_W": "*i32", "wanted": "i32"}
_TO_RANKS = {
    "x_SK": "*bf16", "buffers_W": "*i64", "counters_W": "*i64", "tiles_each": "i32", "own_row": "i32",
    "num_rows": "i32", "K": "i32:16",
}  # fmt: skip


def _builds() -> tuple[Build, ...]:
    """No size of a model is compiled in. A weight's columns are adjacent in the forward, its rows in the backward."""
    forward, backward = {"weight_column": 1}, {"weight_row": 1}
    rows = _ARRIVING | _WEIGHT | _RANKS | {"tiles_each": "i32", "K": "i32:16"}
    columns = _ARRIVING | _WEIGHT | _RANKS | {"num_rows": "i32"}
    parts = {
        "parts_Wn": "*fp32",
        "sum_n": "*bf16",
        "arrived_W": "*i32",
        "wanted": "i32",
        "num_ranks": "i32",
        "size": "i32:16",
    }

    def build(job: str, kernel: object, signature: dict[str, str], constants: Mapping[str, object]) -> Build:
        signature = {name: kind for name, kind in signature.items() if name not in constants}
        return Build(f"{job}, any model", kernel, signature, {**_BLOCKS, **constants}, num_warps=8)

    return (
        build("all-gather and GEMM", rows_matmul_kernel, rows, forward),
        build("all-gather and GEMM, backward", rows_matmul_kernel, rows | {"weight_column": "i32:16"}, backward),
        build("all-to-all and GEMM", columns_matmul_kernel, columns, forward | {"ALIGNED": True}),
        build("GEMM and reduce-scatter", matmul_to_ranks_kernel, _TO_RANKS | _WEIGHT | _RANKS | {"sent_type": "*fp32"},
              forward | {"BY_ROWS": True}),
        build("GEMM and all-to-all", matmul_to_ranks_kernel, _TO_RANKS | _WEIGHT | _RANKS | {"sent_type": "*bf16"},
              forward | {"BY_ROWS": False}),
        Build("sum of ranks' parts, any model", sum_parts_kernel, parts, {"BLOCK": BLOCK_SUM}),
    )  # fmt: skip


BUILDS = _builds()
