"""The reference's update: torch's AdamW, Muon and QK-clip as their equations say, on whole tensors of one process.

What Muon calls one matrix, and which parameters are its own, is the blueprint's (`blueprint/muon_matrices.py`); all
arithmetic is written out here once more, one matrix and one head after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor, nn

from moefold.blueprint.muon_matrices import matrices_of, muon_algorithm
from moefold.blueprint.param_groups import NO_DECAY_KINDS, is_trained
from moefold.blueprint.parameters import ParameterSpec, block_names, parameters
from moefold.config.attention import MLAConfig
from moefold.config.model import ModelConfig
from moefold.config.optim import MuonConfig, OptimConfig
from moefold.config.run import RunConfig
from moefold.optim.newton_schulz import COEFFICIENTS


def update_reference(
    run: RunConfig, named: Mapping[str, nn.Parameter], max_logits: Mapping[int, Tensor]
) -> dict[str, Tensor]:
    """One update in place from clipped gradients; parameters and states after it. ``max_logits``: [H] by block."""
    specs = {spec.name: spec for spec in parameters(run.model) if is_trained(spec.name, run.optim)}
    by_muon = {name for name, spec in specs.items() if run.optim.algorithm == "muon" and _is_muon(spec)}
    by_adamw = {name: (specs[name], value) for name, value in named.items() if name in specs and name not in by_muon}
    states = _adamw(run.optim, by_adamw)
    for name in sorted(by_muon):
        states[f"momentum/{name}"] = _muon(run, specs[name], named[name])
    if run.optim.qk_clip is not None:
        _clip_logits(run.model, run.optim.qk_clip, named, max_logits)
    return states | {f"parameter/{name}": parameter.detach() for name, parameter in named.items()}


def adamw_step(optim: OptimConfig, decayed: list[nn.Parameter], others: list[nn.Parameter]) -> torch.optim.AdamW:
    """torch's, with one step done."""
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, foreach=False)
    optimizer.step()
    return optimizer


def _adamw(optim: OptimConfig, pairs: Mapping[str, tuple[ParameterSpec, nn.Parameter]]) -> dict[str, Tensor]:
    decayed = [parameter for spec, parameter in pairs.values() if spec.kind not in NO_DECAY_KINDS]
    others = [parameter for spec, parameter in pairs.values() if spec.kind in NO_DECAY_KINDS]
    state = adamw_step(optim, decayed, others).state
    return {
        f"{what}/{name}": state[parameter][what]
        for name, (_, parameter) in pairs.items()
        for what in ("exp_avg", "exp_avg_sq")
    }


def _is_muon(spec: ParameterSpec) -> bool:
    return muon_algorithm(spec.name, spec.kind) == "muon"


@torch.no_grad()
def _muon(run: RunConfig, spec: ParameterSpec, parameter: nn.Parameter) -> Tensor:
    """The momentum after the first step, which is the gradient."""
    config, lr = run.optim.muon, run.optim.lr
    assert parameter.grad is not None
    momentum = parameter.grad.clone()
    wanted = momentum * config.momentum + parameter.grad if config.nesterov else momentum
    matrices, update = matrices_of(spec, run.model), torch.empty_like(momentum)
    for number in range(len(matrices)):
        box = tuple(slice(*span) for span in matrices.spans(number))
        rows, columns = matrices.shape(number)
        answer_MN = newton_schulz(wanted[box].reshape(rows, columns), config)
        update[box] = (answer_MN * config.rms * sqrt(max(rows, columns))).view(update[box].shape)
    parameter.sub_(lr * (update + run.optim.weight_decay * parameter))
    return momentum


def newton_schulz(matrix_MN: Tensor, config: MuonConfig) -> Tensor:
    triples, norm_factor = COEFFICIENTS[config.coefficients]
    norm = matrix_MN.norm() * norm_factor
    x_MN = matrix_MN / norm if norm > 0 else matrix_MN
    for iteration in range(config.iterations):
        a, b, c = triples[min(iteration, len(triples) - 1)]
        gram_MM = x_MN @ x_MN.T
        x_MN = a * x_MN + b * gram_MM @ x_MN + c * gram_MM @ gram_MM @ x_MN
    return x_MN


@torch.no_grad()
def _clip_logits(
    model: ModelConfig, bound: float, named: Mapping[str, nn.Parameter], max_logits: Mapping[int, Tensor]
) -> None:
    """A head's queries and keys by the root of bound / logit; MLA's rotated queries by all of it."""
    attention = model.attention
    for number, block in enumerate(block_names(model)):
        if number not in max_logits:
            continue
        largest = max_logits[number].tolist()
        if isinstance(attention, MLAConfig):
            query = "q" if attention.q_latent is None else "q_up"
            q = named[f"{block}.attention.{query}.weight"].unflatten(0, (attention.num_heads, -1))
            kv = named[f"{block}.attention.kv_up.weight"].unflatten(0, (attention.num_heads, -1))
            for head, logit in enumerate(largest):
                gamma = bound / logit if logit > bound else 1.0
                q[head, : attention.nope_dim] *= sqrt(gamma)
                q[head, attention.nope_dim :] *= gamma
                kv[head, : attention.nope_dim] *= sqrt(gamma)
            continue
        shared = attention.num_heads // attention.num_kv_heads
        for key_head in range(attention.num_kv_heads):
            logit = max(largest[key_head * shared : (key_head + 1) * shared])
            gamma = bound / logit if logit > bound else 1.0
            for projection, heads in (("q", shared), ("k", 1)):
                for what in ("weight", "bias"):
                    whole = named.get(f"{block}.attention.{projection}.{what}")
                    if whole is not None:
                        by_head = whole.unflatten(0, (heads * attention.num_kv_heads, -1))
                        # Of a gated head, the gate's rows come after the query's.
                        by_head[key_head * heads : (key_head + 1) * heads, : attention.head_dim] *= sqrt(gamma)
