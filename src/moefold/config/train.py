"""Number of steps, logging, checkpoints, and what happens to a step that goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from moefold.config.strict import STRICT


@dataclass(frozen=True)
class DpoConfig:
    """DPO on preference pairs, in place of the next token's cross entropy."""

    __pydantic_config__: ClassVar = STRICT

    # How far the policy may go from the reference: rewards are beta times the difference of log-probs.
    beta: float = 0.1
    # A checkpoint of the reference's weights, as `moefold dpo` writes it. None: the model without its adapters.
    reference: str | None = None


@dataclass(frozen=True)
class SavingConfig:
    """How often checkpoints are saved, how many are kept, whether training waits for them, and what if one fails."""

    __pydantic_config__: ClassVar = STRICT

    # Steps between checkpoints; 0 saves only at the end and on a signal.
    every: int = 100
    # How many verified checkpoints are kept; older ones are deleted only after a newer one was read back.
    keep: int = 2
    # Checkpoints at multiples of this many steps are never deleted; 0 for none.
    keep_every: int = 0
    # Write in a thread while training continues.
    background: bool = True
    # A save that failed is tried again this often, from the copies that it made, while training continues.
    retries: int = 3
    # Steps to the first retry; each further one waits twice as long.
    retry_after: int = 1
    # After the last retry, or if the next save is due before: train without this checkpoint, or stop the run.
    on_failure: Literal["skip", "stop"] = "skip"
    # Stop after this many skipped checkpoints in a row; 0: never.
    max_failures: int = 10
    # A save is not begun unless the disk has this many times its bytes free; 0: not checked.
    free_space: float = 1.0
    # Steps between copies of the state in host memory, from which a run resumes that lost a process or a host; 0: none.
    memory_every: int = 0
    # Copy committed checkpoints to a second place, below NAME: file:///DIRECTORY, s3://BUCKET/PREFIX; None: nowhere.
    upload: str | None = None


@dataclass(frozen=True)
class HealthConfig:
    """A step whose loss or gradient is not finite is skipped on all ranks and changes no state."""

    __pydantic_config__: ClassVar = STRICT

    # Also skip steps whose loss or gradient norm is this many standard deviations above its recent mean; 0: never.
    spike_sigma: float = 0.0
    spike_window: int = 128
    # Stop the run after this many skipped steps in a row.
    max_consecutive_skips: int = 10


@dataclass(frozen=True)
class WatchdogConfig:
    """When ranks that `--nproc` has started are taken to hang: they are ended, and restarted from a checkpoint."""

    __pydantic_config__: ClassVar = STRICT

    # No rank has progressed for this long, and for `steps` of the slowest recent steps; 0: never.
    seconds: float = 10.0
    steps: float = 5.0


@dataclass(frozen=True)
class CorruptionConfig:
    """Silent corruption: hashes of parameters and optimizer states are compared between replicas, and over a step."""

    __pydantic_config__: ClassVar = STRICT

    # Steps between comparisons, which are also made before every checkpoint and copy in memory; 0: never.
    every: int = 100
    # What follows if replicas differ or memory changed: train again from the last checkpoint that agreed, or stop;
    # exclude: also take the ranks out of the run that are known to be wrong.
    on_mismatch: Literal["roll_back", "stop", "exclude"] = "roll_back"


@dataclass(frozen=True)
class StragglersConfig:
    """When a rank is taken to be slow: its peers take less than `ratio` of its own work, `windows` times in a row."""

    __pydantic_config__: ClassVar = STRICT

    # Steps over which ranks measure their own work before they compare it; 0: never.
    window: int = 20
    ratio: float = 0.75
    windows: int = 3
    # What follows: it is named, or also taken out of the run.
    on_found: Literal["warn", "exclude"] = "warn"


@dataclass(frozen=True)
class ProfileConfig:
    """Steps whose time is accounted for on every rank: compute, exposed communication per axis, bubble, host, data."""

    __pydantic_config__: ClassVar = STRICT

    # A profiled step every so many steps; 0: none, and nothing is stamped.
    every: int = 0
    # Also write a Chrome/Perfetto trace of all ranks for each of them.
    trace: bool = False
    # Name the spans for another tool. nvtx: ranges that nsys shows; torch: torch's profiler, a trace per rank and step.
    ranges: Literal["none", "nvtx", "torch"] = "none"


@dataclass(frozen=True)
class RoutingTraceConfig:
    """The experts that every token of some steps took: written down, and taken again."""

    __pydantic_config__: ClassVar = STRICT

    # Record steps into directory/NAME/routing until it has so many; 0: none. A step takes 2 bytes per token, MoE layer
    # and assignment.
    steps: int = 0
    # A directory of recorded steps, whose experts routers take in the place of their own choice; null: none.
    replay: str | None = None


@dataclass(frozen=True)
class ElasticConfig:
    """Ranks that are gone for good: the run goes on with fewer of them, in another layout, on the same batches."""

    __pydantic_config__: ClassVar = STRICT

    # The fewest ranks to go on with. null: half of those that --nproc started, and under torchrun as few as it starts.
    # As many as the run has: never with fewer.
    min_world: int | None = None


@dataclass(frozen=True)
class HostConfig:
    """What the process of a rank does beside its step: docs/host-overhead.md."""

    __pydantic_config__: ClassVar = STRICT

    # When Python looks for reference cycles. automatic: when it has allocated enough, on every rank at another moment.
    # manual: on all ranks after the same steps, `gc_every` apart, and nothing that was made at the start is searched.
    gc: Literal["automatic", "manual"] = "automatic"
    gc_every: int = 50
    # Which cores a rank runs on. none: any. cores: its share of the host's, memory node by memory node. gpu: its share
    # of those next to its GPU; on CPUs as cores.
    bind: Literal["none", "cores", "gpu"] = "none"


@dataclass(frozen=True)
class TrainConfig:
    """The run's length and what it writes into `directory/NAME`."""

    __pydantic_config__: ClassVar = STRICT

    # 0: not said, and the run can be planned and proved, but not trained.
    steps: int = 0
    directory: str = "runs"
    log_every: int = 10
    # Steps between validations; 0 validates only at the end.
    validate_every: int = 0
    validate_batches: int = 4
    tensorboard: bool = False
    # A Weights & Biases project; None keeps it off.
    wandb: str | None = None
    # An MLflow experiment; None keeps it off.
    mlflow: str | None = None
    # Learn from preference pairs; None: from the next token.
    dpo: DpoConfig | None = None
    saving: SavingConfig = field(default_factory=SavingConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    corruption: CorruptionConfig = field(default_factory=CorruptionConfig)
    stragglers: StragglersConfig = field(default_factory=StragglersConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    host: HostConfig = field(default_factory=HostConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    routing_trace: RoutingTraceConfig = field(default_factory=RoutingTraceConfig)
