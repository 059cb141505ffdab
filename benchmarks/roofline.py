"""Lower bounds of a MoE layer's time: its matmuls alone, without activation, router, permute or autograd.

N rows, D model dim, F expert hidden dim, E experts.

`DenseRoofline` sends all T*K rows through one expert: the same FLOPs in as few and as large GEMMs as possible.
`GroupedRoofline` has the real number of rows per expert and torch's grouped matmul.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.runner import Options
from moefold.bench.layer_bench import DenseMatmuls, multiplied_dtype
from moefold.bench.layer_workload import DTYPES, LayerShape, draw_input, draw_weights, route


class DenseRoofline:
    def __init__(self, options: Options) -> None:
        self.matmuls = DenseMatmuls.of_layer(LayerShape(**options["shape"]), multiplied_dtype(options["dtype"], "cpu"))

    def prepare(self, seed: int) -> None:
        """Nothing to prepare: there is no routing."""

    def run(self, prepared: None) -> None:
        self.matmuls.run()

    def saved_bytes(self, prepared: None) -> int | None:
        return None


class GroupedRoofline:
    def __init__(self, options: Options) -> None:
        self.shape, self.dtype = LayerShape(**options["shape"]), DTYPES[options["dtype"]]
        shape = self.shape
        self.weights = draw_weights(shape, self.dtype)
        self.x_ND, self.dy_ND = (torch.randn(shape.rows, shape.dim).to(self.dtype) for _ in range(2))
        shared_rows = shape.tokens * shape.shared // shape.hidden
        self.shared = DenseMatmuls(shared_rows, shape, self.dtype) if shared_rows else None

    def prepare(self, seed: int) -> Tensor:
        """End offset of each expert's rows."""
        _, expert_TK = route(self.shape, self.weights, draw_input(self.shape, self.dtype, seed))
        counts_E = torch.bincount(expert_TK.flatten(), minlength=self.shape.experts)
        return counts_E.cumsum(0).to(torch.int32)

    def run(self, prepared: Tensor) -> None:
        weights, ends, x, dy = self.weights, prepared, self.x_ND, self.dy_ND
        gate = F.grouped_mm(x, weights.gate_EDF, offs=ends)
        F.grouped_mm(x, weights.up_EDF, offs=ends)
        F.grouped_mm(gate, weights.down_EFD, offs=ends)
        d_hidden = F.grouped_mm(dy, weights.down_EFD.mT, offs=ends)
        F.grouped_mm(gate.t(), dy, offs=ends)
        for weight in (weights.gate_EDF, weights.up_EDF):
            F.grouped_mm(d_hidden, weight.mT, offs=ends)
            F.grouped_mm(x.t(), d_hidden, offs=ends)
        if self.shared is not None:
            self.shared.run()

    def saved_bytes(self, prepared: Tensor) -> int | None:
        return None
