"""Rows that travel to experts in narrow formats: every dispatcher delivers what one process computes with, bit for bit,
and the ledger has its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from tests.marks import slow_except
from tests.support import multiplied, on_ranks
from torch import Tensor

import moefold
from moefold.comm import collectives
from moefold.comm.process_groups import Groups
from moefold.config.data import DataConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import NamedDispatcher
from moefold.config.precision import PrecisionConfig
from moefold.config.precision_recipes import DISPATCH_CASTS
from moefold.config.run import RunConfig
from moefold.moe.dispatch import all_to_all
from moefold.moe.dispatch.base import SYNC_SPLIT_SIZES, Dispatcher, LocalDispatcher, Routing, RowCodecs, row_codecs
from moefold.parallel.dispatchers import DISPATCHERS
from moefold.precision.quantize import Quantized, dequantize
from moefold.precision.row_messages import NarrowRowCodec

EXPERTS, TOP_K, DIM = 8, 2, 80  # two blocks of 32, and a half
TOKENS_OF_RANK = (5, 1, 0, 7)


def run_of(name: str | None) -> RunConfig:
    """Packed documents: ranks do not know how many tokens the others have."""
    return RunConfig(
        model=ModelConfig(moe=MoEConfig(num_experts=EXPERTS, top_k=TOP_K), dim=DIM),
        data=DataConfig(packing="bin_packed"),
        precision=PrecisionConfig(dispatch=name),  # type: ignore[arg-type]
    )


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    total = sum(TOKENS_OF_RANK)
    x, target = torch.randn(2, total, DIM, dtype=torch.float64, generator=generator)
    # Of many magnitudes: block sizes show only where small values lie beside large ones.
    x, target = (values * 10 ** (-8 * torch.rand(DIM, generator=generator)) for values in (x, target))
    experts = torch.rand(total, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    return x, experts, torch.rand(total, TOP_K, dtype=torch.float64, generator=generator), target


def step(dispatcher: Dispatcher, x: Tensor, routing: Routing, target: Tensor, first: int, scale: float) -> Any:
    """Output, rows that experts got, and gradients of tokens and of expert outputs; expert e multiplies by e + 1."""
    x = x.clone().requires_grad_()
    arrived = dispatcher.dispatch(x, routing)
    numbers = torch.arange(len(arrived.rows_per_expert_e), dtype=x.dtype) + first + 1
    expert_out = multiplied(arrived, numbers * scale)
    expert_out.retain_grad()
    y = dispatcher.combine(expert_out, arrived.ticket)
    (y * target).sum().backward()
    return y, arrived.rows_RL.detach(), x.grad, expert_out.grad


def are_among(rows: Tensor, known: Tensor) -> bool:
    """Each of the rows, bit for bit; rows of zeros are padding."""
    same = (rows[:, None] == known[None]).all(-1).any(1)
    return bool((same | (rows == 0).all(1)).all())


def narrow_rows_arrive(groups: Groups, kind: NamedDispatcher, name: str) -> None:
    """Against plain arithmetic on all tokens: y = x' * (sum of prob * (e + 1)), and its gradients."""
    x, experts, probs, target = inputs()
    codecs = [NarrowRowCodec(cast) for cast in (DISPATCH_CASTS[name].forward, DISPATCH_CASTS[name].backward)]
    x_rounded, target_rounded = codecs[0].round(x), codecs[1].round(target)
    factor = ((experts + 1) * probs).sum(1, keepdim=True)
    start = sum(TOKENS_OF_RANK[: groups.rank])
    mine = slice(start, start + TOKENS_OF_RANK[groups.rank])
    run, etp = run_of(name), groups["etp"]
    dispatcher = DISPATCHERS[kind](run, groups, SYNC_SPLIT_SIZES)
    first = groups["ep"].index * (EXPERTS // groups["ep"].size)
    # The parts of a split expert differ, as weight slices do, and add up to one.
    scale = (etp.index + 1) * 2 / (etp.size * (etp.size + 1))
    y, rows, grad, grad_out = step(dispatcher, x[mine], Routing(experts[mine], probs[mine]), target[mine], first, scale)
    assert are_among(rows, x_rounded) and are_among(grad_out, target_rounded)
    torch.testing.assert_close(y, (x_rounded * factor)[mine], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, (target_rounded * factor)[mine], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", get_args(NamedDispatcher))
@pytest.mark.parametrize(("ep", "etp"), slow_except([(4, 1), (2, 2), (1, 4)], (2, 2)))
@pytest.mark.parametrize("name", slow_except(list(DISPATCH_CASTS), "mxfp8"))
def test_experts_get_rows_of_the_cast(kind: NamedDispatcher, ep: int, etp: int, name: str) -> None:
    inner = 2 if kind == "two_level" and ep > 1 else 1
    on_ranks(lambda groups: narrow_rows_arrive(groups, kind, name), 4, ep=ep, etp=etp, ep_inner=inner)


@pytest.mark.parametrize("name", DISPATCH_CASTS)
def test_one_process_narrows_the_same_rows(name: str) -> None:
    x, experts, probs, target = inputs()
    dispatcher = LocalDispatcher(EXPERTS, codecs=row_codecs(run_of(name)))
    y, rows, grad, grad_out = step(dispatcher, x, Routing(experts, probs), target, 0, 1.0)
    casts = DISPATCH_CASTS[name]
    factor = ((experts + 1) * probs).sum(1, keepdim=True)
    assert torch.equal(rows, NarrowRowCodec(casts.forward).round(x)) and not torch.equal(rows, x)
    assert torch.equal(grad_out, NarrowRowCodec(casts.backward).round(target))
    torch.testing.assert_close(y, rows * factor, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, grad_out * factor, rtol=1e-12, atol=1e-12)


class NoScales(NarrowRowCodec):
    """The receiver takes 1 for all scales."""

    def unpack(self, packed_NB: Tensor, like: Tensor) -> Tensor:
        codes = packed_NB[:, : like.shape[-1]].clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn)
        ones = torch.full((len(codes), -(-DIM // 32)), 127, dtype=torch.uint8)
        return dequantize(Quantized(codes, ones, None, self.cast)).to(like.dtype)


class SwappedScales(NarrowRowCodec):
    def unpack(self, packed_NB: Tensor, like: Tensor) -> Tensor:
        scales = packed_NB[:, like.shape[-1] :].roll(1, 1)
        return super().unpack(torch.cat([packed_NB[:, : like.shape[-1]], scales], 1), like)


class Wide(NarrowRowCodec):
    """The cast is left out."""

    def pack(self, rows_ND: Tensor) -> Tensor:
        return rows_ND.contiguous().view(torch.uint8)

    def unpack(self, packed_NB: Tensor, like: Tensor) -> Tensor:
        return packed_NB.view(like.dtype)


def both(make: Callable[..., NarrowRowCodec]) -> Callable[[RunConfig], RowCodecs]:
    casts = DISPATCH_CASTS["mxfp8"]
    return lambda run: RowCodecs(make(casts.forward), make(casts.backward))


MUTANTS: dict[str, Callable[[RunConfig], RowCodecs]] = {
    "scales are not sent": both(NoScales),
    "scales of another block": both(SwappedScales),
    "the cast is left out": both(Wide),
    "tokens are not narrowed": lambda run: row_codecs(run)._replace(forward=None),
    "gradients are not narrowed": lambda run: row_codecs(run)._replace(backward=None),
    "blocks of 16": both(lambda cast: NarrowRowCodec(replace(cast, block=(1, 16)))),
    "scales rounded down": both(lambda cast: NarrowRowCodec(replace(cast, scale="e8m0_floor"))),
    "e5m2": both(lambda cast: NarrowRowCodec(replace(cast, element="e5m2"))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_to_all, "row_codecs", MUTANTS[mutant])

    def work(groups: Groups) -> bool:
        try:
            narrow_rows_arrive(groups, "all_to_all", "mxfp8")
        except AssertionError:
            return True
        return TOKENS_OF_RANK[groups.rank] == 0

    assert any(on_ranks(work, 4, ep=4)[:2])


def test_narrowing_the_way_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of tokens, and expert outputs, are sums to come: they stay as they are."""
    plain = collectives._all_to_all
    codec = row_codecs(run_of("mxfp8")).forward

    def narrowed(rows: Tensor, send: Any, recv: Any, group: Any, own: Any = None) -> Tensor:
        return plain(rows, send, recv, group, codec if rows.shape[-1] == DIM else own)

    monkeypatch.setattr(collectives, "_all_to_all", narrowed)
    with pytest.raises(Exception, match="not close"):
        on_ranks(lambda groups: narrow_rows_arrive(groups, "all_to_all", "mxfp8"), 4, ep=4)


def test_the_ledger_has_half_of_the_bytes() -> None:
    """Of everything that dispatch sends, counts, probs and scales included, in bfloat16 with rows of 1,024."""
    dim, tokens = 1024, 32

    def sent(groups: Groups, name: str | None) -> tuple[int, int]:
        run = replace(run_of(name), model=ModelConfig(moe=MoEConfig(num_experts=EXPERTS, top_k=TOP_K), dim=dim))
        dispatcher, ledger = DISPATCHERS["all_to_all"](run, groups, SYNC_SPLIT_SIZES), groups["ep"].ledger
        x = torch.randn(tokens, dim).bfloat16().requires_grad_()
        experts = torch.arange(tokens * TOP_K).view(tokens, TOP_K) % EXPERTS
        found = []
        before = ledger.of("all_to_all", "ep").bytes_sent
        arrived = dispatcher.dispatch(x, Routing(experts, torch.ones(tokens, TOP_K)))
        found.append(ledger.of("all_to_all", "ep").bytes_sent - before)
        y = dispatcher.combine(arrived.rows_RL.detach().requires_grad_(), arrived.ticket)
        before = ledger.of("all_to_all", "ep").bytes_sent
        y.sum().backward()
        found.append(ledger.of("all_to_all", "ep").bytes_sent - before)
        return found[0], found[1]

    (forward, backward), *_ = on_ranks(lambda groups: sent(groups, None), 2, ep=2)
    assert backward == tokens * TOP_K * dim * 2
    for name in DISPATCH_CASTS:
        for narrow_forward, narrow_backward in on_ranks(lambda groups, name=name: sent(groups, name), 2, ep=2):
            assert narrow_forward <= 0.52 * forward and narrow_backward <= 0.52 * backward
            assert narrow_backward == tokens * TOP_K * (dim + dim // 32)


def test_an_engine_is_refused() -> None:
    changes = {"parallel.dispatcher": "deepep", "precision.dispatch": "mxfp8", "precision.compute": "bfloat16"}
    found = moefold.check(moefold.load_run("debug_small", changes))
    assert "precision.dispatch" in [problem.path for problem in found]
