"""Parts of a stage: when a parameter is first read, and when its gradient is complete.

The oracle is the model itself: a parameter that is NaN until the part that is said to be the first to read it may not
show, and a gradient that is noted when that part has been left may not change any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.body.model_inputs import fill
from torch import Tensor

from moefold.blueprint.stage_modules import first_part, part_names, parts_of
from moefold.blueprint.stages import StageSpec, stages_of
from moefold.config.attention import MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder, DecoderOutput, HiddenState
from moefold.nn.batch import Batch, whole_batch
from moefold.nn.phase_autograd import NO_HOOKS, PartHooks

MODEL = ModelConfig(vocab_size=50, dim=32, num_layers=3, num_dense_layers=1, dense_hidden_dim=48)
MODELS = {
    "moe": MODEL,
    "tied, two modules ahead": replace(MODEL, tied_embeddings=True, num_mtp=2),
    "one module ahead, latent attention": replace(
        MODEL, num_mtp=1, attention=MLAConfig(), moe=MoEConfig(shared_hidden_dim=24)
    ),
    "dense": replace(MODEL, moe=None),
}
# As one stage, and cut so that modules ahead are without the embedding's stage and the loss.
STAGES = (ParallelConfig(), ParallelConfig(pp=3, stages=None))


def cases() -> list[tuple[str, StageSpec]]:
    found = []
    for name, model in MODELS.items():
        found += [(name, stage) for parallel in STAGES for stage in stages_of(model, parallel)]
        if model.num_mtp:
            ahead = tuple(range(model.num_mtp))
            found += [
                (name, StageSpec(1, False, range(2, 3), ahead, False)),
                (name, StageSpec(1, False, range(0), ahead, True)),
            ]
    return found


def decoder_of(model: ModelConfig) -> Decoder:
    decoder = build_decoder(model, torch.float64, local_interfaces("sequential")).double()
    fill(decoder)
    return decoder


def batch_for(model: ModelConfig) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(model.vocab_size, (2, 18), generator=generator)
    return whole_batch(
        tokens,
        labels,
        (9, 9),
        num_ahead=model.num_mtp,
        step_labels=18,
        step_tokens=18,
        step_labels_ahead=(18,) * model.num_mtp,
        step_sequences=2,
    )


def held(decoder: Decoder, model: ModelConfig, stage: StageSpec) -> dict[str, Tensor]:
    parts = parts_of((stage,), model)
    return {name: p for name, p in decoder.named_parameters() if parts.holds(name)}


def hidden_of(model: ModelConfig, stage: StageSpec, tokens: int) -> HiddenState | None:
    """What a stage gets from the one before it."""
    if stage.embedding:
        return None
    ahead = stage.mtp[0] if stage.mtp else model.num_mtp * (not stage.layers)
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(1 + ahead, tokens, model.dim, dtype=torch.float64, generator=generator)
    first, *rest = (state.requires_grad_() for state in states.unbind())
    return HiddenState(first, tuple(rest))


def run(decoder: Decoder, model: ModelConfig, stage: StageSpec, hooks: PartHooks) -> Tensor:
    """A number that all outputs of the stage enter."""
    batch = batch_for(model)
    output: DecoderOutput = decoder(batch, None, stage, hidden_of(model, stage, 18), hooks)
    if output.hidden is None:
        assert output.loss_sum is not None
        return output.loss_sum + sum(output.ahead_loss_sums, start=torch.zeros(()))
    x_tD, ahead_tD = output.hidden
    return x_tD.square().sum() + sum((y_tD.square().sum() for y_tD in ahead_tD), start=torch.zeros(()))


@pytest.mark.parametrize(("name", "stage"), cases(), ids=str)
def test_no_parameter_is_read_before_its_first_part(name: str, stage: StageSpec) -> None:
    model = MODELS[name]
    decoder = decoder_of(model)
    expected = run(decoder, model, stage, NO_HOOKS).detach()
    parameters = held(decoder, model, stage)
    right = {name: p.detach().clone() for name, p in parameters.items()}
    entered: list[int] = []

    @torch.no_grad()
    def enter(part: int) -> None:
        entered.append(part)
        for name, p in parameters.items():
            if first_part(name, stage) == part:
                p.copy_(right[name])

    with torch.no_grad():
        for p in decoder.parameters():
            p.fill_(float("nan"))
    found = run(decoder, model, stage, PartHooks(enter)).detach()
    assert torch.equal(found, expected)
    assert entered == list(range(len(part_names(stage))))


@pytest.mark.parametrize(("name", "stage"), cases(), ids=str)
def test_gradients_are_complete_when_their_first_part_is_left(name: str, stage: StageSpec) -> None:
    model = MODELS[name]
    decoder = decoder_of(model)
    parameters = held(decoder, model, stage)
    noted: dict[str, Tensor] = {}
    left: list[int] = []

    def leave(part: int) -> None:
        left.append(part)
        for name, p in parameters.items():
            if first_part(name, stage) == part:
                assert p.grad is not None, name
                noted[name] = p.grad.clone()

    run(decoder, model, stage, PartHooks(None, leave)).backward()
    first = 1 if stage.embedding else 0
    assert left == list(reversed(range(first, len(part_names(stage)))))
    assert {name for name in parameters if first_part(name, stage) >= first} == set(noted)
    for name, grad in noted.items():
        found = parameters[name].grad
        assert found is not None and torch.equal(found, grad), name


@pytest.mark.parametrize("name", MODELS)
def test_phases_that_are_taken_apart_begin_the_same_parts(name: str) -> None:
    model = MODELS[name]
    decoder, batch = decoder_of(model), batch_for(model)
    phases = decoder.phases(batch, None, decoder.whole)
    parts = [phase.part for phase in phases if phase.part is not None]
    assert parts == list(range(len(part_names(decoder.whole)))) and len(phases) > len(parts)


def test_hooks_change_no_bit() -> None:
    model = MODELS["tied, two modules ahead"]
    nothing: Callable[[int], None] = lambda part: None  # noqa: E731
    found = []
    for hooks in (NO_HOOKS, PartHooks(nothing, nothing)):
        decoder = decoder_of(model)
        run(decoder, model, decoder.whole, hooks).backward()
        found.append({name: p.grad for name, p in decoder.named_parameters()})
    for name, grad in found[0].items():
        other = found[1][name]
        assert grad is not None and other is not None and torch.equal(grad, other), name
