"""The reference: the same step on one process, as plain as possible.

No process groups, no shards: one model, autograd, a norm by its definition, and updates by theirs
(`reference_update.py`). All that a parallel run has in common with this file is the model code, which other tests
compare with transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moefold.attention.max_logits import LogitMaxima, ObservedCore
from moefold.blueprint.param_groups import is_trained
from moefold.blueprint.parameters import buffers, init_std, moe_block_names, parameters
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder
from moefold.moe.load_balancing import BalanceLosses, update_expert_bias
from moefold.moe.routing_policies import PolicyOrName, policy_maker
from moefold.precision.dtypes import TORCH_FORMATS, set_param_dtype
from moefold.prove.cases import Case, proof_kernels
from moefold.prove.proof_inputs import labels_of_batch, proof_init, wave_batch
from moefold.prove.reference_update import update_reference
from moefold.prove.routing_replay import record_routing, replay_in_order

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
    with record_routing(model) as routings:
        found |= _forward_and_backward(case, model)
    found |= {f"routing/{name}": routing for name, routing in routings.items()}
    named = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    found |= {f"gradient/{name}": gradient.clone() for name, gradient in gradients.items()}
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
    if run.optim.qk_clip is not None and maxima is not None:
        interfaces = replace(interfaces, observe=lambda core, block: ObservedCore(core, block, maxima))
    model = build_decoder(run.model, TORCH_FORMATS[run.precision.compute], interfaces)
    set_param_dtype(model, TORCH_FORMATS[run.precision.params])
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for spec in (*parameters(run.model), *buffers(run.model)):
            whole = tuple(slice(0, size) for size in spec.shape)
            std = init_std(run.model, spec.name)
            proof_init(spec.kind, run.seed, spec.name, spec.shape, whole, std, tensors[spec.name])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name, run.optim))
    return model


def _forward_and_backward(case: Case, model: Decoder) -> Quantities:
    """All waves. Gradients accumulate in the model, other quantities here."""
    moe_blocks = len(moe_block_names(case.run.model))
    experts = case.run.model.moe.num_experts if case.run.model.moe is not None else 0
    none_ME = torch.zeros(moe_blocks, experts, dtype=torch.int64)
    found = {"counts": none_ME, "kept": none_ME, "plain": none_ME, "dropped": torch.tensor(0)}
    found |= {
        name: torch.tensor(0.0)
        for name in ("loss", "mtp_loss", *(f"balance/{field}" for field in BalanceLosses._fields))
    }
    labels = labels_of_batch(case)
    labels_ahead = labels[1:]
    for wave in range(case.num_waves):
        batch = wave_batch(case, wave, labels)
        output = model(batch, found["plain"] if wave else None)
        parts = {"loss": output.loss_sum / batch.step_labels}
        if output.ahead_loss_sums:
            counts = labels_ahead if case.run.model.mtp_divisor == "labels" else [batch.step_tokens] * len(labels_ahead)
            means = [part / max(count, 1) for part, count in zip(output.ahead_loss_sums, counts, strict=True)]
            parts["mtp_loss"] = torch.stack(means).mean() * case.run.model.mtp_weight
        for _, report in output.reports:
            for field, loss in report.losses._asdict().items():
                parts[f"balance/{field}"] = parts.get(f"balance/{field}", 0.0) + loss
            found["dropped"] = found["dropped"] + report.dropped
        torch.stack(list(parts.values())).sum().backward()
        found |= {name: found[name] + part.detach() for name, part in parts.items()}
        if output.reports:
            reports = [report for _, report in output.reports]
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
