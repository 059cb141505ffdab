"""The reference: the same step on one process, as plain as possible.

No process groups, no shards: one model, autograd, a norm by its definition, and updates by theirs: torch's AdamW, Muon
and QK-clip as their equations say, on whole tensors, one matrix and one head after the other. All that a parallel run
has in common with this file is the model code, which other tests compare with transformers, and the blueprint's word
for what Muon calls one matrix (`blueprint/muon_matrices.py`). With a precision recipe, the casts in torch as well, and
which rows one matmul sees (`call_rows.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from moefold.attention.max_logits import LogitMaxima, ObservedCore
from moefold.blueprint.muon_matrices import matrices_of, muon_algorithm
from moefold.blueprint.param_groups import NO_DECAY_KINDS, is_trained
from moefold.blueprint.parameters import ParameterSpec, block_names, buffers, init_std, moe_block_names, parameters
from moefold.config.attention import MLAConfig
from moefold.config.memory import MemoryConfig
from moefold.config.model import ModelConfig
from moefold.config.optim import MuonConfig, OptimConfig
from moefold.config.run import RunConfig
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder
from moefold.model.narrow_modules import narrow_modules
from moefold.moe.dispatch.base import LocalDispatcher, row_codecs
from moefold.moe.load_balancing import BalanceLosses, update_expert_bias
from moefold.moe.routing_policies import PolicyOrName, policy_maker
from moefold.optim.newton_schulz import COEFFICIENTS
from moefold.precision.dtypes import TORCH_FORMATS, set_param_dtype
from moefold.prove.call_rows import Wave, call_by_call
from moefold.prove.cases import Case, proof_kernels
from moefold.prove.proof_inputs import init_of, labels_of_batch, wave_batch
from moefold.prove.routing_replay import record_routing, replay_in_order
from moefold.prove.seen_weights import whole_weights
from moefold.prove.unchanged_bits import UNCHANGED, is_repeated


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


# By name of the quantity.
Quantities = dict[str, Tensor]


def write_reference(case: Case, path: Path, routing_policy: PolicyOrName | None = None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in reference(case, routing_policy).items()}, path)


def reference(case: Case, routing_policy: PolicyOrName | None = None, routing: Quantities | None = None) -> Quantities:
    """Every compared quantity of one clipped step on the whole global batch; with the ``routing`` of another one."""
    maxima = LogitMaxima()
    model = reference_model(case, routing_policy, maxima)
    if routing is not None:
        replay_in_order(model, routing)
    found: Quantities = {}
    narrow_wave = None
    if case.run.precision.recipe is not None:
        # Casts in torch, of inputs that are kept as they are.
        kernels = proof_kernels(case.run.precision.compute)
        narrow_modules(model, replace(case.run, kernels=kernels, memory=MemoryConfig()))
        narrow_wave = call_by_call(model, case.run)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        for name, narrow in whole_weights(case.run, weights).items():
            found |= narrow.named(name)
    with record_routing(model) as routings:
        found |= _forward_and_backward(case, model, narrow_wave)
    found |= {f"routing/{name}": routing for name, routing in routings.items()}
    named = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    found |= {f"gradient/{name}": gradient.clone() for name, gradient in gradients.items()}
    if is_repeated(case.run):
        found |= {f"{UNCHANGED}/{name}": torch.zeros_like(gradient) for name, gradient in gradients.items()}
    found["grad_norm"] = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()
    factor = min(1.0, case.run.optim.clip_norm / found["grad_norm"].item())
    for gradient in gradients.values():
        gradient.mul_(factor)
    return found | _update(case, model, found["kept"], maxima)


def reference_model(
    case: Case, routing_policy: PolicyOrName | None = None, maxima: LogitMaxima | None = None
) -> Decoder:
    """``maxima``: where attention notes its largest logits, if the run clips them."""
    run = case.run
    backend = proof_kernels(run.precision.compute).experts
    interfaces = replace(local_interfaces(backend), routing_policy=policy_maker(routing_policy))
    # Rows that are sent as codes are rounded one by one, wherever their experts are.
    codecs = row_codecs(replace(run, kernels=proof_kernels(run.precision.compute)))
    interfaces = replace(interfaces, dispatcher=lambda moe: LocalDispatcher(moe.num_experts, codecs=codecs))
    if run.optim.qk_clip is not None and maxima is not None:
        interfaces = replace(interfaces, observe=lambda core, block: ObservedCore(core, block, maxima))
    model = build_decoder(run.model, TORCH_FORMATS[run.precision.compute], interfaces)
    set_param_dtype(model, TORCH_FORMATS[run.precision.params])
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for spec in (*parameters(run.model), *buffers(run.model)):
            whole = tuple(slice(0, size) for size in spec.shape)
            std = init_std(run.model, spec.name)
            init_of(run)(spec.kind, run.seed, spec.name, spec.shape, whole, std, tensors[spec.name])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, run.optim))
    return model


def _forward_and_backward(case: Case, model: Decoder, narrow_wave: Wave | None) -> Quantities:
    """All waves. Gradients accumulate in the model, other quantities here.

    ``narrow_wave``: what narrow modules are told of each wave.
    """
    moe_blocks = len(moe_block_names(case.run.model))
    experts = case.run.model.moe.num_experts if case.run.model.moe is not None else 0
    none_ME = torch.zeros(moe_blocks, experts, dtype=torch.int64)
    found = {"counts": none_ME, "kept": none_ME, "plain": none_ME, "dropped": torch.tensor(0)}
    found |= {name: torch.tensor(0.0) for name in ("loss", "mtp_loss")}
    # By MoE layer.
    found |= {f"balance/{field}": torch.zeros(moe_blocks) for field in BalanceLosses._fields}
    labels = labels_of_batch(case)
    labels_ahead = labels[1:]
    for wave in range(case.num_waves):
        batch = wave_batch(case, wave, labels)
        if narrow_wave is not None:
            narrow_wave.set(case.run, batch)
        output = model(batch, found["plain"] if wave else None)
        parts = {"loss": output.loss_sum / batch.step_labels}
        if output.ahead_loss_sums:
            counts = labels_ahead if case.run.model.mtp_divisor == "labels" else [batch.step_tokens] * len(labels_ahead)
            means = [part / max(count, 1) for part, count in zip(output.ahead_loss_sums, counts, strict=True)]
            parts["mtp_loss"] = torch.stack(means).mean() * case.run.model.mtp_weight
        reports = [report for _, report in output.reports]
        if reports:
            kinds = zip(*(report.losses for report in reports), strict=True)
            parts |= {f"balance/{field}": torch.stack(each) for field, each in zip(BalanceLosses._fields, kinds)}
        torch.stack([part.sum() for part in parts.values()]).sum().backward()
        found |= {name: found[name] + part.detach() for name, part in parts.items()}
        if reports:
            found["dropped"] = found["dropped"] + sum(report.dropped for report in reports)
            found["counts"] = found["counts"] + torch.stack([report.counts_E for report in reports])
            found["kept"] = found["kept"] + torch.stack([report.kept_E for report in reports])
            found["plain"] = found["plain"] + torch.stack([report.plain_E for report in reports])
    return found


def _update(case: Case, model: Decoder, kept_ME: Tensor, maxima: LogitMaxima) -> Quantities:
    found = update_reference(case.run, dict(model.named_parameters()), maxima.take())
    if case.run.precision.master == "remainder":
        # Ranks compare the weights of their optimizer with an update by their own gradients; this is what they are
        # relative to.
        found |= {name.replace("parameter/", "master/"): found[name].clone() for name in found if "parameter/" in name}
    state = dict(model.named_buffers())
    for (row, router), spec in zip(model.routers().items(), buffers(case.run.model), strict=False):
        found[f"expert_bias/{spec.name}"] = update_expert_bias(state[spec.name], kept_ME[row], router.bias_update_rate)
    return found
