"""The engine without a layer around it: only the matrix products of a mixture, outputs allocated beforehand.

N rows, D width, F hidden width, E experts. A layer cannot be faster than its products; these say how fast those are.

`DenseEngine` sends all T*K rows through one expert: the same FLOPs in as few, as large products as there can be. The
shared expert is further rows. `GroupedEngine` has the routing's real counts and torch's own grouped product. Neither
has an activation, a router, a sort, or autograd.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.bench.layer_inputs import DTYPES, choices, draw_input, draw_weights
from moefold.bench.layer_shapes import LayerShape
from moefold.bench.runner import Options


class DenseEngine:
    def __init__(self, options: Options) -> None:
        shape, dtype = LayerShape(**options["shape"]), DTYPES[options["dtype"]]
        self.products = _Products(shape.rows + shape.tokens * shape.shared // shape.hidden, shape, dtype)

    def prepare(self, seed: int) -> None:
        """Routing changes nothing here."""

    def run(self, prepared: None) -> None:
        self.products.run()

    def saved_bytes(self, prepared: None) -> int | None:
        return None


class GroupedEngine:
    def __init__(self, options: Options) -> None:
        self.shape, self.dtype = LayerShape(**options["shape"]), DTYPES[options["dtype"]]
        shape = self.shape
        self.weights = draw_weights(shape, self.dtype)
        self.x_ND, self.dy_ND = (torch.randn(shape.rows, shape.dim).to(self.dtype) for _ in range(2))
        extra = shape.tokens * shape.shared // shape.hidden
        self.shared = _Products(extra, shape, self.dtype) if extra else None

    def prepare(self, seed: int) -> Tensor:
        """Where each expert's rows end."""
        _, expert_TK = choices(self.shape, self.weights, draw_input(self.shape, self.dtype, seed))
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


class _Products:
    """Gate, up and down of one expert, forward and backward: nine products."""

    def __init__(self, rows: int, shape: LayerShape, dtype: torch.dtype) -> None:
        def draw(*sizes: int) -> Tensor:
            return (torch.randn(*sizes) / sizes[-1] ** 0.5).to(dtype)

        D, hidden = shape.dim, shape.hidden
        self.x_ND, self.dy_ND = draw(rows, D), draw(rows, D)
        self.gate_DF, self.up_DF, self.down_FD = draw(D, hidden), draw(D, hidden), draw(hidden, D)
        self.gated_NF, self.upped_NF, self.d_hidden_NF = draw(rows, hidden), draw(rows, hidden), draw(rows, hidden)
        self.y_ND, self.dx_ND = draw(rows, D), draw(rows, D)
        self.d_gate_DF, self.d_up_DF, self.d_down_FD = draw(D, hidden), draw(D, hidden), draw(hidden, D)

    def run(self) -> None:
        torch.mm(self.x_ND, self.gate_DF, out=self.gated_NF)
        torch.mm(self.x_ND, self.up_DF, out=self.upped_NF)
        torch.mm(self.gated_NF, self.down_FD, out=self.y_ND)
        torch.mm(self.dy_ND, self.down_FD.t(), out=self.d_hidden_NF)
        torch.mm(self.gated_NF.t(), self.dy_ND, out=self.d_down_FD)
        torch.mm(self.d_hidden_NF, self.gate_DF.t(), out=self.dx_ND)
        torch.mm(self.d_hidden_NF, self.up_DF.t(), out=self.dx_ND)
        torch.mm(self.x_ND.t(), self.d_hidden_NF, out=self.d_gate_DF)
        torch.mm(self.x_ND.t(), self.d_hidden_NF, out=self.d_up_DF)
