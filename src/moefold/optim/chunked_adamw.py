"""AdamW (Loshchilov and Hutter 2019) whose states may be narrow or in the host's memory, chunk by chunk in float32.

torch's AdamW keeps its moments in the dtype and on the device of the parameter. Here a chunk of at most 2**20 elements
is read into float32 from whatever its states are stored in, updated by torch's own arithmetic, and stored again. So the
temporary memory is that of a chunk, not of a parameter. With states in float32 the result is torch's to the last bit.

What a parameter has in `state`, all flat and of the rank's own elements:

    step         the number of updates, an int
    exp_avg      the first moment, and exp_avg_sq the second: as `moment_formats` stores them
    ..._scale    exponents of float8's block scales
    remainder    where main weights are a remainder beside bfloat16 weights (`optim.remainder`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moefold.optim.element_noise import element_hash, global_indices, noise, noise_key
from moefold.optim.moment_formats import BLOCK, MomentFormat, moment_formats
from moefold.optim.remainder import join, split_into
from moefold.optim.state_staging import Staged, Staging, StatesOn
from moefold.optim.trained_pieces import Piece, SavedKind, SavingOptimizer, local_of

# Elements of a chunk; full blocks.
CHUNK = 1 << 20
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StateFormat:
    """How states are stored: a name of `moment_formats`, the rounding, whether a remainder is kept, and where."""

    moments: str = "float32"
    stochastic: bool = False
    remainder: bool = False
    on: StatesOn = "device"


class Chunk(NamedTuple):
    """The elements from ``start`` to ``stop`` of a piece; ``lead``: the first one's place in its block."""

    piece: Piece
    start: int
    stop: int
    lead: int


class ChunkedAdamW(SavingOptimizer):
    """``groups``: as torch's, with "params", "lr", "weight_decay"; every parameter is that of one of ``pieces``."""

    def __init__(
        self,
        groups: Sequence[dict[str, object]],
        pieces: Sequence[Piece],
        format: StateFormat,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
        seed: int,
        device: torch.device,
    ) -> None:
        super().__init__([dict(group) for group in groups], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.format, self.seed, self.fused = format, seed, fused
        self.pieces = {piece.parameter: piece for piece in pieces}
        self.moments: dict[str, MomentFormat] = dict(zip(MOMENTS, moment_formats(format.moments), strict=True))
        self.staging = Staging(format.on, device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in members:
                self._state(parameter)["step"] += 1
            chunks = [chunk for parameter in members for chunk in self._chunks(parameter)]
            tensors = self.staging.over(chunks, lambda number: self._staged(chunks[number]))  # noqa: B023
            for chunk, here in zip(chunks, tensors, strict=True):
                self._update(chunk, here, group)

    def _state(self, parameter: nn.Parameter) -> dict[str, int | Tensor]:
        state: dict[str, int | Tensor] = self.state[parameter]
        if not state:
            size, lead = flat(parameter).numel(), self._lead(parameter)
            state["step"] = 0
            for moment, format in self.moments.items():
                for part, zeros in format.allocate(size, lead, self.staging.zeros).items():
                    state[moment + part] = zeros
            if self._completes(parameter):
                state["remainder"] = self.staging.zeros(size, torch.int16)
        return state

    def _lead(self, parameter: nn.Parameter) -> int:
        """The place of the first element in its block of the global tensor, so that layouts have the same blocks."""
        piece = self.pieces[parameter]
        first = 0
        for size, part in zip(piece.shard.shape, piece.boxes[0] if piece.boxes else (), strict=False):
            first = first * size + part.start
        return first % BLOCK

    def _chunks(self, parameter: nn.Parameter) -> list[Chunk]:
        size, lead = flat(parameter).numel(), self._lead(parameter)
        starts = [0, *range(CHUNK - lead, size, CHUNK)]
        return [
            Chunk(self.pieces[parameter], start, stop, lead if start == 0 else 0)
            for start, stop in zip(starts, [*starts[1:], size], strict=True)
            if start < stop
        ]

    def _staged(self, chunk: Chunk) -> Staged:
        parameter = chunk.piece.parameter
        assert parameter.grad is not None
        elements, state = slice(chunk.start, chunk.stop), self._state(parameter)
        tensors = {"weight": flat(parameter)[elements], "gradient": flat(parameter.grad)[elements]}
        lead = self._lead(parameter)
        for moment, format in self.moments.items():
            for name, stored in state.items():
                if name == moment or name == moment + "_scale":
                    assert isinstance(stored, Tensor)
                    span = format.span(name.removeprefix(moment), chunk.start, chunk.stop, lead)
                    tensors[name] = stored[span]
        remainder = state.get("remainder")
        if isinstance(remainder, Tensor):
            tensors["remainder"] = remainder[elements]
        steps = {"weight", "gradient"}
        moved = steps if self.format.on == "cpu" else set(tensors) - steps
        return Staged(tensors, frozenset(set(tensors) - {"gradient"}), frozenset(moved))

    def _update(self, chunk: Chunk, here: Mapping[str, Tensor], group: Mapping[str, object]) -> None:
        weight, step = here["weight"], self._state(chunk.piece.parameter)["step"]
        assert isinstance(step, int)
        wide = torch.promote_types(weight.dtype, torch.float32)
        main = join(weight, here["remainder"]) if "remainder" in here else weight.to(wide)
        parts = {
            moment: {name.removeprefix(moment): here[name] for name in (moment, moment + "_scale") if name in here}
            for moment in MOMENTS
        }
        values = {moment: format.read(parts[moment], chunk.lead).to(wide) for moment, format in self.moments.items()}
        update = fused_update if self.fused else written_out_update
        update(main, here["gradient"].to(wide), values["exp_avg"], values["exp_avg_sq"], step, group)
        bits = self._noise(chunk, step, weight.device)
        for number, (moment, format) in enumerate(self.moments.items()):
            random = None if bits is None else noise(bits, number)
            format.write(values[moment], parts[moment], chunk.lead, random)
        if "remainder" in here:
            split_into(main, weight, here["remainder"])
        elif main is not weight:
            weight.copy_(main)

    def _noise(self, chunk: Chunk, step: int, device: torch.device) -> Tensor | None:
        if not self.format.stochastic:
            return None
        piece = chunk.piece
        indices = global_indices(piece.shard.shape, piece.boxes, chunk.start, chunk.stop, device)
        return element_hash(indices, noise_key(self.seed, step, piece.name), prod(piece.shard.shape))

    # ---- checkpoints ----

    def saved_kinds(self, parameter: nn.Parameter) -> dict[str, SavedKind]:
        return saved_kinds(self.format)

    @torch.no_grad()
    def saved_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Moments as they are read, in the shape of the rank's part, on the host where states are there."""
        self.staging.finish()
        state, local = self._state(parameter), local_of(parameter)
        saved = {"step": torch.tensor(float(_number(state["step"])))}
        for moment, format in self.moments.items():
            stored = self._stored(state, moment)
            values = format.read(stored, self._lead(parameter)).to(format.saved_dtype)
            saved[moment + format.suffix] = values.view(local.shape)
        return saved

    @torch.no_grad()
    def load_saved(self, parameter: nn.Parameter, saved: Mapping[str, Tensor]) -> None:
        """The inverse; what was read is stored again without loss."""
        self.staging.finish()
        state, lead = self._state(parameter), self._lead(parameter)
        state["step"] = int(saved["step"])
        for moment, format in self.moments.items():
            stored, values = self._stored(state, moment), saved[moment + format.suffix].reshape(-1)
            wide = torch.promote_types(values.dtype, torch.float32)
            format.write(values.to(stored[""].device, wide), stored, lead, None)

    def stored_state(self, parameter: nn.Parameter) -> dict[str, Tensor | int]:
        self.staging.finish()
        return super().stored_state(parameter)

    def _stored(self, state: Mapping[str, int | Tensor], moment: str) -> dict[str, Tensor]:
        names = (moment, moment + "_scale")
        return {name.removeprefix(moment): _tensor(state[name]) for name in names if name in state}

    def _completes(self, parameter: nn.Parameter) -> bool:
        """Whether the weight has a remainder; weights that are kept wide have none."""
        return self.format.remainder and parameter.dtype == torch.bfloat16

    def on_host(self, parameter: Tensor) -> bool:
        return self.format.on != "device"

    def main_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        return torch.float32 if self._completes(parameter) else parameter.dtype

    @torch.no_grad()
    def main_weight(self, parameter: nn.Parameter) -> Tensor:
        if not self._completes(parameter):
            return super().main_weight(parameter)
        self.staging.finish()
        weight, remainder = flat(parameter), _tensor(self._state(parameter)["remainder"])
        return join(weight, remainder.to(weight.device)).view(local_of(parameter).shape)

    @torch.no_grad()
    def set_main_weight(self, parameter: nn.Parameter, values: Tensor) -> None:
        if not self._completes(parameter):
            return super().set_main_weight(parameter, values)
        self.staging.finish()
        weight, stored = flat(parameter), _tensor(self._state(parameter)["remainder"])
        remainder = torch.empty_like(stored, device=weight.device)
        split_into(values.to(weight.device, torch.float32).reshape(-1), weight, remainder)
        stored.copy_(remainder)

    def forget(self, parameter: nn.Parameter) -> None:
        remainder = self.state.get(parameter, {}).get("remainder")
        super().forget(parameter)
        if remainder is not None:
            _tensor(self._state(parameter)["remainder"]).copy_(remainder)


def saved_kinds(format: StateFormat) -> dict[str, SavedKind]:
    kinds = {"step": SavedKind(torch.float32, single=True)}
    for moment, stored in zip(MOMENTS, moment_formats(format.moments), strict=True):
        kinds[moment + stored.suffix] = SavedKind(stored.saved_dtype, single=False)
    return kinds


def fused_update(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, group: Mapping[str, object]
) -> None:
    """torch's kernel: every value is read and written once."""
    beta1, beta2, lr, eps, decay = _numbers(group)
    count = torch.full((), float(step), dtype=torch.float32, device=weight.device)
    torch._fused_adamw_(
        [weight],
        [gradient],
        [first],
        [second],
        [],
        [count],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def written_out_update(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, group: Mapping[str, object]
) -> None:
    """Operation by operation as torch's for_loop."""
    beta1, beta2, lr, eps, decay = _numbers(group)
    weight.mul_(1 - lr * decay)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (second.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
    weight.addcdiv_(first, denominator, value=-lr / (1 - beta1**step))


def _numbers(group: Mapping[str, object]) -> tuple[float, float, float, float, float]:
    lr, betas, eps, decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    assert isinstance(betas, tuple) and isinstance(lr, float) and isinstance(eps, float) and isinstance(decay, float)
    return betas[0], betas[1], lr, eps, decay


def flat(tensor: Tensor) -> Tensor:
    """The rank's elements in one dim. Parameters are contiguous, so that this is a view; of a gradient it may copy."""
    return local_of(tensor).detach().reshape(-1)


def _tensor(value: int | Tensor) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _number(value: int | Tensor) -> int:
    assert isinstance(value, int)
    return value
