"""Frameworks' own validators beside the planner's rules about them: where they are installed, at night.

    python -m tests.framework_validators record   verdicts on drawn settings, into tests/brain/framework_verdicts.json
    python -m tests.framework_validators check    the same drawn again: the installed release says what was recorded
    python -m tests.framework_validators plans    40 questions; what each proposes is given to the validator

Needs megatron-core or torchtitan beside torch, on any machine: no GPU, no process group. Whatever only asks which
Transformer Engine is installed is answered with a new one, because that is no property of a layout.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import random
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from moefold.api.runs import load_run
from moefold.errors import MoefoldError
from moefold.hardware.cluster import cluster_of
from moefold.plan.framework_rules import release_of
from moefold.plan.launch_command import settings_of, stage_string
from moefold.plan.search.candidates import choice_of_workload
from moefold.plan.search.proposal import Question, propose
from moefold.plan.search.search import NothingFitsError
from moefold.plan.search.space import limits_of

RECORDED = Path(__file__).parent / "brain" / "framework_verdicts.json"
Settings = Mapping[str, Any]

# Settings of which nothing is refused, and what else each may be.
PLAIN: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "num_moe_experts": 8,
    "moe_token_dispatcher_type": "alltoall",
    "cuda_graph_impl": "none",
    "bf16": True,
    "mtp_num_layers": None,
}
OTHERWISE: dict[str, list[Any]] = {
    "pipeline_model_parallel_size": [1],
    "virtual_pipeline_model_parallel_size": [None],
    "expert_model_parallel_size": [1],
    "num_moe_experts": [None],
    "dispatch": ["allgather", "deepep", "hybridep"],
    "overlap_moe_expert_parallel_comm": [True],
    "delay_wgrad_compute": [True],
    "recompute": [
        ["full"],
        ["moe"],
        ["layernorm"],
        ["moe_act"],
        ["mlp"],
        ["mla_up_proj"],
        ["core_attn"],
        ["attention"],
    ],
    "graphs": [["local"], ["full_iteration"], ["attn"], ["attn", "moe_router", "moe_preprocess"], ["moe_preprocess"]],
    "precision": ["fp16", "fp32", "tensorwise", "delayed", "blockwise", "mxfp8", "rowwise"],
    "mtp_num_layers": [1, 2],
    "multi_latent_attention": [True],
    "moe_shared_expert_overlap": [True],
    "moe_paged_stash": [True],
    "cpu_offloading": [True],
}
FORMATS = ("tensorwise", "delayed", "blockwise", "mxfp8", "rowwise")


def drawn(number: int) -> list[dict[str, Any]]:
    """Settings with up to four things other than `PLAIN`; every pair of changes with the overlap or with graphs."""
    draw, found = random.Random(19), [dict(PLAIN)]
    single = [(name, value) for name, values in OTHERWISE.items() for value in values]
    found += [_changed([one]) for one in single]
    special = [one for one in single if one[0] in ("overlap_moe_expert_parallel_comm", "graphs")]
    found += [_changed([one, other]) for one in special for other in single if one[0] != other[0]]
    while len(found) < number:
        names = draw.sample(list(OTHERWISE), draw.randint(2, 4))
        found.append(_changed([(name, draw.choice(OTHERWISE[name])) for name in names]))
    return found


def _changed(changes: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(PLAIN)
    for name, value in changes:
        made |= _written(name, value)
    if made.get("num_moe_experts") is None:
        made |= {"expert_model_parallel_size": 1}
    return made


def _written(name: str, value: Any) -> dict[str, Any]:
    if name == "dispatch":
        flex = value != "allgather"
        return {
            "moe_token_dispatcher_type": "flex" if flex else value,
            "moe_flex_dispatcher_backend": value if flex else None,
        }
    if name == "recompute":
        whole = value == ["full"]
        return {"recompute_granularity": "full" if whole else "selective", "recompute_modules": [] if whole else value}
    if name == "graphs":
        whole = value[0] in ("local", "full_iteration")
        return {
            "cuda_graph_impl": value[0] if whole else "transformer_engine",
            "cuda_graph_modules": [] if whole else value,
        }
    if name == "precision":
        words = {"bf16": value in FORMATS, "fp16": value == "fp16"}
        return {**words, "fp8": "e4m3", "fp8_recipe": value} if value in FORMATS else words
    return {name: value}


# ---- Megatron's validator ----


def megatron_release() -> str:
    for _ in range(8):
        try:
            importlib.import_module("megatron.core.transformer.transformer_config")
            break
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] not in ("triton", "google"):
                raise
            # Kernels are imported and never called here.
            sys.modules[error.name] = MagicMock(
                __spec__=importlib.machinery.ModuleSpec(error.name, None), __version__="3.4.0", __path__=[]
            )
    return str(importlib.import_module("megatron.core").__version__)


def megatron_verdict(settings: Settings, release: str) -> str | None:
    """The words with which `TransformerConfig` refuses, or None."""
    module: Any = importlib.import_module("megatron.core.transformer.transformer_config")
    module.is_te_min_version = lambda *args, **names: True
    latent = settings.get("multi_latent_attention")
    kind = module.MLATransformerConfig if latent else module.TransformerConfig
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recipe = settings.get("fp8_recipe")
            if recipe is not None:
                recipe = importlib.import_module("megatron.core.enums").Fp8Recipe(recipe)
            kind(**_keywords(settings, release_of(release)) | ({"fp8_recipe": recipe} if recipe else {}))
    except (AssertionError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        return " ".join(str(error).split())[:160] or type(error).__name__
    return None


def _keywords(settings: Settings, release: tuple[int, ...]) -> dict[str, Any]:
    """Settings as `TransformerConfig` takes them in that release."""
    torch = importlib.import_module("torch")
    moe = settings.get("num_moe_experts") is not None
    sizes = {
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "ffn_hidden_size": 128,
    }
    made: dict[str, Any] = {
        **sizes,
        "pipeline_dtype": torch.bfloat16,
        "add_bias_linear": False,
        "gated_linear_unit": True,
    }
    made |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_activation_fusion": False}
    if moe:
        made |= {"moe_ffn_hidden_size": 64, "moe_grouped_gemm": True, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0}
    if settings.get("moe_shared_expert_overlap"):
        made["moe_shared_expert_intermediate_size"] = 64
    made |= {name: value for name, value in settings.items() if value is not None and name not in _NOT_ITS_OWN}
    if not settings.get("moe_paged_stash"):
        # Older releases do not know the name.
        made.pop("moe_paged_stash", None)
    graphs = "cuda_graph_modules" if release >= (0, 18) else "cuda_graph_scope"
    made[graphs] = list(settings.get("cuda_graph_modules") or ())
    if release < (0, 18) and settings.get("cuda_graph_impl") == "full_iteration":
        made |= {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}
    if settings.get("recompute_granularity") == "full":
        made |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    made["recompute_modules"] = list(settings.get("recompute_modules") or ())
    if settings.get("cpu_offloading"):
        made |= {"cpu_offloading_num_layers": 2}
    if settings.get("moe_paged_stash") and release >= (0, 18):
        made |= {"moe_expert_rank_capacity_factor": 1.5, "use_transformer_engine_op_fuser": True}
    return made


# Arguments of the optimizer and of data parallelism, and what is written above.
_NOT_ITS_OWN = (
    "use_megatron_fsdp",
    "use_distributed_optimizer",
    "cuda_graph_modules",
    "recompute_modules",
    "fp8_recipe",
)


def layout_verdict(stages: str, pp: int, layers: int, mtp: int) -> str | None:
    """The words with which Megatron refuses a stage string, or None."""
    module = importlib.import_module("megatron.core.transformer.pipeline_parallel_layer_layout")
    try:
        module.PipelineParallelLayerLayout(stages, pp).validate_layer_layout(layers, mtp or None)
    except (AssertionError, ValueError, KeyError, IndexError, NotImplementedError) as error:
        return " ".join(str(error).split())[:160] or type(error).__name__
    return None


def _rows() -> list[dict[str, Any]]:
    return [{name: value for name, value in each.items() if value is not None} for each in drawn(600)]


def record() -> int:
    release, rows = megatron_release(), _rows()
    known: dict[str, Any] = json.loads(RECORDED.read_text("utf-8")) if RECORDED.exists() else {"settings": rows}
    if known["settings"] != rows:
        raise SystemExit(f"{RECORDED}: recorded of other settings; remove it and record every release again")
    messages: list[str | None] = known.get("messages", [None])
    said = [megatron_verdict(each, release) for each in rows]
    messages += [each for each in dict.fromkeys(said) if each not in messages]
    verdicts = known.get("verdicts", {}) | {release: [messages.index(each) for each in said]}
    table = {name: ",\n".join(map(json.dumps, each)) for name, each in (("settings", rows), ("messages", messages))}
    held = ",\n".join(f"{json.dumps(key)}: {json.dumps(verdicts[key])}" for key in sorted(verdicts))
    lists = "".join(f'"{name}": [\n{lines}\n],\n' for name, lines in table.items())
    RECORDED.write_text(f'{{"package": "megatron-core",\n{lists}"verdicts": {{\n{held}\n}}}}\n', "utf-8")
    print(f"megatron-core {release}: {sum(each is not None for each in said)} of {len(rows)} refused")
    return 0


def check() -> int:
    release, known = megatron_release(), json.loads(RECORDED.read_text("utf-8"))
    if release not in known["verdicts"]:
        print(f"megatron-core {release} was not recorded: {', '.join(known['verdicts'])} were")
        return 1
    pairs = zip(known["settings"], known["verdicts"][release], strict=True)
    # The first message is that there is none.
    other = [settings for settings, said in pairs if (megatron_verdict(settings, release) is None) != (said == 0)]
    print(f"megatron-core {release}: {len(other)} of {len(known['settings'])} verdicts are others than recorded")
    return 1 if other else 0


# ---- what the planner proposes ----

MODELS = ("qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3", "mixtral_8x7b", "gpt_oss_120b")
CLUSTERS = (("H100", 64), ("H100", 1024), ("GB200", 64), ("B200", 256))
FRAMEWORKS = ("megatron", "fsdp2")


def questions() -> list[Question]:
    return [
        Question(run=load_run(model), name=model, cluster=cluster_of(gpu, gpus), framework=framework)  # type: ignore[arg-type]
        for model in MODELS
        for gpu, gpus in CLUSTERS
        for framework in FRAMEWORKS
    ]


def plans() -> int:
    release, wrong, answered = megatron_release(), 0, 0
    for question in questions():
        where = f"{question.framework} {question.name} {question.cluster.gpu.name} x{question.cluster.num_gpus}"
        try:
            chosen = propose(question).chosen
        except NothingFitsError as error:
            print(f"{where}: {str(error)[:120]}")
            continue
        except MoefoldError as error:
            print(f"{where}: {error}")
            wrong += 1
            continue
        answered += 1
        workload = chosen.workload
        settings = settings_of(choice_of_workload(workload), limits_of(workload))
        words = (
            megatron_words(workload, settings, release) if question.framework == "megatron" else titan_words(settings)
        )
        used = chosen.memory.total / chosen.memory.capacity
        print(f"{where}: {words or 'accepted'}; {used:.1%} of the memory")
        wrong += words is not None
    print(f"megatron-core {release}: {answered} of {len(questions())} questions have an answer, {wrong} are refused")
    return 1 if wrong else 0


def megatron_words(workload: Any, settings: Settings, release: str) -> str | None:
    sizes = {"num_attention_heads": 128, "num_query_groups": 128}
    words = megatron_verdict({**settings, **sizes, "num_layers": 256}, release)
    if words is None and workload.parallel.pp > 1:
        words = layout_verdict(
            stage_string(workload), workload.parallel.pp, len(workload.model.layers), workload.model.mtp
        )
    return words


def titan_words(settings: Settings) -> str | None:
    """torchtitan's own meshes and dataclasses."""
    try:
        configs = importlib.import_module("torchtitan.config.configs")
        dims = importlib.import_module("torchtitan.distributed.parallel_dims")
    except ImportError as error:
        return f"torchtitan is not installed ({error})"
    names = ("tensor", "context", "pipeline", "expert")
    degrees = {f"{name}_parallel_degree": settings[f"{name}_parallel_degree"] for name in names}
    kinds = ("replicate", "shard")
    degrees |= {f"data_parallel_{kind}_degree": settings[f"data_parallel_{kind}_degree"] for kind in kinds}
    world = 1
    for name, size in degrees.items():
        world *= 1 if name == "expert_parallel_degree" else int(size)
    try:
        config = configs.ParallelismConfig(**degrees, pipeline_parallel_schedule=settings["pipeline_parallel_schedule"])
        dims.ParallelDims.from_config(config, world)
    except (AssertionError, ValueError, TypeError) as error:
        return " ".join(str(error).split())[:160]
    return None


if __name__ == "__main__":
    verbs = {"record": record, "check": check, "plans": plans}
    if len(sys.argv) != 2 or sys.argv[1] not in verbs:
        raise SystemExit(__doc__)
    sys.exit(verbs[sys.argv[1]]())
