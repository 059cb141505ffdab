"""Adapters in the format of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

PEFT names modules as transformers' classes do. A linear layer's pair is `MODULE.lora_A.weight` [r, in] and
`MODULE.lora_B.weight` [out, r]. Experts are stacked parameters of one module, which PEFT wraps once per parameter: the
inner wrapper, `experts.base_layer`, is of gate_up_proj where both have adapters, and the outer one of down_proj. There
A is [E r, in] with an expert's rows together, and B is [out, r E] with a rank's columns together.

PEFT takes names such as gate_proj for those of experts, also where they are a dense layer's or a shared expert's; these
are therefore listed as `target_parameters`, by which PEFT takes a name as it is. Nothing else of a PEFT configuration
changes the result here, and a file that says more is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moefold.blueprint.lora_adapters import adapter_name, adapters_of, weight_of
from moefold.blueprint.parameters import ParameterSpec, is_expert, parameters
from moefold.checkpoint.files import (
    SHARED_DIRECTORY_MODE,
    SHARED_FILE_MODE,
    fsync_directory,
    make_directory,
    remove_tree,
    rename,
    write_file,
)
from moefold.checkpoint.hf.config_maps import family_rules
from moefold.checkpoint.hf.hf_config import family_of
from moefold.checkpoint.hf.name_rules import Dims, HfTensor, hf_tensors
from moefold.checkpoint.hf.untrusted_files import WEIGHT_DTYPES, SafetensorsFile, as_bytes, header, read_object
from moefold.checkpoint.tensor_spec import TensorSource
from moefold.config.model import LoraConfig, ModelConfig
from moefold.errors import ConversionError, Problem

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_EXPERTS = "mlp.experts"
# Linear layers that PEFT would take for experts if they were listed as modules.
_TAKEN_FOR_EXPERTS = (".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3", ".gate")
# What a configuration may say: other values of these change what is computed.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "lora_bias": (False, None),
}


@dataclass(frozen=True)
class PeftTensor:
    """One tensor of a PEFT file, and the slice of one of our adapters that it is."""

    key: str
    spec: ParameterSpec
    # Gate or up of a dense layer, whose adapters are apart; else nothing.
    index: tuple[int, ...] = ()
    # Of an expert's B: the order of the weight's output dims in transformers' parameter.
    out_dims: tuple[int, ...] = ()

    @property
    def hf_tensor(self) -> HfTensor:
        """The same as a rule of names has it."""
        inner = self.spec.shape[len(self.index) :]
        dims = Dims(tuple((dim,) for dim in range(len(inner))))
        if is_expert(self.spec.name):
            experts_last = (self.out_dims, (len(inner) - 1, 0))
            dims = Dims(((0, 1), (2,)) if self.spec.kind == "lora_a" else experts_last)
        return HfTensor(self.spec.name, self.index, inner, self.key, dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.hf_tensor.hf_shape

    def to_peft(self, adapter: Tensor) -> Tensor:
        return self.hf_tensor.to_hf(adapter[self.index])

    def from_peft(self, stored: Tensor) -> Tensor:
        return self.hf_tensor.from_hf(stored)


@dataclass(frozen=True)
class PeftLayout:
    tensors: tuple[PeftTensor, ...]
    target_modules: tuple[str, ...]
    target_parameters: tuple[str, ...]


def peft_layout(model: ModelConfig) -> PeftLayout:
    """Every tensor of the adapters of ``model``, and what PEFT calls their targets."""
    base, lora = replace(model, lora=None), model.lora
    assert lora is not None
    by_name: dict[str, list[HfTensor]] = {}
    for hf_tensor in hf_tensors(family_rules(family_of(base)), base):
        by_name.setdefault(hf_tensor.moefold_name, []).append(hf_tensor)
    specs = {spec.name: spec for spec in parameters(model)}
    adapted = [spec for spec in parameters(base) if adapters_of(spec.name, spec.shape, spec.kind, lora)]
    problems = [Problem(spec.name, "PEFT knows no MTP modules") for spec in adapted if spec.name.startswith("mtp.")]
    tensors: list[PeftTensor] = []
    modules: list[str] = []
    stacked: list[str] = []
    for spec in adapted if not problems else ():
        pair = [specs[adapter_name(spec.name, kind)] for kind in ("lora_a", "lora_b")]  # type: ignore[arg-type]
        if is_expert(spec.name):
            tensors += _expert_tensors(spec, pair, by_name[spec.name], adapted)
            stacked.append(f"{_experts_module(spec)}.{'gate_up' if spec.name.endswith('gate_up') else 'down'}_proj")
            continue
        for hf_tensor in by_name[spec.name]:
            module = hf_tensor.hf_name.removesuffix(".weight")
            if module == hf_tensor.hf_name or any(len(group) > 1 for group in hf_tensor.dims.groups):
                problems.append(Problem(spec.name, f"is no linear layer of its own in {hf_tensor.hf_name}"))
            tensors += [PeftTensor(_key(module, each), each, hf_tensor.index) for each in pair]
            as_parameter = module.endswith(_TAKEN_FOR_EXPERTS)
            (stacked if as_parameter else modules).append(hf_tensor.hf_name if as_parameter else module)
    if problems:
        raise ConversionError(*problems)
    return PeftLayout(tuple(tensors), tuple(modules), tuple(stacked))


def _key(module: str, spec: ParameterSpec) -> str:
    return f"{_PREFIX}{module}.lora_{'A' if spec.kind == 'lora_a' else 'B'}.weight"


def _experts_module(spec: ParameterSpec) -> str:
    return f"model.layers.{spec.name.split('.')[1]}.{_EXPERTS}"


def _expert_tensors(
    spec: ParameterSpec, pair: list[ParameterSpec], stored: list[HfTensor], adapted: list[ParameterSpec]
) -> Iterator[PeftTensor]:
    """``adapted`` tells whether the layer's other stack of experts has adapters too."""
    both = sum(other.name.startswith(spec.name.rpartition(".")[0] + ".") for other in adapted) > 1
    inner = both and spec.name.endswith("gate_up")
    outputs = tuple(range(1, len(spec.shape) - 1))
    if len(stored) == 1:
        # One parameter for all experts: its own order of output dims, where gate and up alternate for example.
        outputs = tuple(dim for dim in stored[0].dims.order if dim in outputs)
    module = _experts_module(spec) + (".base_layer" if inner else "")
    for each in pair:
        yield PeftTensor(_key(module, each), each, (), outputs if each.kind == "lora_b" else ())


# ---- writing ----


def write_adapters(
    source: TensorSource, model: ModelConfig, out: Path, dtype: torch.dtype, base_name: str | None = None
) -> tuple[str, ...]:
    """Write the adapters in ``source`` to the new directory ``out``; ``base_name``: where the weights are."""
    if out.exists():
        raise ConversionError(Problem(str(out), "exists already", "choose another directory, or remove it"))
    layout = peft_layout(model)
    temporary = out.with_name(out.name + ".partial")
    if temporary.exists():
        remove_tree(temporary)
    make_directory(temporary, SHARED_DIRECTORY_MODE)
    try:
        write_file(temporary / WEIGHTS, _file(source, layout, dtype), SHARED_FILE_MODE)
        config = json.dumps(peft_config(model, base_name), indent=2) + "\n"
        write_file(temporary / CONFIG, [config.encode()], SHARED_FILE_MODE)
        fsync_directory(temporary)
    except BaseException:
        remove_tree(temporary)
        raise
    rename(temporary, out)
    return (CONFIG, WEIGHTS)


def _file(source: TensorSource, layout: PeftLayout, dtype: torch.dtype) -> Iterator[bytes | memoryview]:
    yield header((each.key, dtype, each.shape) for each in layout.tensors)
    for each in layout.tensors:
        yield as_bytes(each.to_peft(source.read(f"parameter/{each.spec.name}")).to(dtype).contiguous())


def peft_config(model: ModelConfig, base_name: str | None = None) -> dict[str, object]:
    """adapter_config.json of the adapters of ``model``."""
    layout, lora = peft_layout(model), model.lora
    assert lora is not None
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": list(layout.target_modules),
        "target_parameters": list(layout.target_parameters),
    }


# ---- reading ----


def read_adapters(path: Path, model: ModelConfig) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Adapters for ``model``, which has none: their configuration, and their values by our names."""
    config = read_object(path / CONFIG)
    problems = [
        Problem(f"{CONFIG}: {key}", f"is {config[key]!r}"[:200], f"only {allowed[0]!r} is read")
        for key, allowed in _PLAIN.items()
        if key in config and config[key] not in allowed
    ]
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (type(rank) is int and rank > 0 and type(alpha) in (int, float)):
        problems.append(Problem(f"{CONFIG}: r, lora_alpha", f"are {rank!r} and {alpha!r}"[:200], "two numbers"))
    if problems:
        raise ConversionError(*problems)
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    with closing(SafetensorsFile(path / WEIGHTS)) as file:
        everything = replace(model, lora=LoraConfig(rank, float(alpha), ("layers.*",)))
        lora = LoraConfig(rank, float(alpha), _targets(everything, set(file.entries), config.get("target_parameters")))
        layout = peft_layout(replace(model, lora=lora))
        found = {key: entry.shape for key, entry in file.entries.items() if entry.dtype in WEIGHT_DTYPES}
        expected = {each.key: each.shape for each in layout.tensors}
        for key in sorted(found.keys() ^ expected.keys())[:40]:
            problems.append(
                Problem(key[:120], "is missing" if key in expected else "belongs to no weight of this model")
            )
        problems += [
            Problem(key, f"has shape {found[key]}, not {shape}")
            for key, shape in expected.items()
            if key in found and found[key] != shape
        ][:40]
        if problems:
            raise ConversionError(*problems)
        specs = {each.spec.name: each.spec for each in layout.tensors}
        values = {name: torch.empty(spec.shape) for name, spec in specs.items()}
        for each in layout.tensors:
            values[each.spec.name][each.index] = each.from_peft(file.read(each.key, ())).float()
    return lora, values


def _targets(everything: ModelConfig, keys: set[str], parameters_named: object) -> tuple[str, ...]:
    """The weights whose adapters are in a file.

    A layer's experts with one wrapper have an adapter for the one parameter that the configuration names.
    """
    named = parameters_named if isinstance(parameters_named, list) else []
    only_gate_up = any(str(name).endswith("gate_up_proj") for name in named) and not any(
        str(name).endswith("experts.down_proj") or name == "down_proj" for name in named
    )
    found: dict[str, None] = {}
    for each in peft_layout(everything).tensors:
        if each.key not in keys or each.spec.kind != "lora_b":
            continue
        weight = weight_of(each.spec.name)
        if is_expert(weight) and weight.endswith("down") and only_gate_up:
            weight = weight.removesuffix("down") + "gate_up"
        found[weight] = None
    return tuple(found)
