"""What a step asks of sharded data parallelism, whichever of its forms the run has (``parallel.sharding``).

``fsdp`` (`parallel/fsdp.py`) shards parameters, gradients and optimizer states. The step calls the methods below in
this order:

    start_step            once per step
    part_hooks            of each stage: what the parts of its first forward and of its last backward of the step are
                          to call; a backward that defers weight gradients calls none
    after_backward        of each stage, after its last backward of the step
    reduce_gradients      after the last action
    weights_changed       after the update, and after weights were initialised or loaded

An evaluation calls ``start_evaluation``, ``part_hooks`` and ``end_evaluation``.

``FlatSync`` is how a flat buffer of P bytes is summed and gathered over the ranks that share it
(``parallel.param_sync``): ``direct`` by one collective each, ``hierarchical`` in the four steps of MegaScale-MoE
(appendix A.1). With n of these ranks on each of d hosts:

    start_sum       reduce_scatter inside of the host     P bytes over n ranks: the host's sum of this rank's n-th
    finish_sum      reduce_scatter between hosts          P / n bytes over the d ranks at this place of their hosts
    start_gather    all_gather between hosts              P / n bytes over the same d ranks
    finish_gather   all_gather inside of the host         P bytes over n ranks

Each rank passes 2 P/n (d - 1)/d bytes to the network between hosts, and 2 P (n - 1)/n to the links inside. Buckets are
the pieces of the paper's pipeline: the step inside of one runs beside the step between hosts of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import Work

from moefold.comm.collectives import start_all_gather, start_reduce_scatter
from moefold.comm.process_groups import Group
from moefold.nn.phase_autograd import PartHooks
from moefold.parallel.param_shards import TrainedPiece

# Gives memory to a module on the meta device.
Materialize = Callable[[nn.Module, torch.device], object]


class DataSharding(Protocol):
    @property
    def main_dtype(self) -> torch.dtype:
        """Of the pieces: of the weights that are updated and saved."""
        ...

    def allocate(self, device: torch.device, materialize: Materialize) -> None:
        """Memory for everything that this rank holds, without values; the model was built on the meta device."""
        ...

    def pieces(self) -> tuple[TrainedPiece, ...]:
        """What this rank updates and saves, in the order of the model's parameters."""
        ...

    def start_step(self) -> None: ...

    def part_hooks(self, stage: int) -> PartHooks: ...

    def after_backward(self, stage: int) -> None: ...

    def reduce_gradients(self) -> dict[str, Tensor]:
        """Sets the ``.grad`` of every piece, summed over data-parallel ranks; returns it by the parameter's name."""
        ...

    def weights_changed(self, trained_only: bool = False) -> None:
        """``trained_only``: by an update, which leaves frozen weights as they were."""
        ...

    def start_evaluation(self) -> None: ...

    def end_evaluation(self) -> None: ...


def to_empty(module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device)


@dataclass(frozen=True)
class FlatSync:
    """The ranks that share a bucket, and their groups inside of hosts and across them if there are four steps.

    ``each`` is what every rank owns but the last, which owns what is left as well. The few elements that are left go
    over all ranks at once.
    """

    shard: Group
    levels: tuple[Group, Group] | None = None

    def start_sum(self, flat: Tensor, each: int) -> list[Work]:
        """Afterwards this rank's range holds its sums; of four steps, `run_of_place` those of its host."""
        if self.levels is None:
            return start_reduce_scatter(flat, each, self.shard)
        inside, across = self.levels
        even, rest = self._even_and_rest(flat, each)
        return start_reduce_scatter(even, across.size * each, inside) + start_reduce_scatter(rest, 0, self.shard)

    def finish_sum(self, flat: Tensor, each: int) -> list[Work]:
        """Between hosts; what `start_sum` started must have ended."""
        return [] if self.levels is None else start_reduce_scatter(self.run_of_place(flat, each), each, self.levels[1])

    def start_gather(self, flat: Tensor, each: int) -> list[Work]:
        if self.levels is None:
            return start_all_gather(flat, each, self.shard)
        _, rest = self._even_and_rest(flat, each)
        return start_all_gather(self.run_of_place(flat, each), each, self.levels[1]) + start_all_gather(
            rest, 0, self.shard
        )

    def finish_gather(self, flat: Tensor, each: int) -> list[Work]:
        """Inside of the host; what `start_gather` started must have ended."""
        if self.levels is None:
            return []
        inside, across = self.levels
        return start_all_gather(self._even_and_rest(flat, each)[0], across.size * each, inside)

    def run_of_place(self, flat: Tensor, each: int) -> Tensor:
        """What the ranks at this rank's place of their hosts own together."""
        assert self.levels is not None
        inside, across = self.levels
        return flat[inside.index * across.size * each :][: across.size * each]

    def _even_and_rest(self, flat: Tensor, each: int) -> tuple[Tensor, Tensor]:
        return flat[: each * self.shard.size], flat[each * self.shard.size :]
