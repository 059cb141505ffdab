"""Who takes part in `bench step`: the step by hand, moefold's, and the Trainer with either way to run experts."""

from __future__ import annotations

from moefold.bench.runner import Builder
from moefold.bench.steps.by_hand import StepByHand
from moefold.bench.steps.hf_trainer import trainer
from moefold.bench.steps.ours import OurStep

BARE: dict[str, Builder] = {"hand-written": StepByHand}
OURS: dict[str, Builder] = {"moefold": OurStep}
PEERS: dict[str, Builder] = {
    "Trainer eager": trainer("eager"),
    "Trainer grouped_mm": trainer("grouped_mm"),
}
CONTESTANTS = BARE | OURS | PEERS
