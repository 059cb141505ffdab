"""Newton-Schulz against torch's singular value decomposition, and Muon against torch's own.

The oracle of an orthogonalised matrix is the polar factor U V^T from `torch.linalg.svd`. A published set of
coefficients leaves singular values in a band, which follows from its polynomial alone: it is computed from that here.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moefold.blueprint.muon_matrices import Matrices, MuonParameter, newton_schulz_flops, spans_of
from moefold.comm.process_groups import Groups, Ledger
from moefold.config.optim import MuonConfig, NewtonSchulzCoefficients
from moefold.config.parallel import ParallelConfig
from moefold.optim.muon import Muon
from moefold.optim.newton_schulz import COEFFICIENTS, orthogonalise
from moefold.optim.state_staging import Staging
from moefold.parallel.param_shards import ParamShard, TrainedPiece
from moefold.topology.folded_layout import fold

# Singular values after five iterations, of those that were at least 0.003 of the norm.
BANDS: dict[NewtonSchulzCoefficients, tuple[float, float]] = {
    "quintic": (0.68, 1.21),
    "you": (0.97, 1.15),
    "polar_express": (0.86, 1.13),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def polar_factor(matrices: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (1, 8)])
@pytest.mark.parametrize("name", BANDS)
def test_singular_vectors_stay_and_values_are_in_the_band(
    name: NewtonSchulzCoefficients, shape: tuple[int, int]
) -> None:
    g = random(3, *shape)
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    got = u.mT @ orthogonalise(g, 5, name) @ vh.mT
    values = got.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(got, torch.diag_embed(values), rtol=0, atol=1e-9)
    want = s / s.square().sum(-1, keepdim=True).sqrt() / COEFFICIENTS[name].norm_factor
    for iteration in range(5):
        a, b, c = COEFFICIENTS[name].triples[min(iteration, len(COEFFICIENTS[name].triples) - 1)]
        want = a * want + b * want**3 + c * want**5
    torch.testing.assert_close(values, want, rtol=1e-7, atol=1e-9)
    arrived = values[s > 0.003 * s.square().sum(-1, keepdim=True).sqrt()]
    low, high = BANDS[name]
    assert arrived.min() > low and arrived.max() < high


def test_more_iterations_end_at_the_polar_factor() -> None:
    g = random(2, 12, 20)
    torch.testing.assert_close(orthogonalise(g, 12, "polar_express"), polar_factor(g), rtol=0, atol=1e-9)


def test_zeros_stay_zeros_and_a_batch_changes_no_bit() -> None:
    assert not orthogonalise(torch.zeros(2, 3, 4), 5).any()
    batch = random(7, 20, 12, dtype=torch.float32)
    together = orthogonalise(batch, 5)
    for number in range(7):
        assert torch.equal(orthogonalise(batch[number : number + 1], 5)[0], together[number])


def test_flops_are_torchs_count() -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalise(random(3, 20, 12), 5)
    assert counter.get_total_flops() == 3 * newton_schulz_flops(20, 12, 5)


def muon_of(weights: list[nn.Parameter], config: MuonConfig, lr: float, decay: float) -> Muon:
    stage = Groups(fold(ParallelConfig(), 1), 0, Ledger(), timedelta(seconds=5))["stage"]
    shards = [ParamShard(f"w{i}", "matrix", *_whole(weight)) for i, weight in enumerate(weights)]
    pieces = [TrainedPiece(weight, shard, (shard.box,)) for weight, shard in zip(weights, shards)]
    layouts = [MuonParameter(Matrices(shard.name, spans_of(shard.box)), ((spans_of(shard.box),),)) for shard in shards]
    groups: list[dict[str, object]] = [{"params": weights, "weight_decay": decay, "lr_scale": 1.0}]
    return Muon(groups, pieces, layouts, stage, config, lr, Staging("device", torch.device("cpu")), weights[0].dtype)


def _whole(weight: nn.Parameter) -> tuple[Any, ...]:
    """Shape, box before and after sharding, no groups, the only pipeline rank."""
    box = tuple(slice(0, size) for size in weight.shape)
    return tuple(weight.shape), box, box, (), (), (0,), True


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(nesterov: bool) -> None:
    """torch iterates in bfloat16, and so do we here; five iterations amplify its rounding to a few percent."""
    mine, theirs = ([nn.Parameter(random(r, c, dtype=torch.float32)) for r, c in ((24, 40), (48, 16))] for _ in "ab")
    ours = muon_of(mine, MuonConfig(nesterov=nesterov, compute="bfloat16"), 0.05, 0.1)
    torchs = torch.optim.Muon(
        theirs, lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        before = [weight.detach().clone() for weight in theirs]
        for number, (a, b) in enumerate(zip(mine, theirs)):
            a.data.copy_(b.data)
            a.grad = random(*a.shape, seed=10 * step + number, dtype=torch.float32)
            b.grad = a.grad.clone()
        ours.step()
        torchs.step()
        for a, b, start in zip(mine, theirs, before):
            assert (a - b).norm() < 0.08 * (b - start).norm()


def test_three_steps_by_hand() -> None:
    """Moonlight's equation in float64, with the polar factor itself: enough iterations of the exact polynomial."""
    weight = nn.Parameter(random(6, 10))
    want, momentum, lr, decay, mu = weight.detach().clone(), torch.zeros(6, 10, dtype=torch.float64), 0.3, 0.2, 0.9
    ours = muon_of([weight], MuonConfig(momentum=mu, iterations=14, coefficients="polar_express"), lr, decay)
    for step in range(3):
        gradient = random(6, 10, seed=step + 1)
        weight.grad = gradient.clone()
        ours.step()
        momentum = mu * momentum + gradient
        update = polar_factor(mu * momentum + gradient) * 0.2 * 10**0.5
        want = want - lr * (update + decay * want)
        torch.testing.assert_close(weight.detach(), want, rtol=0, atol=1e-9)
    assert set(ours.state[weight]) == {"momentum"}


def test_the_updates_root_mean_square_is_adamws() -> None:
    """About 0.2 for any shape (Moonlight, section 2.2)."""
    for rows, columns in ((64, 64), (32, 128), (160, 40)):
        weight = nn.Parameter(torch.zeros(rows, columns))
        ours = muon_of([weight], MuonConfig(), 1.0, 0.0)
        weight.grad = random(rows, columns, dtype=torch.float32)
        ours.step()
        assert 0.15 < float(weight.detach().square().mean().sqrt()) < 0.25
