"""config.json -> ModelConfig and back, by the tables in `config_maps.py`, without transformers.

Reading: every key must be known to the family, as a size, as a fixed value or as ignored. Any other key is refused by
name, because it may change what the model computes. Keys that name code are never followed. Then the sizes pass the
same checks as a run's.

Writing: a model can be written in a family if reading it back gives the same model, so there is no second list of what
each family can express.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import NamedTuple

from moefold.checkpoint.hf import quantized_tensors
from moefold.checkpoint.hf.config_converters import HfValues, UnsupportedValueError, Values
from moefold.checkpoint.hf.config_keys import CODE_KEY_PREFIXES, CODE_KEYS, IGNORED_KEYS, REQUIRED, HfFamily, Key
from moefold.checkpoint.hf.config_maps import FAMILIES, READABLE_FAMILIES
from moefold.checkpoint.hf.quantized_tensors import Quantization, read_quantization
from moefold.checks.model import RULES
from moefold.checks.sizes import leaves, sizes_are_bounded, sizes_are_positive
from moefold.config.attention import GatedDeltaNetConfig, GQAConfig
from moefold.config.loading import run_from_mapping
from moefold.config.model import ModelConfig
from moefold.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moefold.config.optim import OptimConfig
from moefold.config.precision import Format
from moefold.config.run import RunConfig
from moefold.errors import ConfigError, ConversionError, Problem, did_you_mean

FILE = "config.json"
# Noise in training that moefold does not have.
_NOISE = ("router_jitter_noise", "input_jitter_noise")
_COMPUTED: dict[object, Format] = {"float32": "float32", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class HfConfig:
    """A config.json that was read."""

    model_type: str
    model: ModelConfig
    context: int
    # Keys that were not followed, because they would run code or select an implementation.
    not_honoured: tuple[str, ...]
    # The dtype it was trained and saved in, if the file names one that runs can compute in.
    compute: Format | None
    # Its balance losses in moefold's units, and notes on how they were converted and what was not followed.
    balance: BalanceConfig
    training_notes: tuple[str, ...]
    # How weights are stored in fewer bits than they are read in.
    quantization: Quantization | None = None

    @property
    def extra_prefixes(self) -> tuple[str, ...]:
        """Prefixes of tensors that are not part of the model; such tensors are skipped and reported."""
        if self.model.num_mtp:
            return ()
        return tuple(
            start.format(layers=self.model.num_layers) for start in READABLE_FAMILIES[self.model_type].extra_prefixes
        )


def read_config(config: HfValues) -> HfConfig:
    family = _read_family(config)
    config = _language_model(config, family)
    problems = list(_unknown_keys(config, family)) + list(_wrong_fixed_values(config, family))
    values, more = _values(config, family)
    problems += more
    quantization, more = _quantization(config)
    problems += more
    if problems:
        raise ConversionError(*problems)
    model = _model(family, values)
    context = config.get("max_position_embeddings")
    not_honoured = tuple(key for key in config if _is_code_key(key))
    known = context if type(context) is int and 0 < context < 2**31 else 4096
    compute = _COMPUTED.get(str(config.get("dtype", config.get("torch_dtype"))))
    balance, notes = read_balance(config, model)
    return HfConfig(family.model_type, model, known, not_honoured, compute, balance, notes, quantization)


def _quantization(config: HfValues) -> tuple[Quantization | None, list[Problem]]:
    try:
        return read_quantization(config.get(quantized_tensors.KEY)), []
    except ConversionError as error:
        return None, list(error.problems)


def _read_family(config: HfValues) -> HfFamily:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in READABLE_FAMILIES:
        hint = did_you_mean(model_type, READABLE_FAMILIES) if isinstance(model_type, str) and model_type else ""
        message = f"{str(model_type)[:60]!r} is not a supported family"
        raise ConversionError(Problem(f"{FILE}: model_type", message, f"{hint}known: {', '.join(READABLE_FAMILIES)}"))
    return READABLE_FAMILIES[model_type]


def _language_model(config: HfValues, family: HfFamily) -> HfValues:
    """The keys of the language model, with those outside of it that concern weights."""
    if not family.section:
        return config
    inner = config.get(family.section)
    if not isinstance(inner, dict):
        raise ConversionError(Problem(f"{FILE}: {family.section}", "is missing; it describes the language model"))
    outer = {key: value for key, value in config.items() if key == quantized_tensors.KEY or _is_code_key(key)}
    return {**outer, **inner}


def _unknown_keys(config: HfValues, family: HfFamily) -> list[Problem]:
    known = {key.hf_key for key in family.keys} | {name for key in family.keys for name in key.aliases}
    known |= {key for converter in family.converters for key in converter.keys}
    known |= {quantized_tensors.KEY, *family.fixed_values, *family.accepted_values, *family.ignored_keys, *IGNORED_KEYS}
    found = []
    for key in config:
        if key not in known and not _is_code_key(key):
            message = f"not known for {family.model_type}; it may change what the model computes"
            found.append(Problem(f"{FILE}: {key[:60]}", message, did_you_mean(key, known).rstrip()))
    return found[:50]


def _is_code_key(key: str) -> bool:
    return key in CODE_KEYS or key.startswith(CODE_KEY_PREFIXES)


def _wrong_fixed_values(config: HfValues, family: HfFamily) -> list[Problem]:
    return [
        Problem(f"{FILE}: {key}", f"{str(config[key])[:60]!r} is not supported", f"only {allowed[0]!r} is")
        for key, allowed in (*family.fixed_values.items(), *family.accepted_values.items())
        if key in config and not any(_same(config[key], value) for value in allowed)
    ]


def _same(a: object, b: object) -> bool:
    """Equal, where True is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _values(config: HfValues, family: HfFamily) -> tuple[Values, list[Problem]]:
    """Dotted fields of ModelConfig -> values, and problems."""
    values: Values = {}
    problems: list[Problem] = []
    for key in family.keys:
        given = {name: config[name] for name in (key.hf_key, *key.aliases) if name in config}
        if not given and key.default is REQUIRED:
            problems.append(Problem(f"{FILE}: {key.hf_key}", "is missing"))
        elif any(not _same(value, next(iter(given.values()))) for value in given.values()):
            problems.append(Problem(f"{FILE}: {key.hf_key}", f"{' and '.join(given)} differ"))
        else:
            values[key.path] = next(iter(given.values())) if given else key.default
    for converter in family.converters:
        try:
            values |= converter.from_hf(config)
        except UnsupportedValueError as error:
            problems.append(Problem(f"{FILE}: {error.key}", str(error)))
        except TypeError:
            problems.append(Problem(f"{FILE}: {', '.join(converter.keys)}", "have values of a wrong type"))
    return values, problems


def _model(family: HfFamily, values: Values) -> ModelConfig:
    tree = asdict(family.base)
    for path, value in values.items():
        *parents, leaf = path.split(".")
        inner = reduce(lambda node, name: node[name], parents, tree)
        inner[leaf] = value
    try:
        run = run_from_mapping({"model": tree})
    except ConfigError as error:
        raise ConversionError(*(_with_hf_key(problem, family) for problem in error.problems)) from None
    found = sizes_are_bounded(run, None) or sizes_are_positive(run)
    found = found or [problem for rule in RULES if (problem := rule(run)) is not None]
    if found:
        raise ConversionError(*(_with_hf_key(problem, family) for problem in found))
    return run.model


def _with_hf_key(problem: Problem, family: HfFamily) -> Problem:
    names = {f"model.{key.path}": key.hf_key for key in family.keys}
    return replace(problem, path=f"{FILE}: {names.get(problem.path, problem.path)}")


def read_balance(config: HfValues, model: ModelConfig) -> tuple[BalanceConfig, tuple[str, ...]]:
    """Balance losses in moefold's units, and notes on what was converted and what is not followed.

    moefold's loss of one MoE layer is E sum_e f_e P_e: f_e is expert e's share of the T K assignments of a microbatch,
    P_e its mean prob. It is 1 where the load is even, and the losses of all layers are added up.

    transformers (`router_aux_loss_coef`) puts the tokens of all L MoE layers into one row of L T tokens and counts each
    of a token's K experts as a whole: E sum_e (K f_e) P_e, with f and P over that row. One layer gives K times
    moefold's loss; L layers that route alike give K times the loss of one of them, K / L times the sum. With one layer
    this is exact, loss and gradient. With several, a product of means over layers is no sum of losses of layers; the
    two are equal where layers have equal loads.

    DeepSeek's `aux_loss_alpha` is as moefold has it, per layer and divided by K: of sequences with `seq_aux`, or else
    of the microbatch. transformers' loss is of softmax scores in every family, so it is not followed for others.
    """
    moe = model.moe
    if moe is None:
        return BalanceConfig(), ()
    notes = [f"not followed: {key} {value:g}" for key in _NOISE if (value := _number(config, key))]
    microbatch = sequence = 0.0
    layers = sum(map(model.is_moe_layer, range(model.num_layers)))
    if pooled := _number(config, "router_aux_loss_coef"):
        if moe.router.score == "softmax":
            microbatch = pooled * moe.top_k / layers
            how = f"times top_k {moe.top_k}, divided by {layers} MoE layers"
            notes.append(f"model.moe.balance.microbatch is {microbatch:g}: router_aux_loss_coef {pooled:g} {how}")
        else:
            why = f"it is a loss of softmax scores, and this router has {moe.router.score} scores"
            notes.append(f"not followed: router_aux_loss_coef {pooled:g}; {why}")
    if alpha := _number(config, "aux_loss_alpha"):
        kind = "sequence" if config.get("seq_aux", True) else "microbatch"
        microbatch, sequence = (microbatch, alpha) if kind == "sequence" else (alpha, sequence)
        notes.append(f"model.moe.balance.{kind} is {alpha:g}: aux_loss_alpha")
    return BalanceConfig(microbatch=microbatch, sequence=sequence), tuple(notes)


def _number(config: HfValues, key: str) -> float:
    value = config.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else 0.0


# ---- writing ----


def family_of(model: ModelConfig) -> str:
    """The family in which this model can be written."""
    candidates = [name for name, family in FAMILIES.items() if _same_kind(model, family.base)]
    differences = {name: differences_of(model, FAMILIES[name]) for name in candidates}
    best = min(differences, key=lambda name: differences[name].distance)
    if why := differences[best].why:
        fixes = {"model.num_mtp": "leave MTP modules out with --no-mtp"}
        fix = f"the nearest of {', '.join(candidates)} is {best}"
        raise ConversionError(*(Problem(path, said, fixes.get(path, fix)) for path, said in why.items()))
    return best


class _Differences(NamedTuple):
    """Why a family cannot express a model, by key, and in how many keys the two differ: the nearest has the fewest."""

    why: dict[str, str]
    distance: float


def _same_kind(model: ModelConfig, base: ModelConfig) -> bool:
    """Both dense or both MoE, and both hybrids or neither.

    No family has dense MLA models; MoE families then give the best error.
    """
    latent = model.attention.kind == "mla"
    if (model.linear_attention is None) != (base.linear_attention is None):
        return False
    return model.attention.kind == base.attention.kind and (latent or (model.moe is None) == (base.moe is None))


def differences_of(model: ModelConfig, family: HfFamily) -> _Differences:
    """Fields of the model that would be read back from the family with another value, and why."""
    try:
        written = _write(model, family)
    except AttributeError as error:
        return _Differences({"model": f"{family.model_type} cannot express this: {error}"}, math.inf)
    values, problems = _values(written, family)
    why = {problem.path: problem.message for problem in problems}
    try:
        found = _model(family, values)
    except ConversionError:
        # Without the values that it cannot express it is no model: as far away as a family can be.
        if not problems:
            raise
        return _Differences(why, math.inf)
    before, after = (dict(leaves(canonical_model(m))) for m in (model, found))
    fields = {
        f"model.{path}": f"{family.model_type} cannot express {before.get(path)!r}; it would become {after.get(path)!r}"
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    }
    return _Differences(why or fields, len(why) + len(fields))


def write_config(model: ModelConfig, model_type: str, context: int, dtype: str) -> Values:
    """A config.json that transformers reads as this model; ``context`` is the longest sequence it is meant for."""
    yarn = model.rope.yarn
    longest = context if yarn is None else int(yarn.factor * yarn.original_context)
    return {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        **_write(model, FAMILIES[model_type]),
        "max_position_embeddings": longest,
        "torch_dtype": dtype,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _write(model: ModelConfig, family: HfFamily) -> Values:
    written = {key.hf_key: _value(model, key) for key in family.keys}
    for converter in family.converters:
        written |= converter.to_hf(model)
    return written | {key: allowed[0] for key, allowed in family.fixed_values.items()}


def _value(model: ModelConfig, key: Key) -> object:
    return reduce(getattr, key.path.split("."), model)


def canonical_model(model: ModelConfig) -> ModelConfig:
    """Equal for all models that compute the same logits: fields that matter only in training are at their defaults."""
    attention = model.attention
    if attention.kind == "gqa":
        attention = _canonical_heads(attention)
    linear = model.linear_attention
    if linear is not None:
        linear = replace(linear, chunk_size=GatedDeltaNetConfig().chunk_size)
    moe = None if model.moe is None else _canonical_moe(model.moe)
    dense_layers = model.num_dense_layers if moe is not None else 0
    uses_dense = moe is None or dense_layers > 0
    dense_hidden_dim = model.dense_hidden_dim if uses_dense else ModelConfig().dense_hidden_dim
    return replace(
        model,
        attention=attention,
        linear_attention=linear,
        moe=moe,
        num_dense_layers=dense_layers,
        dense_hidden_dim=dense_hidden_dim,
        mtp_weight=ModelConfig().mtp_weight,
        mtp_divisor=ModelConfig().mtp_divisor,
        init_output_scale=ModelConfig().init_output_scale,
    )


def _canonical_heads(attention: GQAConfig) -> GQAConfig:
    if attention.window is None:
        attention = replace(attention, window_every=1)
    if not attention.nope_temperature:
        attention = replace(attention, nope_floor=GQAConfig().nope_floor)
    if attention.rope_dim == attention.head_dim:
        attention = replace(attention, rope_dim=None)
    return attention


def _canonical_moe(moe: MoEConfig) -> MoEConfig:
    plain, router = RouterConfig(), moe.router
    router = replace(
        router, bias_update_rate=plain.bias_update_rate, fp32=plain.fp32, sinkhorn_iterations=plain.sinkhorn_iterations
    )
    if router.num_groups == 1:
        router = replace(router, top_groups=1, group_score=plain.group_score)
    ordinary = router.score == "softmax" and router.num_groups == 1 and not router.expert_bias
    if ordinary and (router.normalize or router.score_when == "after_topk"):
        # The softmax of the top-k logits is the softmax of all logits, normalized over the top k.
        router = replace(router, normalize=True, score_when="before_topk")
    weight_at = moe.weight_at if moe.weight_at == "input" else MoEConfig().weight_at
    return replace(moe, router=router, balance=BalanceConfig(), capacity=None, weight_at=weight_at)


def run_for(found: HfConfig, name: str) -> RunConfig:
    """A run with an imported model, its balance losses, sequence length and dtype; tokens, steps and lr are for the
    user to say."""
    moe = None if found.model.moe is None else replace(found.model.moe, balance=found.balance)
    run = RunConfig(name=name, model=replace(found.model, moe=moe), optim=OptimConfig(lr=0.0))
    precision = replace(run.precision, compute=found.compute or run.precision.compute)
    return replace(run, data=replace(run.data, seq_len=found.context), precision=precision)
