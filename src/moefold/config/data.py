"""The batch of a step, how documents are packed into samples, and where tokens come from."""

from __future__ import annotations

from dataclasses import dataclass, field
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
class VerificationConfig:
    """Token files are compared with the hashes they were written with while the run trains."""

    __pydantic_config__: ClassVar = STRICT

    # What follows if a block of a file has another hash, or a token is outside the vocabulary. stop: the run ends.
    # skip: blocks are checked before they are read, and samples in damaged ones count in no loss. warn: a wrong hash is
    # told, and training goes on.
    on_damage: Literal["stop", "skip", "warn"] = "stop"
    # How much of the files one process per host reads and hashes in the background; 0: files are not compared.
    mb_per_s: float = 100.0
    # A resumed run compares files whose time of change is another for at most this long before its first step.
    start_seconds: float = 10.0


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
    verification: VerificationConfig = field(default_factory=VerificationConfig)

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Sources of training tokens; empty if the run names none."""
        return self.mixture or (() if self.train is None else (SourceConfig(self.train),))
