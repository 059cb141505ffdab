"""One run: the root of the configuration tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from moefold.config.data import DataConfig
from moefold.config.memory import MemoryConfig
from moefold.config.model import ModelConfig
from moefold.config.optim import OptimConfig
from moefold.config.parallel import ParallelConfig
from moefold.config.precision import KernelsConfig, PrecisionConfig
from moefold.config.strict import STRICT
from moefold.config.train import TrainConfig


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run; equal configs on equal worlds compute the same numbers.

    Frozen: `load_run(run, changes)` makes a changed copy, and refuses keys and values that do not exist.

    >>> import moefold
    >>> run = moefold.load_run("deepseek_v3")
    >>> isinstance(run, moefold.RunConfig), run.model.moe.num_experts, run.model.moe.top_k
    (True, 256, 8)
    """

    __pydantic_config__: ClassVar = STRICT

    name: str = "run"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
