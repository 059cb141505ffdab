"""moefold's own step, by the path that `moefold train` takes: a share of the model, an order of actions, one update."""

from __future__ import annotations

from torch import Tensor

from moefold.bench.runner import Options
from moefold.bench.saved_bytes import saved_for_backward
from moefold.bench.single_rank import optimizer_of, single_rank_model
from moefold.bench.steps.task import run_of, step_tokens
from moefold.nn.batch import Batch, whole_batch
from moefold.pipeline.pipeline_state import StepSums, objective_of
from moefold.pipeline.step import StepResult, run_step


class OurStep:
    def __init__(self, options: Options) -> None:
        self.run_config = run_of(options)
        self.local_model = single_rank_model(self.run_config)
        self.optimizer = optimizer_of(self.local_model)
        self.last: StepResult | None = None

    def prepare(self, seed: int) -> list[Batch]:
        tokens = step_tokens(self.run_config, seed)
        total = tokens[..., 1:].numel()
        return [
            whole_batch(
                microbatch[:, :-1].flatten(),
                microbatch[:, 1:].flatten(),
                (self.run_config.data.seq_len,) * microbatch.shape[0],
                step_labels=total,
                step_tokens=total,
                step_sequences=tokens.shape[0] * tokens.shape[1],
            )
            for microbatch in tokens
        ]

    def run(self, prepared: list[Batch]) -> None:
        self.last = run_step(self.local_model, self.optimizer, prepared, skip_reason=_look)

    def saved_bytes(self, prepared: list[Batch]) -> int:
        def forward() -> Tensor:
            output = self.local_model.model(prepared[0])
            objective = objective_of(self.local_model, output, prepared[0])
            assert objective is not None
            return objective

        return saved_for_backward(forward, self.local_model.model.parameters())


def _look(sums: StepSums, norm: Tensor) -> None:
    """The trainer reads these numbers at every step, and so does this."""
    float(sums.loss), float(norm), [float(each) for each in sums.balance]
