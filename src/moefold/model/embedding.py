"""Token numbers to vectors, with the vocabulary's rows cut over ranks.

T tokens of a microbatch, t the tokens of this rank, v this rank's vocabulary rows, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefold.model.seams import TokenSeam, VocabSeam


class Embedding(nn.Module):
    """Each rank looks up the tokens whose rows it holds and leaves zeros for the rest; the sum is complete."""

    def __init__(self, vocab_size: int, width: int, compute: torch.dtype, tokens: TokenSeam, vocab: VocabSeam) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.compute = compute
        self.tokens = tokens
        self.vocab = vocab

    def forward(self, tokens_T: Tensor) -> Tensor:
        num_rows = self.weight.shape[0]
        row_T = tokens_T - self.vocab.first_row(num_rows)
        here_T = (row_T >= 0) & (row_T < num_rows)
        found_TD = F.embedding(row_T.clamp(0, num_rows - 1), self.weight).to(self.compute)
        return self.tokens.reduce(torch.where(here_T[:, None], found_TD, 0.0))
