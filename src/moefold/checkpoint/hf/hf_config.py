"""config.json -> ModelConfig and back, by the tables in `dialects`, never by the library that wrote it.

Reading: every key must be known to the family, as a size, as a fixed value or as harmless; what is left over is refused
by name, because a key that is not understood may change what the model computes. Keys that name code are never
honoured. Then the sizes pass the same checks as a run's.

Writing: a model can be written in a family if reading it back gives the same model. So there is no second list of what
each family can express: what would come back different is what stands in the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any

from moefold.checkpoint.hf.config_converters import Unreadable
from moefold.checkpoint.hf.config_maps import (
    DIALECTS,
    HARMLESS,
    NEVER_HONOURED,
    NEVER_HONOURED_STARTS,
    READABLE,
    REQUIRED,
    Dialect,
    Key,
)
from moefold.checks.model import RULES
from moefold.checks.sizes import leaves, sizes_are_bounded, sizes_are_positive
from moefold.config.loading import run_from_mapping
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, ConversionError, Problem, did_you_mean

FILE = "config.json"
_QUANTISED = "weights are quantised", "load them in transformers, `dequantize`, save as bfloat16, and convert that"


@dataclass(frozen=True)
class TheirConfig:
    """What a config.json says, in our words."""

    model_type: str
    model: ModelConfig
    context: int
    # Keys that were seen and not followed, because they would run code or choose an implementation.
    not_honoured: tuple[str, ...]

    @property
    def beside(self) -> tuple[str, ...]:
        """How names start that belong to no part of the model; tensors of that name are left out, and said to be."""
        if self.model.num_mtp:
            return ()
        return tuple(start.format(layers=self.model.num_layers) for start in READABLE[self.model_type].beside)


def read_config(config: Mapping[str, Any]) -> TheirConfig:
    dialect = _dialect(config)
    problems = list(_unknown(config, dialect)) + list(_unfit(config, dialect))
    values, more = _values(config, dialect)
    problems += more
    if problems:
        raise ConversionError(*problems)
    model = _model(dialect, values)
    context = config.get("max_position_embeddings")
    not_honoured = tuple(key for key in config if _names_code(key))
    known = context if type(context) is int and 0 < context < 2**31 else 4096
    return TheirConfig(dialect.model_type, model, known, not_honoured)


def _dialect(config: Mapping[str, Any]) -> Dialect:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in READABLE:
        hint = did_you_mean(model_type, READABLE) if isinstance(model_type, str) and model_type else ""
        message = f"{str(model_type)[:60]!r} is not a family that can be read"
        raise ConversionError(Problem(f"{FILE}: model_type", message, f"{hint}known: {', '.join(READABLE)}"))
    return READABLE[model_type]


def _unknown(config: Mapping[str, Any], dialect: Dialect) -> list[Problem]:
    known = {key.theirs for key in dialect.keys} | {name for key in dialect.keys for name in key.names}
    known |= {key for section in dialect.sections for key in section.keys} | set(dialect.fixed) | HARMLESS
    found = []
    for key in config:
        if key == "quantization_config":
            found += [] if config[key] is None else [Problem(f"{FILE}: {key}", *_QUANTISED)]
        elif key not in known and not _names_code(key):
            message = f"not known for {dialect.model_type}; it may change what the model computes"
            found.append(Problem(f"{FILE}: {key[:60]}", message, did_you_mean(key, known).rstrip()))
    return found[:50]


def _names_code(key: str) -> bool:
    return key in NEVER_HONOURED or key.startswith(NEVER_HONOURED_STARTS)


def _unfit(config: Mapping[str, Any], dialect: Dialect) -> list[Problem]:
    return [
        Problem(f"{FILE}: {key}", f"{str(config[key])[:60]!r} is not what is computed here", f"only {allowed[0]!r} is")
        for key, allowed in dialect.fixed.items()
        if key in config and not any(_same(config[key], value) for value in allowed)
    ]


def _same(a: Any, b: Any) -> bool:
    """Equal, and not merely equal to Python, for which true is 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _values(config: Mapping[str, Any], dialect: Dialect) -> tuple[dict[str, Any], list[Problem]]:
    """Dotted places of ours -> values, and what could not be read."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key in dialect.keys:
        given = {name: config[name] for name in (key.theirs, *key.names) if name in config}
        if not given and key.default is REQUIRED:
            problems.append(Problem(f"{FILE}: {key.theirs}", "is missing"))
        elif any(not _same(value, next(iter(given.values()))) for value in given.values()):
            problems.append(Problem(f"{FILE}: {key.theirs}", f"{' and '.join(given)} differ"))
        else:
            values[key.ours] = next(iter(given.values())) if given else key.default
    for section in dialect.sections:
        try:
            values |= section.read(config)
        except Unreadable as error:
            problems.append(Problem(f"{FILE}: {error.key}", str(error)))
        except TypeError:
            problems.append(Problem(f"{FILE}: {', '.join(section.keys)}", "not of the type they should be"))
    return values, problems


def _model(dialect: Dialect, values: dict[str, Any]) -> ModelConfig:
    tree = asdict(dialect.base)
    for path, value in values.items():
        *sections, leaf = path.split(".")
        inner = reduce(lambda node, name: node[name], sections, tree)
        inner[leaf] = value
    try:
        run = run_from_mapping({"model": tree})
    except ConfigError as error:
        raise ConversionError(*(_in_their_words(problem, dialect) for problem in error.problems)) from None
    found = sizes_are_bounded(run, None) or sizes_are_positive(run)
    found = found or [problem for rule in RULES if (problem := rule(run)) is not None]
    if found:
        raise ConversionError(*(_in_their_words(problem, dialect) for problem in found))
    return run.model


def _in_their_words(problem: Problem, dialect: Dialect) -> Problem:
    names = {f"model.{key.ours}": key.theirs for key in dialect.keys}
    return replace(problem, path=f"{FILE}: {names.get(problem.path, problem.path)}")


# ---- writing ----


def family_of(model: ModelConfig) -> str:
    """The family in whose words this model can be written."""
    alike = [name for name, dialect in DIALECTS.items() if _alike(model, dialect.base)]
    differences = {name: differing(model, DIALECTS[name]) for name in alike}
    best = min(differences, key=lambda name: len(differences[name]))
    if differences[best]:
        fixes = {"model.num_mtp": "leave the modules out with --no-mtp"}
        fix = f"the nearest of {', '.join(alike)} is {best}"
        raise ConversionError(*(Problem(path, why, fixes.get(path, fix)) for path, why in differences[best].items()))
    return best


def _alike(model: ModelConfig, base: ModelConfig) -> bool:
    """Both dense or both mixtures; a dense model with latent attention has no family, and mixtures say so best."""
    latent = model.attention.kind == "mla"
    return model.attention.kind == base.attention.kind and (latent or (model.moe is None) == (base.moe is None))


def differing(model: ModelConfig, dialect: Dialect) -> dict[str, str]:
    """Places of the model that would come back from the dialect as something else, with why."""
    try:
        written = _write(model, dialect)
    except AttributeError as error:
        return {"model": f"{dialect.model_type} cannot say this: {error}"}
    values, problems = _values(written, dialect)
    if problems:
        return {problem.path: problem.message for problem in problems}
    ours, theirs = dict(leaves(same_numbers(model))), dict(leaves(same_numbers(_model(dialect, values))))
    return {
        f"model.{path}": f"{dialect.model_type} cannot say {ours.get(path)!r}; it would become {theirs.get(path)!r}"
        for path in sorted({*ours, *theirs})
        if ours.get(path) != theirs.get(path)
    }


def write_config(model: ModelConfig, model_type: str, context: int, dtype: str) -> dict[str, Any]:
    """A config.json that transformers reads as this model; ``context`` is the longest sequence it is meant for."""
    yarn = model.rope.yarn
    longest = context if yarn is None else int(yarn.factor * yarn.original_context)
    return {
        "architectures": [DIALECTS[model_type].architecture],
        "model_type": model_type,
        **_write(model, DIALECTS[model_type]),
        "max_position_embeddings": longest,
        "torch_dtype": dtype,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _write(model: ModelConfig, dialect: Dialect) -> dict[str, Any]:
    written = {key.theirs: _value(model, key) for key in dialect.keys}
    for section in dialect.sections:
        written |= section.write(model)
    return written | {key: allowed[0] for key, allowed in dialect.fixed.items()}


def _value(model: ModelConfig, key: Key) -> Any:
    return reduce(getattr, key.ours.split("."), model)


def same_numbers(model: ModelConfig) -> ModelConfig:
    """One spelling for all models that compute the same: what matters only in training is at its default."""
    attention = model.attention
    if attention.kind == "gqa" and attention.window is None:
        attention = replace(attention, window_every=1)
    moe = None if model.moe is None else _plain_mixture(model.moe)
    dense_layers = model.num_dense_layers if moe is not None else 0
    uses_dense = moe is None or dense_layers > 0
    dense_hidden_dim = model.dense_hidden_dim if uses_dense else ModelConfig().dense_hidden_dim
    return replace(
        model,
        attention=attention,
        moe=moe,
        num_dense_layers=dense_layers,
        dense_hidden_dim=dense_hidden_dim,
        mtp_weight=ModelConfig().mtp_weight,
        mtp_divisor=ModelConfig().mtp_divisor,
        init_output_scale=ModelConfig().init_output_scale,
    )


def _plain_mixture(moe: MoEConfig) -> MoEConfig:
    plain, router = RouterConfig(), moe.router
    router = replace(
        router, bias_update_rate=plain.bias_update_rate, fp32=plain.fp32, sinkhorn_iterations=plain.sinkhorn_iterations
    )
    if router.num_groups == 1:
        router = replace(router, top_groups=1, group_score=plain.group_score)
    ordinary = router.score == "softmax" and router.num_groups == 1 and not router.expert_bias
    if ordinary and (router.normalize or router.score_when == "after_topk"):
        # The softmax of the chosen logits is the softmax of all of them, divided by the sum of the chosen.
        router = replace(router, normalize=True, score_when="before_topk")
    weight_at = MoEConfig().weight_at
    return replace(moe, router=router, balance=BalanceConfig(), capacity=None, weight_at=weight_at)


def run_for(found: TheirConfig, name: str) -> RunConfig:
    """A run around an imported model; everything but the model is a default to be changed."""
    run = RunConfig(name=name, model=found.model)
    return replace(run, data=replace(run.data, seq_len=min(found.context, 4096)))
