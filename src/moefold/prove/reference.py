"""The one-process answer, written as plainly as torch allows.

No groups, no shards, no seams that do anything: one model, autograd, torch's own norm and torch's own AdamW. Whatever
a parallel run shares with this file is the model code itself, which other tests hold against transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from moefold.blueprint.parameters import buffers, parameters
from moefold.model.build import build_decoder, one_process_seams
from moefold.model.decoder import Decoder
from moefold.model.moe.balance import BalanceLosses, update_expert_bias
from moefold.optim.adamw import UNDECAYED
from moefold.precision.formats import TORCH_FORMATS
from moefold.prove.batches import labels_of_batch, wave_batch
from moefold.prove.cases import Case
from moefold.prove.replay import record_choices
from moefold.prove.start import busy_values

Answer = dict[str, Tensor]


def write_reference(case: Case, path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in reference(case).items()}, path)


def reference(case: Case) -> Answer:
    """Every compared quantity by name: one clipped step on the whole global batch."""
    model = reference_model(case)
    answer: Answer = {}
    with record_choices(model) as choices:
        answer |= _forward_and_backward(case, model)
    answer |= {f"choice/{name}": choice for name, choice in choices.items()}
    named = dict(model.named_parameters())
    answer |= {f"gradient/{name}": parameter.grad.clone() for name, parameter in named.items()}
    gradients = [parameter.grad for parameter in named.values()]
    answer["norm"] = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
    factor = min(1.0, case.run.optim.clip_norm / answer["norm"].item())
    for gradient in gradients:
        gradient *= factor
    return answer | _update(case, model, answer["counts"])


def reference_model(case: Case) -> Decoder:
    run = case.run
    model = build_decoder(run.model, TORCH_FORMATS[run.precision.compute], run.precision.experts, one_process_seams())
    model.to(TORCH_FORMATS[run.precision.params])
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for spec in (*parameters(run.model), *buffers(run.model)):
            whole = tuple(slice(0, size) for size in spec.shape)
            busy_values(spec.kind, run.seed, spec.name, spec.shape, whole, run.model.init_std, tensors[spec.name])
    return model


def _forward_and_backward(case: Case, model: Decoder) -> Answer:
    loss, balance, counts_ME, dropped = 0.0, [0.0] * len(BalanceLosses._fields), None, 0
    for wave in range(case.num_waves):
        batch = wave_batch(case, wave, labels_of_batch(case))
        output = model(batch, counts_ME)
        part = output.loss_sum / batch.step_labels
        parts = [sum(report.losses[i] for report in output.reports) for i in range(len(balance))]
        (part + sum(parts)).backward()
        loss = loss + part.detach()
        balance = (
            [total + part.detach() for total, part in zip(balance, parts, strict=True)] if output.reports else balance
        )
        counts = torch.stack([report.counts_E for report in output.reports]) if output.reports else torch.zeros(0, 0)
        counts_ME = counts if counts_ME is None else counts_ME + counts
        dropped = dropped + sum(report.dropped for report in output.reports)
    answer = {"loss": loss, "counts": counts_ME, "dropped": torch.as_tensor(dropped)}
    return answer | {f"balance/{k}": torch.as_tensor(v) for k, v in zip(BalanceLosses._fields, balance, strict=True)}


def _update(case: Case, model: Decoder, counts_ME: Tensor) -> Answer:
    optim, kinds = case.run.optim, {spec.name: spec.kind for spec in parameters(case.run.model)}
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter], "weight_decay": 0.0 if kinds[name] in UNDECAYED else optim.weight_decay}
            for name, parameter in named.items()
        ],
        lr=optim.rate,
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
    for index, spec in enumerate(buffers(case.run.model)):
        bias_E = dict(model.named_buffers())[spec.name]
        answer[f"expert_bias/{spec.name}"] = update_expert_bias(
            bias_E, counts_ME[index], case.run.model.moe.router.bias_rate
        )
    return answer
