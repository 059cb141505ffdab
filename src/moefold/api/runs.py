"""Find a run by name or file, change it, and list its problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moefold.checks.run_all import problems, problems_to_train
from moefold.config.data import BUILTIN
from moefold.config.loading import load_run_file, override
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem
from moefold.recipes.catalog import recipe


def load_run(source: str | Path | RunConfig, changes: Mapping[str, object] | Sequence[str] = ()) -> RunConfig:
    """A run: a recipe by its name, a YAML file by its path, or a run that is there already; with some keys changed.

    `changes` maps dotted keys to values, as numbers, lists or words; or it is a list of command-line words such as
    `["--parallel.ep", "8"]`. Text that ends in `.yaml` or `.yml`, or that has a slash, is a path. A file may inherit:
    with `recipe: NAME`, its other keys change that recipe's run. Every problem with keys and values is raised at once,
    as `ConfigError`; `check` says whether the sizes fit together.

    >>> import moefold
    >>> run = moefold.load_run("qwen3_30b_a3b_proxy", {"parallel.ep": 4})
    >>> run.parallel.ep, run.model.moe.num_experts
    (4, 16)
    >>> moefold.load_run(run, {"parallel.ep": 2}).parallel.ep
    2
    """
    if isinstance(source, RunConfig):
        run = source
    elif isinstance(source, Path) or Path(source).suffix in (".yaml", ".yml") or "/" in source:
        run = load_run_file(source, recipe)
    elif Path(source).suffix in (".json", ".toml", ".py", ".txt"):
        raise ConfigError(Problem(source, "is no recipe, and a run file is YAML", "write it as .yaml or .yml"))
    else:
        run = recipe(source)
    return override(run, changes) if changes else run


def check(run: RunConfig | str | Path, world: int | None = None, *, training: bool = True) -> list[Problem]:
    """Every problem of a run, all at once; an empty list if there is none. A name or a path is loaded first.

    With `world`, the number of ranks, also whether its layout folds and its batch divides. Token files that are on this
    machine are checked by what they say of their tokenizer and kind. With `training=False` without those problems that
    only training has: a run that names no data can be planned and proven.

    >>> import moefold
    >>> run = moefold.load_run("debug_tiny")
    >>> moefold.check(run, world=4)
    []
    >>> moefold.check("debug_tiny", world=4)
    []
    >>> [problem.path for problem in moefold.check(moefold.load_run(run, {"data.global_batch": 6}), world=4)]
    ['data.global_batch']
    """
    run = load_run(run)
    return problems_to_train(run, world) + _data_problems(run) if training else problems(run, world)


def _data_problems(run: RunConfig) -> list[Problem]:
    """A run without data of its own needs nothing of `data`, whose packages a plan in a browser does not have."""
    if all(source.path == BUILTIN for source in run.data.sources) and run.data.validation in (None, BUILTIN):
        return []
    from moefold.data.token_origin import problems_of_run

    return problems_of_run(run, only_here=True)
