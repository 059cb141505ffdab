"""The optimizer, its hyper-parameters by group of parameters, and the lr schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from moefold.config.strict import STRICT

OptimImplementation = Literal["fused", "foreach", "for_loop"]
NewtonSchulzCoefficients = Literal["quintic", "you", "polar_express"]


@dataclass(frozen=True)
class LRPhaseConfig:
    """A share of the run's steps, at whose end the lr is `to` times the peak lr."""

    __pydantic_config__: ClassVar = STRICT

    share: float
    to: float
    # How it gets there. constant: at once, at the beginning of the phase.
    shape: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True)
class LRScheduleConfig:
    """Linear warmup over `warmup` steps, then a decay to `floor` times the peak lr."""

    __pydantic_config__: ClassVar = STRICT

    # wsd (warmup, stable, decay): constant after warmup, then linear decay over the last `decay` steps. phases: one
    # after the other, as published schedules of several parts are; warmup is inside of the first.
    kind: Literal["constant", "linear", "cosine", "wsd", "phases"] = "constant"
    warmup: int = 0
    decay: int = 0
    floor: float = 0.0
    phases: tuple[LRPhaseConfig, ...] = ()


@dataclass(frozen=True)
class MuonConfig:
    """Muon: momentum, orthogonalised by Newton-Schulz iterations, for hidden matrices; AdamW updates the rest."""

    __pydantic_config__: ClassVar = STRICT

    momentum: float = 0.95
    nesterov: bool = True
    # Newton-Schulz iterations, and the published set of coefficients that they use (optim/newton_schulz.py).
    iterations: int = 5
    coefficients: NewtonSchulzCoefficients = "quintic"
    # The format of the iterations. bfloat16: as the papers do on GPUs; a float64 run iterates in float64.
    compute: Literal["float32", "bfloat16"] = "float32"
    # The update's root mean square is made about this, by a factor rms * sqrt(max(rows, columns)) (Moonlight), so that
    # AdamW's lr and weight decay serve both.
    rms: float = 0.2


@dataclass(frozen=True)
class ParamGroupConfig:
    """Parameters whose name matches a pattern (`fnmatch`), and what is different for them; the first match counts."""

    __pydantic_config__: ClassVar = STRICT

    match: str
    # Times `optim.lr`; None: as `optim` says.
    lr_scale: float = 1.0
    weight_decay: float | None = None
    algorithm: Literal["adamw", "muon"] | None = None


@dataclass(frozen=True)
class OptimConfig:
    """AdamW or Muon with weight decay on matrices only, and clipping by the global gradient norm."""

    __pydantic_config__: ClassVar = STRICT

    # muon: hidden matrices by Muon, embeddings, head, norms, biases and routers by AdamW.
    algorithm: Literal["adamw", "muon"] = "adamw"
    muon: MuonConfig = field(default_factory=MuonConfig)
    # QK-clip (MuonClip): after an update, query and key weights of a head whose largest logit of the step exceeds this
    # are scaled down. None: off.
    qk_clip: float | None = None
    groups: tuple[ParamGroupConfig, ...] = ()
    # The peak. 0: not said, and the run can be planned and proved, but not trained.
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    # torch's implementation of the update. fused: one kernel over many parameters, on GPUs and CPUs. foreach: a kernel
    # per operation over many parameters, with temporary copies. for_loop: a dozen operations for every parameter.
    implementation: OptimImplementation = "fused"
    # adapters: those of model.lora alone; all other parameters have no gradients, no optimizer states, and no main
    # weights in a wider format.
    trained: Literal["all", "adapters"] = "all"
    # Further parameters that are not updated: patterns (`fnmatch`) of names, such as `*.router.*`.
    frozen: tuple[str, ...] = ()
    lr_schedule: LRScheduleConfig = field(default_factory=LRScheduleConfig)
