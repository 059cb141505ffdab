"""Embedding and language-model loss, with the vocabulary's rows sharded over ranks.

The loss is summed over tokens; the caller divides it once, by the labels of the whole step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefold.nn.batch import IGNORED, Batch
from moefold.nn.parallel_interfaces import TokenSharding, VocabSharding
from moefold.ops.backends import IN_TORCH, Kernels
from moefold.ops.cross_entropy import mean_logit


class Embedding(nn.Module):
    """Each rank looks up the tokens whose rows it holds and leaves zeros for the rest; the sum is complete."""

    def __init__(
        self, vocab_size: int, dim: int, compute: torch.dtype, tokens: TokenSharding, vocab: VocabSharding
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.compute = compute
        self.tokens = tokens
        self.vocab = vocab

    def forward(self, tokens_S: Tensor) -> Tensor:
        num_rows = self.weight.shape[0]
        row_S = tokens_S - self.vocab.first_row(num_rows)
        here_S = (row_S >= 0) & (row_S < num_rows)
        found_SD = _rows_of(self.weight, row_S.clamp(0, num_rows - 1)).to(self.compute)
        return self.tokens.reduce(torch.where(here_S[:, None], found_SD, 0.0))


def _rows_of(weight_vD: Tensor, row_S: Tensor) -> Tensor:
    """A token that occurs often has a gradient that is a sum of many rows: of 16-bit weights too, it is in float32."""
    if weight_vD.element_size() >= 4:
        return F.embedding(row_S, weight_vD)
    rows_SD: Tensor = _RowsOf.apply(weight_vD, row_S)
    return rows_SD


class _RowsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_vD: Tensor, row_S: Tensor) -> Tensor:
        ctx.save_for_backward(row_S)
        ctx.num_rows = weight_vD.shape[0]
        return F.embedding(row_S, weight_vD)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        (row_S,) = ctx.saved_tensors
        # Autograd casts it to the dtype in which the weight collects its gradient.
        dweight_vD: Tensor = torch.ops.aten.embedding_dense_backward(grad_SD.float(), row_S, ctx.num_rows, -1, False)
        return dweight_vD, None


class LanguageLoss(nn.Module):
    """Every rank takes all tokens over its own vocabulary rows; merged, every rank holds the same sum."""

    def __init__(
        self, tokens: TokenSharding, vocab: VocabSharding, chunk: int = 8192, kernels: Kernels = IN_TORCH
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.tokens = tokens
        self.vocab = vocab
        self.chunk = chunk

    def forward(self, x_tD: Tensor, weight_vD: Tensor, labels_S: Tensor, batch: Batch) -> Tensor:
        return self._losses(x_tD, weight_vD, labels_S, batch).sum()

    def logprobs(self, x_tD: Tensor, weight_vD: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
        """[S], of the batch's labels; 0 where a label is ignored. Logits are divided by ``temperature``."""
        scaled_tD = x_tD if temperature == 1.0 else x_tD / temperature
        return -self._losses(scaled_tD, weight_vD, batch.labels_S, batch)

    @torch.no_grad()
    def entropies(self, x_tD: Tensor, weight_vD: Tensor, batch: Batch, temperature: float = 1.0) -> Tensor:
        """[S], of the distribution of each token's next one."""
        x_SD = self.tokens.gather(x_tD / temperature, batch)
        lse_S, _ = self.kernels.vocab_stats(x_SD, weight_vD, torch.zeros_like(batch.labels_S), self.chunk)
        lse_S = self.vocab.merge_logsumexp(lse_S)
        return lse_S - self.vocab.merge_sum(mean_logit(x_SD, weight_vD, lse_S, self.chunk))

    def _losses(self, x_tD: Tensor, weight_vD: Tensor, labels_S: Tensor, batch: Batch) -> Tensor:
        x_SD = self.tokens.gather(x_tD, batch)
        target_S = labels_S - self.vocab.first_row(weight_vD.shape[0])
        lse_S, target_logit_S = self.kernels.vocab_stats(x_SD, weight_vD, target_S, self.chunk)
        loss_S = self.vocab.merge_logsumexp(lse_S) - self.vocab.merge_sum(target_logit_S)
        return torch.where(labels_S != IGNORED, loss_S, 0.0)
