"""moefold: plan, prove and train Mixture-of-Experts language models.

`__all__` is the public API: it and the keys of the configuration follow semantic versioning; everything else is
internal. Names are imported when they are first used, so that `import moefold` imports neither torch nor pydantic, and
`load_run`, `check` and `plan` never import torch. `moefold.rl` has the names for reinforcement learning. Type checkers
read `__init__.pyi`.
"""

from __future__ import annotations

import sys
from types import ModuleType

__version__ = "0.2.0"

# The module that defines each name.
_SOURCES = {
    "Callback": "moefold.train.callback",
    "Control": "moefold.train.callback",
    "Evaluation": "moefold.train.callback",
    "LanguageModel": "moefold.api.local_models",
    "MoELayer": "moefold.api.local_models",
    "MoefoldError": "moefold.errors",
    "Plan": "moefold.api.plans",
    "Problem": "moefold.errors",
    "RoutingPolicy": "moefold.moe.routing_policies",
    "RunConfig": "moefold.config.run",
    "RunInfo": "moefold.train.callback",
    "StepRecord": "moefold.train.callback",
    "TopKAssignment": "moefold.moe.routing_policies",
    "Trainer": "moefold.train.trainer",
    "Verdict": "moefold.prove.verdict",
    "build_model": "moefold.api.local_models",
    "check": "moefold.api.runs",
    "load_run": "moefold.api.runs",
    "plan": "moefold.api.plans",
    "prove": "moefold.api.proofs",
}

__all__ = [  # noqa: RUF022
    "load_run",
    "check",
    "plan",
    "prove",
    "build_model",
    "MoELayer",
    "Trainer",
    "Callback",
    "RoutingPolicy",
    "RunConfig",
    "Problem",
    "Plan",
    "Verdict",
    "LanguageModel",
    "TopKAssignment",
    "RunInfo",
    "StepRecord",
    "Evaluation",
    "Control",
    "MoefoldError",
]


def _public(name: str) -> object:
    import importlib

    try:
        return getattr(importlib.import_module(_SOURCES[name]), name)
    except ModuleNotFoundError as error:
        from moefold.errors import missing_torch

        if (explained := missing_torch(error, f"moefold.{name}")) is None:
            raise
        raise explained from error


def __getattr__(name: str) -> object:
    if name == "rl":
        import importlib

        return importlib.import_module("moefold.rl")
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _public(name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `moefold.plan` and `moefold.prove` the functions.

    Importing a module of the packages of these names would put the packages in their place: Python sets a submodule as
    an attribute of its parent. `from moefold.plan.predict import predict` works as always.
    """

    @property
    def plan(self) -> object:
        return _public("plan")

    @plan.setter
    def plan(self, package: ModuleType) -> None: ...

    @property
    def prove(self) -> object:
        return _public("prove")

    @prove.setter
    def prove(self, package: ModuleType) -> None: ...


sys.modules[__name__].__class__ = _Package
