"""The one-process answer, written as plainly as torch allows.

No groups, no shards, no seams that do anything: one model, autograd, torch's own norm and torch's own AdamW. Whatever
a parallel run shares with this file is the model code itself, which other tests hold against transformers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moefold.blueprint.init_std import init_std
from moefold.blueprint.parameters import buffers, moe_block_names, parameters
from moefold.model.build import build_decoder, local_interfaces
from moefold.model.decoder import Decoder
from moefold.moe.load_balancing import BalanceLosses, update_expert_bias
from moefold.moe.routing_policies import PolicyOrName, policy_maker
from moefold.optim.adamw import NO_WEIGHT_DECAY
from moefold.precision.dtypes import TORCH_FORMATS, set_param_dtype
from moefold.prove.cases import Case, proving_kernels
from moefold.prove.init_values import busy_values
from moefold.prove.proof_batches import labels_of_batch, wave_batch
from moefold.prove.routing_replay import record_choices

Answer = dict[str, Tensor]


def write_reference(case: Case, path: Path, routing_policy: PolicyOrName | None = None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in reference(case, routing_policy).items()}, path)


def reference(case: Case, routing_policy: PolicyOrName | None = None) -> Answer:
    """Every compared quantity by name: one clipped step on the whole global batch."""
    model = reference_model(case, routing_policy)
    answer: Answer = {}
    with record_choices(model) as choices:
        answer |= _forward_and_backward(case, model)
    answer |= {f"choice/{name}": choice for name, choice in choices.items()}
    named = dict(model.named_parameters())
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    answer |= {f"gradient/{name}": gradient.clone() for name, gradient in gradients.items()}
    answer["grad_norm"] = (
        torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt()
    )
    factor = min(1.0, case.run.optim.clip_norm / answer["grad_norm"].item())
    for gradient in gradients.values():
        gradient.mul_(factor)
    return answer | _update(case, model, answer["kept"])


def reference_model(case: Case, routing_policy: PolicyOrName | None = None) -> Decoder:
    run = case.run
    engine = proving_kernels(run.precision.compute).experts
    interfaces = replace(local_interfaces(engine), routing_policy=policy_maker(routing_policy))
    model = build_decoder(run.model, TORCH_FORMATS[run.precision.compute], interfaces)
    set_param_dtype(model, TORCH_FORMATS[run.precision.params])
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for spec in (*parameters(run.model), *buffers(run.model)):
            whole = tuple(slice(0, size) for size in spec.shape)
            std = init_std(run.model, spec.name)
            busy_values(spec.kind, run.seed, spec.name, spec.shape, whole, std, tensors[spec.name])
    return model


def _forward_and_backward(case: Case, model: Decoder) -> Answer:
    """Gradients add up in the model; sums add up here."""
    mixtures = len(moe_block_names(case.run.model))
    experts = case.run.model.moe.num_experts if case.run.model.moe is not None else 0
    none_ME = torch.zeros(mixtures, experts, dtype=torch.int64)
    answer = {"counts": none_ME, "kept": none_ME, "plain": none_ME, "dropped": torch.tensor(0)}
    answer |= {
        name: torch.tensor(0.0) for name in ("loss", "ahead", *(f"balance/{field}" for field in BalanceLosses._fields))
    }
    labels = labels_of_batch(case)
    labels_ahead = labels[1:]
    for wave in range(case.num_waves):
        batch = wave_batch(case, wave, labels)
        output = model(batch, answer["plain"] if wave else None)
        parts = {"loss": output.loss_sum / batch.step_labels}
        if output.ahead_loss_sums:
            counts = labels_ahead if case.run.model.mtp_divisor == "labels" else [batch.step_tokens] * len(labels_ahead)
            means = [part / max(count, 1) for part, count in zip(output.ahead_loss_sums, counts, strict=True)]
            parts["ahead"] = torch.stack(means).mean() * case.run.model.mtp_weight
        for _, report in output.reports:
            for field, loss in report.losses._asdict().items():
                parts[f"balance/{field}"] = parts.get(f"balance/{field}", 0.0) + loss
            answer["dropped"] = answer["dropped"] + report.dropped
        torch.stack(list(parts.values())).sum().backward()
        answer |= {name: answer[name] + part.detach() for name, part in parts.items()}
        if output.reports:
            reports = [report for _, report in output.reports]
            answer["counts"] = answer["counts"] + torch.stack([report.counts_E for report in reports])
            answer["kept"] = answer["kept"] + torch.stack([report.kept_E for report in reports])
            answer["plain"] = answer["plain"] + torch.stack([report.plain_E for report in reports])
    return answer


def _update(case: Case, model: Decoder, kept_ME: Tensor) -> Answer:
    optim, kinds = case.run.optim, {spec.name: spec.kind for spec in parameters(case.run.model)}
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter], "weight_decay": 0.0 if kinds[name] in NO_WEIGHT_DECAY else optim.weight_decay}
            for name, parameter in named.items()
        ],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        foreach=False,
    )
    optimizer.step()
    answer: Answer = {}
    for name, parameter in named.items():
        state = optimizer.state[parameter]
        answer[f"parameter/{name}"] = parameter.detach()
        answer[f"exp_avg/{name}"], answer[f"exp_avg_sq/{name}"] = state["exp_avg"], state["exp_avg_sq"]
    state = dict(model.named_buffers())
    for (row, router), spec in zip(model.routers().items(), buffers(case.run.model), strict=False):
        answer[f"expert_bias/{spec.name}"] = update_expert_bias(state[spec.name], kept_ME[row], router.bias_update_rate)
    return answer
