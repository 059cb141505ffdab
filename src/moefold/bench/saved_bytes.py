"""How many bytes a forward pass saves for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def saved_for_backward(forward: Callable[[], Tensor], without: Iterable[Tensor]) -> int:
    """Each storage counts once, however many views of it are saved; parameters and the input are ``without``."""
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        # Kept until after the count, so that no storage is freed and another one takes its address.
        out = forward()
    total = sum(sizes.values())
    del out
    return total
