"""AdamW with states of any format: torch's update to the bit in float32, and the same on any layout and place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn, optim

from moefold.optim import chunked_adamw
from moefold.optim.chunked_adamw import ChunkedAdamW, StateFormat
from moefold.optim.state_staging import StatesOn

SHAPE, STEPS, LR, DECAY = (37, 129), 6, 0.01, 0.1
Box = tuple[slice, ...]
WHOLE: tuple[Box, ...] = ((slice(0, 37), slice(0, 129)),)
NARROW = [
    StateFormat("bfloat16"),
    StateFormat("bfloat16", stochastic=True),
    StateFormat("float8"),
    StateFormat("float8", stochastic=True),
]


@dataclass(frozen=True)
class Shard:
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SomePiece:
    name: str
    kind: str
    parameter: nn.Parameter
    shard: Shard
    boxes: tuple[Box, ...]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_adamw, "CHUNK", 1 << 10)


def normal(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def cut(values: Tensor, boxes: Sequence[Box]) -> Tensor:
    return values[boxes[0]].contiguous() if len(boxes) == 1 else torch.cat([values[box].flatten() for box in boxes])


def optimizer_over(
    parameter: nn.Parameter,
    format: StateFormat,
    boxes: tuple[Box, ...] = WHOLE,
    fused: bool = True,
    beta2: float = 0.95,
) -> ChunkedAdamW:
    piece = SomePiece("layers.0.matrix", "matrix", parameter, Shard(SHAPE), boxes)
    groups: list[dict[str, object]] = [{"params": [parameter], "weight_decay": DECAY}]
    device = torch.device("cpu")
    return ChunkedAdamW(
        groups, [piece], format, lr=LR, betas=(0.9, beta2), eps=1e-8, fused=fused, seed=5, device=device
    )


def trained(
    format: StateFormat, boxes: tuple[Box, ...] = WHOLE, fused: bool = True, steps: int = STEPS
) -> tuple[nn.Parameter, ChunkedAdamW]:
    parameter = nn.Parameter(cut(normal(0), boxes))
    optimizer = optimizer_over(parameter, format, boxes, fused)
    for step in range(1, steps + 1):
        parameter.grad = cut(normal(step), boxes)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("on", ["device", "host", "cpu"])
def test_in_float32_it_is_torchs_to_the_bit(fused: bool, on: StatesOn) -> None:
    ours, optimizer = trained(StateFormat(on=on), fused=fused)
    theirs = nn.Parameter(normal(0))
    torchs = optim.AdamW([theirs], LR, (0.9, 0.95), 1e-8, DECAY, fused=fused, foreach=False)
    for step in range(1, STEPS + 1):
        theirs.grad = normal(step)
        torchs.step()
    assert torch.equal(ours, theirs)
    saved = optimizer.saved_state(ours)
    for kind, value in torchs.state[theirs].items():
        assert torch.equal(saved[kind], value), kind


@pytest.mark.parametrize("format", NARROW, ids=str)
@pytest.mark.parametrize("on", ["host", "cpu"])
def test_where_states_are_changes_nothing(format: StateFormat, on: StatesOn) -> None:
    there = StateFormat(format.moments, format.stochastic, on=on)
    assert torch.equal(trained(there)[0], trained(format)[0])


PARTS: tuple[tuple[Box, ...], ...] = (
    ((slice(0, 8), slice(0, 129)),),
    ((slice(0, 37), slice(0, 43)),),
    ((slice(2, 3), slice(100, 129)), (slice(3, 9), slice(0, 129)), (slice(9, 10), slice(0, 7))),
)


@pytest.mark.parametrize("boxes", PARTS, ids=["rows", "columns", "flat"])
def test_a_part_is_rounded_as_the_whole(boxes: tuple[Box, ...]) -> None:
    """Random bits depend on the global element: bfloat16 is equal on any layout, to the bit."""
    for stochastic in (False, True):
        format = StateFormat("bfloat16", stochastic)
        whole, part = trained(format)[0], trained(format, boxes)[0]
        assert torch.equal(part, cut(whole.detach(), boxes))


def test_float8_has_the_same_blocks_in_a_contiguous_part() -> None:
    """Blocks are those of the global tensor; only the first and last block of a part have fewer elements."""
    format = StateFormat("float8", stochastic=True)
    boxes = ((slice(2, 3), slice(100, 129)), (slice(3, 20), slice(0, 129)))
    whole, part = trained(format)[0].detach(), trained(format, boxes)[0].detach()
    first, last = 2 * 129 + 100, 20 * 129
    inner = slice(-first % 128, (last - first) // 128 * 128 - 128)
    assert torch.equal(part[inner], cut(whole, boxes)[inner])


@pytest.mark.parametrize("format", [StateFormat(), *NARROW], ids=str)
@pytest.mark.parametrize("boxes", [WHOLE, PARTS[2]], ids=["whole", "flat"])
def test_a_resumed_run_is_equal_to_the_bit(format: StateFormat, boxes: tuple[Box, ...]) -> None:
    parameter, optimizer = trained(format, boxes, steps=3)
    saved = optimizer.saved_state(parameter)
    assert {kind: value.dtype for kind, value in saved.items()} == {
        kind: spec.dtype for kind, spec in optimizer.saved_kinds(parameter).items()
    }
    resumed = nn.Parameter(parameter.detach().clone())
    again = optimizer_over(resumed, format, boxes)
    again.load_saved(resumed, saved)
    for step in range(4, STEPS + 1):
        resumed.grad = cut(normal(step), boxes)
        again.step()
    assert torch.equal(resumed, trained(format, boxes)[0])


@pytest.mark.parametrize("on", ["device", "host", "cpu"])
@pytest.mark.parametrize("format", ["float32", "bfloat16", "float8"])
def test_main_weights_in_two_halves_are_those_in_float32(on: StatesOn, format: str) -> None:
    """Weights in bfloat16 with a remainder follow float32 weights to the bit, from the same gradients."""
    wide = trained(StateFormat(format, format != "float32"))[0]
    weight = nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32  # type: ignore[attr-defined]
    optimizer = optimizer_over(weight, StateFormat(format, format != "float32", remainder=True, on=on))
    optimizer.set_main_weight(weight, normal(0))
    for step in range(1, STEPS + 1):
        weight.grad = normal(step)
        optimizer.step()
    assert torch.equal(optimizer.main_weight(weight), wide)
    assert float((weight.detach().float() / wide.detach() - 1).abs().max()) <= 2**-8


def test_a_rank_without_elements_has_nothing_to_update() -> None:
    boxes = ((slice(37, 37), slice(0, 129)),)
    for format in (StateFormat(), *NARROW):
        parameter, optimizer = trained(format, boxes, steps=2)
        assert parameter.numel() == 0 and float(optimizer.saved_state(parameter)["step"]) == 2
