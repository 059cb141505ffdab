"""The batch of a step, how documents are packed into samples, and where tokens come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

# The source of the Python standard library, as bytes: a toy corpus that every machine has.
BUILTIN = "builtin"

PackingMode = Literal["concat", "concat_masked", "padded", "bin_packed"]


@dataclass(frozen=True)
class SourceConfig:
    """One set of token files and its weight in the data mixture."""

    __pydantic_config__: ClassVar = STRICT

    # A path or URL: of a `.bin`/`.idx` pair (without the ending), an `.npy` file, a folder of either; or `builtin`.
    path: str
    weight: float = 1.0
    # For `.npy` files only: the dtype of files without a header (None: the smaller of uint16 and uint32 that holds the
    # vocabulary), and the token that ends a document (None: a file is one document).
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    end_of_document: int | None = None


@dataclass(frozen=True)
class DataConfig:
    """A step's global batch is split into microbatches of `micro_batch` whole sequences, the same in every layout."""

    __pydantic_config__: ClassVar = STRICT

    seq_len: int = 64
    global_batch: int = 8
    micro_batch: int = 1
    # What a sample is. concat: a window of the concatenated documents, one sequence. concat_masked: such a window with
    # attention masked at document boundaries. padded: one document, padded to seq_len. bin_packed: one document, packed
    # with others into microbatches of at most micro_batch * seq_len tokens.
    packing: PackingMode = "concat"
    # So many steps are read ahead while a step computes, on a thread; on a GPU also copied, on a stream. 0: none.
    prefetch: int = 1
    # Training tokens: one path, or a weighted mixture, which then replaces it. None: the run can be planned and proved,
    # but not trained; no corpus is taken by default.
    train: str | None = None
    mixture: tuple[SourceConfig, ...] = ()
    # Validation tokens; the builtin corpus holds some of its files out. None: no validation.
    validation: str | None = None

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Sources of training tokens; empty if the run names none."""
        return self.mixture or (() if self.train is None else (SourceConfig(self.train),))
