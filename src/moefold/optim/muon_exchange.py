"""Whole matrices from the parts of all ranks, and back: one all-to-all each way per bucket.

A plan is made once per bucket from the dealing (`blueprint/muon_matrices.py`). Both ends of a message compute the same
list of blocks in the same order, the matrices of an owner one after the other, so a message has no header.

Blocks are cut from boxes, not from shapes of shards: a rank's tensor is one box of the parameter (FSDP), or several,
one after the other in a flat range, and both are planned alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from moefold.blueprint.muon_matrices import DealtMatrix, MuonParameter, Spans
from moefold.comm.collectives import all_to_all_rows
from moefold.comm.process_groups import Group

# A rank's tensors by parameter, each as its boxes.
Boxes = Mapping[str, Sequence[Tensor]]


@dataclass(frozen=True)
class Block:
    """Part of a matrix: where it lies in the owner's matrix, and in which box of which parameter on its holder."""

    matrix: int
    in_matrix: tuple[slice, ...]
    name: str
    box: int
    in_box: tuple[slice, ...]
    size: int

    def of_box(self, boxes: Boxes) -> Tensor:
        return boxes[self.name][self.box][self.in_box]

    def of_matrix(self, matrices: Sequence[Tensor]) -> Tensor:
        """As the box has it: the leading dims of a stack are 1."""
        return matrices[self.matrix][self.in_matrix[-2:]].view(_sizes(self.in_box))


@dataclass
class BucketPlan:
    """What this rank does for one bucket; lists by peer are in the group's order, and empty for the rank itself."""

    group: Group
    # The matrices that this rank orthogonalises.
    owned: list[DealtMatrix]
    # Blocks that are in this rank's boxes and in its own matrices.
    kept: list[Block]
    # Whether any rank of the group sends anything.
    travels: bool
    # To the owners, and from the holders.
    send: list[list[Block]] = field(default_factory=list)
    receive: list[list[Block]] = field(default_factory=list)
    # Answers, to the holders and from the owners. Replicas send one block and get one each.
    send_back: list[list[Block]] = field(default_factory=list)
    receive_back: list[list[Block]] = field(default_factory=list)

    def gather(self, boxes: Boxes, matrices: Sequence[Tensor], nothing: Tensor) -> None:
        """Fill the owned matrices from all ranks' boxes. ``nothing`` has no elements, and the dtype of messages."""
        for block in self.kept:
            block.of_matrix(matrices).copy_(block.of_box(boxes))
        if self.travels:
            sent = [[block.of_box(boxes) for block in blocks] for blocks in self.send]
            into = [[block.of_matrix(matrices) for block in blocks] for blocks in self.receive]
            self._exchange(sent, into, nothing)

    def scatter(self, boxes: Boxes, matrices: Sequence[Tensor], nothing: Tensor) -> None:
        """Overwrite the boxes of all ranks from the owned matrices."""
        for block in self.kept:
            block.of_box(boxes).copy_(block.of_matrix(matrices))
        if self.travels:
            sent = [[block.of_matrix(matrices) for block in blocks] for blocks in self.send_back]
            into = [[block.of_box(boxes) for block in blocks] for blocks in self.receive_back]
            self._exchange(sent, into, nothing)

    def _exchange(self, sent: list[list[Tensor]], into: list[list[Tensor]], nothing: Tensor) -> None:
        flat = torch.cat([nothing, *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
        counts = [tuple(sum(tensor.numel() for tensor in tensors) for tensors in side) for side in (sent, into)]
        received = all_to_all_rows(flat, send=counts[0], recv=counts[1], group=self.group)
        targets = [tensor for tensors in into for tensor in tensors]
        for target, values in zip(targets, received.split([tensor.numel() for tensor in targets]), strict=True):
            target.copy_(values.view(target.shape))


def plan_bucket(parameters: Mapping[str, MuonParameter], dealt: Sequence[DealtMatrix], group: Group) -> BucketPlan:
    me, ranks = group.index, range(group.size)
    plan = BucketPlan(
        group,
        [matrix for matrix in dealt if matrix.owner == me],
        [],
        travels=not all(matrix.stays for matrix in dealt),
        send=[[] for _ in ranks],
        receive=[[] for _ in ranks],
        send_back=[[] for _ in ranks],
        receive_back=[[] for _ in ranks],
    )
    numbers = [0] * group.size
    for matrix in dealt:
        number, owner = numbers[matrix.owner], matrix.owner
        numbers[owner] += 1
        for part, holders in matrix.parts:
            if me != owner and me not in holders:
                continue
            source = matrix.source(holders)
            held = parameters[matrix.name].held
            if me == owner:
                if me in holders:
                    plan.kept.append(_block(matrix, number, part, held[me]))
                else:
                    plan.receive[source].append(_block(matrix, number, part, held[source]))
                for holder in holders:
                    if holder != me:
                        plan.send_back[holder].append(_block(matrix, number, part, held[holder]))
            else:
                block = _block(matrix, number, part, held[me])
                plan.receive_back[owner].append(block)
                if me == source:
                    plan.send[owner].append(block)
    return plan


def _block(matrix: DealtMatrix, number: int, part: Spans, boxes: Sequence[Spans]) -> Block:
    box = next(i for i, box in enumerate(boxes) if all(a <= c and d <= b for (a, b), (c, d) in zip(box, part)))
    return Block(
        number,
        _inside(part, matrix.spans),
        matrix.name,
        box,
        _inside(part, boxes[box]),
        prod(stop - start for start, stop in part),
    )


def _inside(part: Spans, whole: Spans) -> tuple[slice, ...]:
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(part, whole, strict=True))


def _sizes(box: Sequence[slice]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def box_views(tensor: Tensor, boxes: Sequence[Spans]) -> list[Tensor]:
    """A rank's tensor of a parameter as its boxes: of one box, or of several end to end."""
    shapes = [tuple(stop - start for start, stop in box) for box in boxes]
    if len(shapes) == 1 and tuple(tensor.shape) == shapes[0]:
        return [tensor]
    parts = tensor.view(-1).split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
