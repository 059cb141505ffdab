"""How many kernels torch's compiler makes of a region, without compiling any.

A backend for torch.compile that lowers each graph, forward and backward, with inductor's own decompositions, partition
and scheduler for CPUs, and counts the nodes that are left after fusion: loop nests and calls of a library, such as a
sort. Each would be one kernel. Then it runs the graph as it was, operation by operation, so no C++ compiler is needed
and values are right. What a GPU's schedule would fuse may differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from tests.host_work import counted_once
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from moefold.moe import moe_kernels
from moefold.moe.dispatch import all_to_all
from moefold.moe.moe_kernels import MOE_IN_TORCH, MoEKernels, Region, compile_regions


def num_kernels(graph: GraphModule, inputs: Sequence[Tensor]) -> int:
    """Nodes of inductor's schedule after fusion, without those that only name memory or a part of a result."""
    fake_mode = detect_fake_mode(inputs)
    assert fake_mode is not None
    graph = copy.deepcopy(graph)
    with V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
        post_grad_passes(graph, False)
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=fake_mode.shape_env)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering._update_scheduler()
    nodes = lowering.scheduler.nodes
    return sum("Nop" not in type(node).__name__ and not isinstance(node.node, MultiOutput) for node in nodes)


def _counted(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[[list[Tensor]], object]:
    kernels = num_kernels(graph, inputs)

    def run(args: list[Tensor]) -> object:
        with counted_once("inductor", kernels):
            return graph.forward(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


counting = aot_autograd(
    fw_compiler=_counted,
    bw_compiler=_counted,
    decompositions=select_decomp_table(),
    partition_fn=min_cut_rematerialization_partition,
)


class CountedRegion(Region):  # type: ignore[type-arg]
    """Compiled as if nothing counted its operations: what it launches is known from its graphs."""

    def __init__(self, plain: Callable[..., object]) -> None:
        super().__init__(plain, backend=counting)

    def __call__(self, *args: object) -> object:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().__call__(*args)


@contextmanager
def compiled_counted(kernels: MoEKernels = MOE_IN_TORCH) -> Iterator[MoEKernels]:
    """All regions compiled by this backend, also the dispatcher's; what was compiled before does not count."""
    torch._dynamo.reset()
    with patch.object(all_to_all, "region", CountedRegion), patch.object(moe_kernels, "region", CountedRegion):
        yield compile_regions(kernels)
