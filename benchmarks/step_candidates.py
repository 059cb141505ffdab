"""Candidates of `benchmarks.step`: the step by hand, moefold's, and transformers' Trainer with either experts backend.

All make one optimizer step of the same model, from the same initial parameters, on the same tokens: forward, backward,
gradient norm, clipping, AdamW, and dropping the gradients.
"""

from __future__ import annotations

from torch import Tensor

from benchmarks.runner import Builder, Options
from benchmarks.step_by_hand import StepByHand, run_of
from benchmarks.step_hf_trainer import trainer
from benchmarks.timed_layer import saved_for_backward
from moefold.bench.step_bench import TrainStep
from moefold.nn.batch import Batch
from moefold.pipeline.pipeline_state import objective_of


class MoefoldStep(TrainStep):
    def __init__(self, options: Options) -> None:
        super().__init__(run_of(options))

    def saved_bytes(self, prepared: list[Batch]) -> int:
        def forward() -> Tensor:
            output = self.local_model.model(prepared[0])
            objective = objective_of(self.local_model, output, prepared[0])
            assert objective is not None
            return objective

        return saved_for_backward(forward, self.local_model.model.parameters())


BASELINES: dict[str, Builder] = {"hand-written": StepByHand}
MOEFOLD: dict[str, Builder] = {"moefold": MoefoldStep}
PEERS: dict[str, Builder] = {
    "Trainer eager": trainer("eager"),
    "Trainer grouped_mm": trainer("grouped_mm"),
}
CANDIDATES = BASELINES | MOEFOLD | PEERS
