"""How much memory tensors take at most, on any device, counted as they come and go.

Every operation passes by here. A storage that was not there before counts with its bytes until it is freed. What a
kernel allocates and frees inside one call is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """``peak`` bytes at most so far, ``live`` bytes now, of tensors made inside the ``with``."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._meet(leaf.untyped_storage())
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known or num_bytes == 0:
            return
        self._known.add(key)
        weakref.finalize(storage, self._part, key, num_bytes)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def _part(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes
