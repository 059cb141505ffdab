"""Documents inside a sample: a window of the token stream holds pieces of several, one after the other.

S sequence length. A sample has S + 1 tokens: the first S go in, the last S are predicted. `starts` are the places of
the window where a document begins, in rising order; the first is always 0, since the window's first token begins a
piece even if its document began earlier. A start at S belongs to a token that is only predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def window_starts(document_starts: np.ndarray, start: int) -> tuple[int, ...]:
    """Starts in the stream -> starts in the window that begins at `start`."""
    inside = (document_starts - start).tolist()
    return tuple(inside) if inside and inside[0] == 0 else (0, *inside)


def lengths(starts: Sequence[int], seq_len: int) -> list[int]:
    """Of the S tokens that go in: how many each piece has."""
    inside = [start for start in starts if start < seq_len]
    return [after - start for start, after in zip(inside, [*inside[1:], seq_len])]


def positions(starts: Sequence[int], seq_len: int) -> np.ndarray:
    """int64[S]: each token's distance from the start of its piece."""
    sizes = lengths(starts, seq_len)
    first = np.cumsum([0, *sizes[:-1]])
    return np.arange(seq_len) - np.repeat(first, sizes)


def piece_of_token(starts: Sequence[int], seq_len: int) -> np.ndarray:
    """int64[S]: the number of the piece that each token belongs to."""
    sizes = lengths(starts, seq_len)
    return np.repeat(np.arange(len(sizes)), sizes)


def crossing(starts: Sequence[int], seq_len: int) -> np.ndarray:
    """bool[S]: whether the label of this token is the first of another document, which nothing here foretells."""
    found = np.zeros(seq_len, bool)
    found[[start - 1 for start in starts if 0 < start <= seq_len]] = True
    return found
