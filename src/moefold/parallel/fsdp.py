"""FSDP on two grids: dense parameters over (dp, cp), experts over edp.

Gradients are sums. The loss was divided once, by the global number of labels, so every reduction here is a plain sum:
divide factor 1, forced sum. Groups of one rank are left out: a parameter with no peers stays a plain tensor.

FSDP by default unshards a layer for every microbatch, forward and backward, and reduces its gradients every time. A
pipeline runs many microbatches through few layers and defers weight gradients. It therefore unshards all parameters
before the first microbatch (``unshard_for_step``), accumulates full gradients, and reduces them in buckets at the end
of the step (``reduce_for_step``). Between steps parameters and optimizer states are sharded as usual.

Parameters are sharded, updated and saved in their own format and cast before they are sent (``precision.gather``): the
model casts every weight to its compute dtype where it is used, so a cast before the all-gather changes no value.
Routers compute in float32; they are units of their own and are sent as they are. The gathered copies collect gradients
in the parameters' dtype (``grad_dtype``), so that sums over uses and microbatches are as wide as without the cast.

With ``precision.gather: narrow``, weights of narrow matmuls are sent as FP8 codes (`parallel/fsdp_codes.py`).

Only torch's public interface is used: unshard, reshard, and assign the sharded parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moefold.blueprint.flat_layout import fill_buckets
from moefold.blueprint.sharding import grid_of, shard_dim
from moefold.comm.message_codecs import BFloat16Parts, sum_parts
from moefold.comm.process_groups import Groups
from moefold.config.precision import PrecisionConfig
from moefold.model.decoder import Decoder
from moefold.nn.phase_autograd import NO_HOOKS, PartHooks
from moefold.parallel.data_sharding import Materialize
from moefold.parallel.fsdp_codes import CodedShards
from moefold.parallel.gradient_buckets import bucket_bytes, reduce_bucket
from moefold.parallel.param_shards import DATA_GROUPS, ParamShard, TrainedPiece, local_gradient
from moefold.precision.dtypes import TORCH_FORMATS


class MessageDtypes(NamedTuple):
    """Of parameters, of their all-gather, and of sums of their gradients."""

    params: torch.dtype
    gather: torch.dtype
    reduce: torch.dtype
    # Parts of sums, where they are sent in another one.
    parts: BFloat16Parts | None = None


def message_dtypes(precision: PrecisionConfig) -> MessageDtypes:
    names = (precision.params, precision.gather_format, precision.reduce_format)
    params, gather, reduce = (TORCH_FORMATS[name] for name in names)
    parts = BFloat16Parts() if precision.reduce == "bfloat16_all_to_all" else None
    return MessageDtypes(params, gather, reduce, parts)


@dataclass(frozen=True)
class FsdpSharding:
    """``DataSharding`` by torch's FSDP2.

    With ``once``, parameters are unsharded for a whole step and gradients reduced at its end; else FSDP's hooks do both
    per layer and microbatch.
    """

    model: Decoder
    groups: Groups
    param_shards: Mapping[str, ParamShard]
    dtypes: MessageDtypes
    once: bool
    # Bytes of a bucket of gradients.
    bucket: int
    # Weights that are gathered as codes, if there are any.
    coded: CodedShards | None = None

    @property
    def main_dtype(self) -> torch.dtype:
        return self.dtypes.params

    def allocate(self, device: torch.device, materialize: Materialize) -> None:
        materialize(self.model, device)
        if self.coded is not None:
            self.coded.allocated(self.model)

    def pieces(self) -> tuple[TrainedPiece, ...]:
        shards = self.param_shards
        return tuple(
            TrainedPiece(parameter, shards[name], (shards[name].box,))
            for name, parameter in self.model.named_parameters()
        )

    def start_step(self) -> None:
        if self.coded is not None:
            self.coded.narrow()
        if self.once:
            unshard_for_step(self.model, self.dtypes)
            if self.coded is not None:
                self.coded.offer(self.coded.inside(self.model))

    def part_hooks(self, stage: int) -> PartHooks:
        """FSDP has hooks of its own, or all stages are unsharded at once."""
        return NO_HOOKS

    def after_backward(self, stage: int) -> None:
        """All gradients are reduced at the end."""

    def reduce_gradients(self) -> dict[str, Tensor]:
        if self.once:
            reduce_for_step(self.model, self.groups, self.dtypes, self.bucket)
        return {name: local_gradient(name, parameter) for name, parameter in trained_parameters(self.model)}

    def weights_changed(self, trained_only: bool = False) -> None:
        """The next unshard gathers them."""
        if self.coded is not None:
            self.coded.weights_changed()

    def start_evaluation(self) -> None:
        self.start_step()

    def end_evaluation(self) -> None:
        reshard_all(self.model)


def shard_over_data(
    model: Decoder,
    groups: Groups,
    device_type: str,
    once: bool,
    dtypes: MessageDtypes,
    coded: CodedShards | None = None,
) -> None:
    """Wrap routers and experts, then blocks, then the rest; an outer wrap skips parameters that an inner one has.

    With ``once``, FSDP neither reshards nor reduces by itself: ``unshard_for_step`` and ``reduce_for_step`` do.
    """
    dense = groups.device_mesh(device_type, *DATA_GROUPS["attention"])
    expert = groups.device_mesh(device_type, *DATA_GROUPS["expert"])
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    # With a dtype of its own for sums, FSDP would take gradients away that this step reduces itself.
    reduce = None if once else dtypes.reduce
    policy = MixedPrecisionPolicy(dtypes.gather, reduce, cast_forward_inputs=False)
    if dtypes.gather != dtypes.params:
        as_they_are = MixedPrecisionPolicy(dtypes.params, reduce, cast_forward_inputs=False)
        for router in model.routers().values():
            # Small, so that it stays from its forward to its backward instead of being gathered again.
            _shard(router, dense, groups["dense_shard"].size, set(), as_they_are, reshard_after_forward=False)
    reshard = False if once else None
    for module in experts:
        _shard(module, expert, groups["expert_shard"].size, set(), policy, reshard)
    unsharded = {parameter for module in experts for parameter in module.parameters()} if expert is None else set()
    for module in (*model.layers.values(), *model.mtp.values(), model):
        _shard(module, dense, groups["dense_shard"].size, unsharded, policy, reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if dtypes.parts is not None and not once:
                module.set_custom_reduce_scatter(AllToAllReduceScatter())  # type: ignore[arg-type]
            # FSDP reduces in the dtype of gradients where `reduce` is `gather`.
            widest = dtypes.reduce if dtypes.reduce == dtypes.gather and not once else dtypes.params
            module.register_forward_pre_hook(partial(_collect_gradients_in, widest))
            if coded is not None:
                module.register_forward_pre_hook(partial(coded.offer, coded.inside(module)))
            if once:
                module.set_requires_gradient_sync(False, recurse=False)
                module.set_reshard_after_backward(False, recurse=False)


class AllToAllReduceScatter:
    """In place of FSDP's reduce-scatter: parts are sent in bfloat16, and summed in the dtype of the output.

    It has the interface of torch's ``ReduceScatter``, which has no public name.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """FSDP calls it on a stream of its own, and waits for that."""
        assert not async_op
        sent = input_tensor.bfloat16()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        sum_parts(received.view(-1, output_tensor.numel()), output_tensor)


def _shard(
    module: nn.Module,
    mesh: DeviceMesh | None,
    shard_size: int,
    ignored: set[nn.Parameter],
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
) -> None:
    if mesh is not None:
        fully_shard(
            module,
            mesh=mesh,
            shard_placement_fn=_placement(shard_size),
            ignored_params=ignored,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )


def _collect_gradients_in(dtype: torch.dtype, module: nn.Module, inputs: object = None) -> None:
    """Of parameters that are gathered now; called after FSDP's own hook, which gathers."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and parameter.requires_grad and parameter.grad_dtype != dtype:
            parameter.grad_dtype = dtype


def _placement(shard_size: int) -> Callable[[nn.Parameter], Shard]:
    return lambda parameter: Shard(shard_dim(tuple(parameter.shape), shard_size))


def reshard_all(model: nn.Module) -> None:
    """Reshard after a forward without backward; FSDP's backward reshards by itself."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def unshard_for_step(model: Decoder, dtypes: MessageDtypes) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    _collect_gradients_in(dtypes.params, model)


@torch.no_grad()
def reduce_for_step(model: Decoder, groups: Groups, dtypes: MessageDtypes, bucket: int) -> None:
    """Reshard, and set each sharded parameter's ``.grad`` to its shard of the summed gradient.

    Gradients are summed in buckets of at most ``bucket`` bytes, dense ones and experts' apart.
    """
    full: dict[str, Tensor] = {}
    for name, parameter in trained_parameters(model):
        if parameter.grad is None:
            raise RuntimeError(f"{name} has no gradient; every parameter must get one in every step, zeros included")
        full[name], parameter.grad = parameter.grad, None
    reshard_all(model)
    sharded = dict(model.named_parameters())
    for grid, (replicate_name, shard_name) in DATA_GROUPS.items():
        replicate, shard = groups[replicate_name], groups[shard_name]
        sizes = {
            name: bucket_bytes(tuple(gradient.shape), shard.size, dtypes.reduce)
            for name, gradient in full.items()
            if grid_of(name) == grid
        }
        for names in fill_buckets(sizes, bucket):
            gradients = [full.pop(name) for name in names]
            reduced = reduce_bucket(gradients, replicate, shard, dtypes.reduce, dtypes.parts)
            for name, gradient in zip(names, reduced, strict=True):
                sharded[name].grad = _like_parameter(gradient, sharded[name])


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _like_parameter(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return gradient
    return DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
