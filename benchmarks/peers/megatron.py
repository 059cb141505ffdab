"""Megatron Core: its MoE layer with the sequential MLP and the all-to-all dispatcher, on a group of one rank.

It asks CUDA for streams and for the current device even where there is no GPU. Streams order work that is asynchronous
to the host; on a CPU nothing is, so stand-ins that do nothing are correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.runner import Options
from benchmarks.timed_layer import Forward, TimedLayer
from moefold.bench.layer_bench import copy_weight
from moefold.bench.layer_workload import LayerShape, Weights

_CORE = "megatron.core"


def megatron(options: Options) -> TimedLayer:
    return TimedLayer(options, _make)


def _make(shape: LayerShape, weights: Weights) -> tuple[Forward, Sequence[Tensor]]:
    if not torch.cuda.is_available():
        _replace_cuda_streams()
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    state = import_module(f"{_CORE}.parallel_state")
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel()
    routing: Any = import_module(f"{_CORE}.transformer.moe.moe_utils")
    if not hasattr(routing, "te_general_gemm"):
        # Megatron leaves it undefined where Transformer Engine is not installed, and then reads it.
        routing.te_general_gemm = None
    module = _module(shape, weights.gate_EDF.dtype)
    copy_weight(module.router.weight, weights.router_DE.t())
    for expert, gate_DF, up_DF, down_FD in zip(
        module.experts.local_experts, weights.gate_EDF, weights.up_EDF, weights.down_EFD
    ):
        copy_weight(expert.linear_fc1.weight, torch.cat((gate_DF, up_DF), dim=1).t())
        copy_weight(expert.linear_fc2.weight, down_FD.t())
    if weights.shared is not None:
        gate_up = torch.cat((weights.shared.gate_DS, weights.shared.up_DS), dim=1)
        copy_weight(module.shared_experts.linear_fc1.weight, gate_up.t())
        copy_weight(module.shared_experts.linear_fc2.weight, weights.shared.down_SD.t())
    return (lambda x: module(x.unsqueeze(1))[0].squeeze(1)), list(module.parameters())


def _module(shape: LayerShape, dtype: torch.dtype) -> Any:
    config = import_module(f"{_CORE}.transformer.transformer_config").TransformerConfig(
        num_layers=1,
        hidden_size=shape.dim,
        num_attention_heads=4,
        ffn_hidden_size=shape.hidden,
        moe_ffn_hidden_size=shape.hidden,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.top_k,
        moe_router_pre_softmax=False,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=shape.shared or None,
        moe_grouped_gemm=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    specs = import_module(f"{_CORE}.models.gpt.moe_module_specs")
    spec = specs.get_moe_module_spec(use_te=False, num_experts=shape.experts, moe_grouped_gemm=False)
    module = import_module(f"{_CORE}.transformer.spec_utils").build_module(spec, config=config)
    module.set_layer_number(1)
    return module.to(dtype).train()


class _NoStream:
    """A stand-in for a stream and for an event: there is nothing to wait for."""

    def __init__(self, *ignored: object, **also: object) -> None:
        pass

    def record_event(self, *ignored: object) -> _NoStream:
        return self

    def wait(self, *ignored: object) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait


def _replace_cuda_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = _NoStream
    cuda.stream = lambda stream: nullcontext()
    cuda.current_device = lambda: torch.device("cpu")
