"""How many tokens a step sees, in which pieces, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

# The Python standard library's own source, as bytes: a corpus that every machine has.
BUILTIN = "builtin"

PackingMode = Literal["concat", "concat_masked", "padded", "bin_packed"]


@dataclass(frozen=True)
class SourceConfig:
    """One set of token files and how much of the mixture it is."""

    __pydantic_config__: ClassVar = STRICT

    # A path or URL: of a `.bin`/`.idx` pair (without the ending), an `.npy` file, a folder of either; or `builtin`.
    path: str
    weight: float = 1.0
    # Of `.npy` files, which say neither: their type if they have no header (None: the smallest of uint16 and uint32
    # that holds the vocabulary), and the token that ends a document (None: a file is one document).
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    end_of_document: int | None = None


@dataclass(frozen=True)
class DataConfig:
    """A step's global batch is cut into microbatches of `micro_batch` whole sequences, whatever the layout."""

    __pydantic_config__: ClassVar = STRICT

    seq_len: int = 64
    global_batch: int = 8
    micro_batch: int = 1
    # What a sample is. `concat`: a window of the token stream, read as one sequence; `concat_masked`: such a window,
    # whose documents do not see each other; `padded`: one document, filled up to seq_len; `bin_packed`: one document,
    # put next to others into microbatches of at most micro_batch * seq_len tokens.
    packing: PackingMode = "concat"
    # Where training tokens come from: one path, or a weighted mixture, which then replaces it. None: a run that can be
    # planned and proved, but not trained. There is no default that trains: it would be a corpus that nobody asked for.
    train: str | None = None
    mixture: tuple[SourceConfig, ...] = ()
    # Tokens to validate on; the builtin corpus keeps some of its files for that. None: no validation.
    validation: str | None = None

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Of training tokens; none where the run names none."""
        return self.mixture or (() if self.train is None else (SourceConfig(self.train),))
