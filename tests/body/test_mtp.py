"""An MTP module combines the hidden state with later tokens, at the depth it predicts and no further."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.body.model_inputs import batch_of, fill
from torch import Tensor

from moefold.blueprint.parameters import mtp_parameters
from moefold.config.attention import MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig, RouterConfig
from moefold.model.block import BlockOutput
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.mtp import MTPModule
from moefold.nn.phase import Stream

WIDTH, SEQUENCES, SEQ_LEN = 32, 2, 7
MODEL = ModelConfig(dim=WIDTH, num_layers=1, dense_hidden_dim=48)
MODELS = {
    "gqa": MODEL,
    "mla": replace(
        MODEL, attention=MLAConfig(), moe=MoEConfig(shared_hidden_dim=24, router=RouterConfig(expert_bias=True))
    ),
    "dense": replace(MODEL, moe=None),
}


def _module(model: ModelConfig) -> MTPModule:
    ahead = build_decoder(replace(model, num_mtp=1), torch.float64, local_interfaces()).double().mtp["0"]
    assert isinstance(ahead, MTPModule)
    fill(ahead)
    return ahead


def _inputs(seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, token = torch.randn(2, SEQUENCES * SEQ_LEN, WIDTH, dtype=torch.float64, generator=generator)
    return x.requires_grad_(), token.requires_grad_()


def _written_out(module: MTPModule, x_TD: Tensor, token_TD: Tensor) -> Tensor:
    """What the block is given, with one matrix per half instead of one for both."""
    of_token_DD, of_stream_DD = module.join.weight.split(WIDTH, dim=1)
    token_TD = F.rms_norm(token_TD, (WIDTH,), module.token_norm.weight, module.token_norm.eps)
    x_TD = F.rms_norm(x_TD, (WIDTH,), module.hidden_norm.weight, module.hidden_norm.eps)
    return token_TD @ of_token_DD.T + x_TD @ of_stream_DD.T


def _gradients(module: MTPModule, inputs: tuple[Tensor, Tensor], out_TD: Tensor) -> dict[str, Tensor]:
    leaves = {**dict(module.named_parameters()), "stream": inputs[0], "token": inputs[1]}
    return dict(zip(leaves, torch.autograd.grad(out_TD.square().sum(), list(leaves.values()))))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_equals_the_definition_written_out(model: ModelConfig) -> None:
    module, batch, inputs = _module(model), batch_of(SEQUENCES, SEQ_LEN, 11), _inputs()
    got = module(*inputs, batch)
    want = module.block(_written_out(module, *inputs), batch)
    assert module.is_moe is (got.report is not None) is (model.moe is not None)
    torch.testing.assert_close(got.x_tD, want.x_tD, rtol=1e-12, atol=1e-12)
    expected = _gradients(module, inputs, want.x_tD)
    for name, found in _gradients(module, inputs, got.x_tD).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-10, msg=name)
        assert found.abs().max() > 0, name


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_names_and_shapes_are_the_blueprints(model: ModelConfig) -> None:
    found = {f"mtp.0.{name}": tuple(value.shape) for name, value in _module(model).named_parameters()}
    assert found == {spec.name: spec.shape for spec in mtp_parameters(replace(model, num_mtp=1), 0)}


def test_two_modules_take_turns_phase_by_phase() -> None:
    module = _module(MODELS["mla"])
    batches = [batch_of(SEQUENCES, SEQ_LEN, 11, seed=seed) for seed in (1, 2)]
    inputs = [_inputs(seed) for seed in (1, 2)]
    lists = [module.phases(lambda token=token: token, batch) for (_, token), batch in zip(inputs, batches)]
    assert (lists[0][0].name, lists[0][0].stream) == ("join", Stream.COMPUTE)
    assert [p.name for p in lists[0][1:]] == [p.name for p in module.block.phases(batches[0])]
    carries: list[object] = [x for x, _ in inputs]
    for phases in zip(*lists):
        carries = [phase.run(carry) for phase, carry in zip(phases, carries)]
    for carry, pair, batch in zip(carries, inputs, batches):
        assert isinstance(carry, BlockOutput)
        want = module(*pair, batch).x_tD
        assert torch.equal(carry.x_tD, want)
        expected = _gradients(module, pair, want)
        assert all(torch.equal(g, expected[name]) for name, g in _gradients(module, pair, carry.x_tD).items())


@pytest.mark.parametrize("what", ["stream", "token"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_place_sees_a_later_one_or_another_document(model: ModelConfig, what: str) -> None:
    """Routing drops nothing here, so experts do not couple tokens; attention must be causal."""
    module, batch = _module(model), batch_of(SEQUENCES, SEQ_LEN, 11)
    pair = dict(zip(("stream", "token"), _inputs()))
    before = module(pair["stream"], pair["token"], batch).x_tD.view(SEQUENCES, SEQ_LEN, WIDTH)
    changed = pair[what].detach().clone()
    changed[4] += 1
    pair[what] = changed
    after = module(pair["stream"], pair["token"], batch).x_tD.view(SEQUENCES, SEQ_LEN, WIDTH)
    moved = (before - after).abs().amax(-1) > 1e-9  # sums over an expert's rows may round differently
    assert moved.tolist() == [[False] * 4 + [True] * 3, [False] * 7]


def test_tokens_can_be_joined_share_by_share() -> None:
    """Under tensor parallelism each rank joins its own; gradients of what is repeated add up to the whole's."""
    module, batch, (x, token) = _module(MODEL), batch_of(SEQUENCES, SEQ_LEN, 11), _inputs()
    repeated = [module.token_norm.weight, module.hidden_norm.weight, module.join.weight]

    def joined(part: slice) -> Tensor:
        out: Tensor = module.phases(lambda: token[part], batch)[0].run(x[part])
        return out

    whole, parts = joined(slice(None)), [joined(slice(0, 5)), joined(slice(5, None))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(whole.square().sum(), repeated)
    by_part = [torch.autograd.grad(part.square().sum(), repeated) for part in parts]
    for want, *found in zip(expected, *by_part):
        torch.testing.assert_close(sum(found), want, rtol=1e-10, atol=1e-10)
