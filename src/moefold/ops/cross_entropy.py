"""Chunked cross entropy: the full logits are never materialised.

A token's loss is log-sum-exp(logits) - logit(target). Both are accumulated over chunks of the vocabulary; backward
recomputes each chunk's logits. Saved are the input, the weight and one number per token. With a sharded vocabulary,
each rank returns both numbers over its rows, and the caller merges them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefold.ops.fp32_linear import upcast


def vocab_stats(x_SD: Tensor, weight_vD: Tensor, target_S: Tensor, chunk: int = 8192) -> tuple[Tensor, Tensor]:
    """log-sum-exp over these rows, and the target's logit (0 where the target is not one of these rows)."""
    lse_S, target_logit_S = _VocabStats.apply(x_SD, weight_vD, target_S, chunk)
    return lse_S, target_logit_S


def vocab_stats_reference(x_SD: Tensor, weight_vD: Tensor, target_S: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the full logits, with gradients by autograd."""
    logits_Sv = upcast(x_SD @ weight_vD.to(x_SD.dtype).T)
    return logits_Sv.logsumexp(dim=-1), _target_logit(logits_Sv, target_S)


@torch.no_grad()
def mean_logit(x_SD: Tensor, weight_vD: Tensor, lse_S: Tensor, chunk: int = 8192) -> Tensor:
    """Each token's sum over these rows of p * logit, with p = exp(logit - lse); ``lse_S`` is of all rows.

    lse minus the mean logit is the entropy of the token's distribution. No gradient.
    """
    mean_S = torch.zeros_like(lse_S)
    for start in range(0, weight_vD.shape[0], chunk):
        logits_Sc = _logits(x_SD, weight_vD[start : start + chunk])
        mean_S += ((logits_Sc - lse_S[:, None]).exp_() * logits_Sc).sum(-1)
    return mean_S


class _VocabStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, weight_vD: Tensor, target_S: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        lse_S = upcast(x_SD.new_full(x_SD.shape[:1], -torch.inf))
        target_logit_S = torch.zeros_like(lse_S)
        for start in range(0, weight_vD.shape[0], chunk):
            logits_Sc = _logits(x_SD, weight_vD[start : start + chunk])
            target_logit_S += _target_logit(logits_Sc, target_S - start)
            lse_S = torch.logaddexp(lse_S, _logsumexp_(logits_Sc))
        ctx.save_for_backward(x_SD, weight_vD, target_S, lse_S)
        ctx.chunk = chunk
        return lse_S, target_logit_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_SD, weight_vD, target_S, lse_S = ctx.saved_tensors
        grad_lse_S, grad_target_S = grads
        need_x, need_weight = ctx.needs_input_grad[:2]
        dx_SD = torch.zeros_like(upcast(x_SD)) if need_x else None
        dweight_vD = torch.empty_like(weight_vD) if need_weight else None
        for start in range(0, weight_vD.shape[0], ctx.chunk):
            weight_cD = weight_vD[start : start + ctx.chunk].to(x_SD.dtype)
            dlogits_Sc = _logits(x_SD, weight_cD).sub_(lse_S[:, None]).exp_().mul_(grad_lse_S[:, None])
            _add_at_target(dlogits_Sc, target_S - start, grad_target_S)
            dlogits_Sc = dlogits_Sc.to(x_SD.dtype)
            if dx_SD is not None:
                dx_SD += dlogits_Sc @ weight_cD
            if dweight_vD is not None:
                dweight_vD[start : start + ctx.chunk] = dlogits_Sc.T @ x_SD
        return (None if dx_SD is None else dx_SD.to(x_SD.dtype)), dweight_vD, None, None


def _logits(x_SD: Tensor, weight_cD: Tensor) -> Tensor:
    return upcast(x_SD @ weight_cD.to(x_SD.dtype).T)


def _logsumexp_(logits_Sc: Tensor) -> Tensor:
    """Overwrites the logits, to save a second tensor of their size."""
    largest_S1 = logits_Sc.amax(dim=-1, keepdim=True)
    return logits_Sc.sub_(largest_S1).exp_().sum(dim=-1).log_() + largest_S1[:, 0]


def _target_logit(logits_Sc: Tensor, target_S: Tensor) -> Tensor:
    inside_S, row_S = _among(target_S, logits_Sc.shape[1])
    return torch.where(inside_S, logits_Sc.gather(1, row_S[:, None])[:, 0], 0.0)


def _add_at_target(dlogits_Sc: Tensor, target_S: Tensor, grad_S: Tensor) -> None:
    inside_S, row_S = _among(target_S, dlogits_Sc.shape[1])
    dlogits_Sc.scatter_add_(1, row_S[:, None], torch.where(inside_S, grad_S, 0.0)[:, None])


def _among(target_S: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Whether each target is one of these rows, and its row index clamped into range."""
    return (target_S >= 0) & (target_S < num_rows), target_S.clamp(0, num_rows - 1)
