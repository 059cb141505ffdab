"""Models on one process that a person can call: a whole language model on token ids, and one MoE layer on a tensor.

Inside, the model's own modules run: the same code that every rank of a parallel run executes, with process groups of
one rank.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.api.runs import load_run
from moefold.blueprint.parameters import buffers, init_std, parameters
from moefold.checks.kernels import experts_in_use
from moefold.checks.run_all import problems
from moefold.config.loading import override
from moefold.config.model import ModelConfig
from moefold.config.moe import MoEConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, DataError
from moefold.model.build import build_moe_layer, local_interfaces
from moefold.model.decoder import Decoder
from moefold.model.mtp import loss_scales
from moefold.moe import layer as moe_layer
from moefold.moe.dispatch.base import Routing
from moefold.moe.load_balancing import RoutingReport
from moefold.moe.routing_policies import PolicyOrName, policy_maker
from moefold.nn.batch import IGNORED, Batch, whole_batch
from moefold.nn.init import init_values
from moefold.parallel.parallelize import build_local_model, groups_of


class ModelOutput(NamedTuple):
    """`logits` [.., V]. With labels: `loss`, the mean cross entropy per label, and `aux_loss`, the balance losses and
    the weighted loss of MTP modules, which training adds to it."""

    logits: Tensor
    loss: Tensor | None = None
    aux_loss: Tensor | None = None


class LanguageModel(nn.Module):
    """A decoder that takes token ids; made by `build_model`. `decoder` is the model that training uses.

    The output has `logits` and, with labels, `loss` and `aux_loss`.

    >>> import torch, moefold
    >>> model = moefold.build_model(moefold.load_run("debug_tiny"))
    >>> isinstance(model, moefold.LanguageModel), model(torch.tensor([[3, 1, 4, 1, 5]])).logits.shape
    (True, torch.Size([1, 5, 256]))
    """

    def __init__(self, run: RunConfig, decoder: Decoder) -> None:
        super().__init__()
        self.run = run
        self.decoder = decoder

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """`tokens` [batch, seq] or [seq]: each sequence is one document. `labels` of the same shape are the tokens to
        predict at each position, usually the next ones; -100 is not counted."""
        batch = self._batch(tokens, labels)
        decoder, whole = self.decoder, self.decoder.whole
        shape = (*tokens.shape, decoder.head_weight.shape[0])
        before_loss = replace(whole, mtp=whole.mtp if labels is not None else (), loss=False)
        hidden = decoder(batch, None, before_loss)
        assert hidden.hidden is not None and decoder.final_norm is not None
        x_TD = decoder.final_norm(hidden.hidden.x_tD)
        logits = (x_TD @ decoder.head_weight.to(x_TD.dtype).T).view(shape)
        if labels is None:
            return ModelOutput(logits)
        only_loss = replace(whole, embedding=False, layers=range(0), mtp=(), loss=True)
        losses = decoder(batch, None, only_loss, hidden.hidden)
        aux_loss = logits.new_zeros(())
        for _, report in hidden.reports:
            aux_loss = aux_loss + torch.stack(list(report.losses)).sum()
        for scale, loss_sum in zip(loss_scales(self.run.model, batch), losses.ahead_loss_sums, strict=False):
            aux_loss = aux_loss + scale * loss_sum
        return ModelOutput(logits, losses.loss_sum / max(batch.step_labels, 1), aux_loss)

    def _batch(self, tokens: Tensor, labels: Tensor | None) -> Batch:
        if labels is not None and labels.shape != tokens.shape:
            raise ValueError(f"labels have the shape {tuple(labels.shape)}, but tokens {tuple(tokens.shape)}")
        flat = tokens.reshape(-1)
        labels = torch.full_like(flat, IGNORED) if labels is None else labels.reshape(-1)
        for name, ids in (("tokens", flat), ("labels", labels[labels != IGNORED])):
            vocab_size = self.run.model.vocab_size
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                raise DataError(
                    f"{name}: from {ids.min()} to {ids.max()}, but the vocabulary has {vocab_size:,} tokens"
                )
        lengths = _lengths(tokens.shape)
        num_mtp = self.run.model.num_mtp
        starts = range(0, len(flat), max(tokens.shape[-1], 1))
        ahead = [
            sum(int((labels[start + by : start + tokens.shape[-1]] != IGNORED).sum()) for start in starts)
            for by in range(1, num_mtp + 1)
        ]
        return whole_batch(
            flat,
            labels,
            lengths,
            step_labels=int((labels != IGNORED).sum()),
            step_tokens=len(flat),
            step_sequences=len(lengths),
            num_ahead=num_mtp,
            step_labels_ahead=tuple(ahead),
        )


def build_model(
    run: RunConfig | str | Path,
    *,
    device: str | torch.device = "cpu",
    routing_policy: PolicyOrName | None = None,
) -> LanguageModel:
    """The run's model on one process, with the weights that training starts from; the run's layout is ignored.

    A name or a path is loaded first.
    `routing_policy` replaces the one that the run names: the name of one that moefold has, an object with the method
    `select` for all layers, or a class or function that makes one from a layer's `MoEConfig`.

    >>> import torch, moefold
    >>> model = moefold.build_model(moefold.load_run("debug_tiny"))
    >>> tokens = torch.randint(256, (2, 17))
    >>> output = model(tokens[:, :-1], labels=tokens[:, 1:])
    >>> (output.loss + output.aux_loss).backward()
    >>> output.logits.shape, 5 < output.loss.item() < 6
    (torch.Size([2, 16, 256]), True)
    """
    run = replace(load_run(run), parallel=ParallelConfig())
    if found := [problem for problem in problems(run) if problem.path.startswith(("model", "precision"))]:
        raise ConfigError(*found)
    groups = groups_of(run, 1, 0, timedelta(seconds=60))
    local = build_local_model(run, groups, torch.device(device), routing_policy=routing_policy)
    return LanguageModel(run, local.model)


class MoELayer(nn.Module):
    """One MoE layer that is called on a tensor; made by `from_config`.

    `layer(x)` takes [.., D] and returns the same shape. The last dimension but one is a sequence, for balance losses
    per sequence; all tokens together are one microbatch, for capacities.

    >>> import torch, moefold
    >>> layer = moefold.MoELayer.from_config(dim=16, num_experts=8, top_k=2, expert_hidden_dim=32)
    >>> x = torch.randn(4, 10, 16)
    >>> layer(x).shape
    torch.Size([4, 10, 16])
    >>> y, report = layer.forward_with_report(x)
    >>> report.counts_E.sum().item() == 4 * 10 * 2
    True
    """

    def __init__(self, layer: moe_layer.MoELayer) -> None:
        super().__init__()
        self.layer = layer

    @classmethod
    def from_config(
        cls,
        config: MoEConfig | None = None,
        *,
        dim: int,
        routing_policy: PolicyOrName | None = None,
        experts: str = "sequential",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        init_std: float = 0.02,
        **fields: object,
    ) -> MoELayer:
        """A layer of model dim `dim`, from a `MoEConfig` such as `run.model.moe`, with some of its `fields` changed.

        A section is a dict: `router={"score": "sigmoid"}`. `experts` names who runs the experts: sequential, grouped,
        fused, or auto, which is what suits torch's default device. Every problem is raised at once, as `ConfigError`.
        `routing_policy` is as for `build_model`.
        """
        run = RunConfig(model=ModelConfig(dim=dim, num_layers=1, moe=config or MoEConfig(), init_std=init_std))
        changes = {f"model.moe.{name}": value for name, value in fields.items()}
        run = override(run, changes | {"kernels.experts": experts})
        if found := [problem for problem in problems(run) if problem.path.startswith("model.moe")]:
            raise ConfigError(*found)
        model, moe = run.model, run.model.moe
        assert moe is not None
        in_use = experts_in_use(run, torch.get_default_device().type)
        seams = replace(local_interfaces(in_use), routing_policy=policy_maker(routing_policy))
        layer = build_moe_layer(moe, dim, seams).to(dtype)
        _init_layer(layer, model, seed)
        return cls(layer)

    def forward(self, x: Tensor) -> Tensor:
        """The output for `x`, of the same shape."""
        return self.forward_with_report(x)[0]

    def forward_with_report(self, x: Tensor) -> tuple[Tensor, RoutingReport]:
        """The output, and what the router did: tokens per expert (`counts_E`) and balance losses (`losses`)."""
        y_tD, report = self.layer(x.reshape(-1, x.shape[-1]), _batch_of(x), None)
        return y_tD.view(x.shape), report

    def route(self, x: Tensor) -> Routing:
        """The experts of every token and their probs, each [tokens, top_k]; nothing is sent or computed."""
        routing, _ = self.layer.router(x.reshape(-1, x.shape[-1]), _batch_of(x), None)
        return routing


@torch.no_grad()
def _init_layer(layer: nn.Module, model: ModelConfig, seed: int) -> None:
    """As layer 0 of a model starts."""
    prefix = "layers.0.feed_forward."
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    for spec in (*parameters(model), *buffers(model)):
        if spec.name.startswith(prefix):
            whole = tuple(slice(0, size) for size in spec.shape)
            std = init_std(model, spec.name)
            init_values(spec.kind, seed, spec.name, spec.shape, whole, std, tensors[spec.name.removeprefix(prefix)])


def _batch_of(x: Tensor) -> Batch:
    lengths = _lengths(x.shape[:-1])
    nothing = torch.zeros(sum(lengths), dtype=torch.int64, device=x.device)
    return whole_batch(
        nothing,
        nothing,
        lengths,
        step_labels=max(sum(lengths), 1),
        step_tokens=max(sum(lengths), 1),
        step_sequences=max(len(lengths), 1),
    )


def _lengths(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One sequence along the last dimension for every index of the others."""
    sequences = 1
    for size in shape[:-1]:
        sequences *= size
    return (shape[-1],) * sequences if shape else (1,)
