"""Varlen attention: spans against brute force, backends in torch against the definition, and backends by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.body.varlen_cases import SCALE, VarlenCase, computed, exact, varlen_case, worst

from moefold.attention.partial_attention import FUSED, PLAIN
from moefold.attention.sdpa import attend
from moefold.attention.varlen import VarlenAttention, compact
from moefold.attention.varlen_backends import ATTENTION, attention_for, attention_named
from moefold.attention.varlen_reference import ReferenceAttention
from moefold.attention.varlen_sdpa import SdpaAttention
from moefold.checks.kernels import attention_in_use
from moefold.config.precision import KernelsConfig
from moefold.config.run import RunConfig
from moefold.errors import BackendError
from moefold.ops.backends import BACKENDS
from moefold.ops.host_probe import GpuInfo, probe_host
from moefold.parallel.ring_plan import ring_steps

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(60))
def test_spans_are_what_documents_and_positions_say(seed: int) -> None:
    case = varlen_case(seed, most_tokens=40)
    for member in range(case.size // case.inner):
        for step in ring_steps(case.lengths, case.size, case.inner, member, case.window):
            mask = step.mask
            tokens = [
                [(run.document, i) for run in runs for i in range(run.start, run.stop)]
                for runs in (mask.q_runs, mask.k_runs)
            ]
            seen = torch.tensor(
                [[q[0] == k[0] and 0 <= q[1] - k[1] < (case.window or 10**6) for k in tokens[1]] for q in tokens[0]]
            ).reshape(len(tokens[0]), len(tokens[1]))
            begin, end, q_begin, q_end = (x.long() for x in mask.spans(CPU))
            q, k = torch.arange(len(tokens[0]))[:, None], torch.arange(len(tokens[1]))[None]
            assert torch.equal((k >= begin[:, None]) & (k < end[:, None]), seen)
            assert torch.equal((q >= q_begin) & (q < q_end), seen)
            if step.distance:
                assert len(tokens[1]) == step.num_received
                assert seen.any(0).all(), "a row is sent that nobody sees"


IN_TORCH = {
    "reference": ReferenceAttention(),
    "sdpa": SdpaAttention(),
    "sdpa, fused": SdpaAttention(FUSED),
    "sdpa, plain": SdpaAttention(PLAIN),
}


@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.parametrize("seed", range(40))
def test_as_the_definition(name: str, seed: int) -> None:
    case = varlen_case(seed, most_tokens=30)
    inputs, grad = case.draw(torch.float32)
    assert worst(computed(IN_TORCH[name], case, inputs, grad), exact(case, inputs, grad)) <= 1e-5


@pytest.mark.parametrize("attention", IN_TORCH.values(), ids=IN_TORCH.keys())
def test_forward_and_backward_of_the_interface(attention: VarlenAttention) -> None:
    """Not only what ``attend`` does with them; in float64, with sinks and a window."""
    case = VarlenCase(3, (9, 0, 5, 1), 4, 2, 6, 4, 4, True)
    inputs, grad = case.draw(torch.float64)
    q, k, v, sinks = inputs
    mask = ring_steps(case.lengths, 1, 1, 0, case.window)[0].mask
    out, lse = attention.forward(q, k, v, mask, scale=SCALE, sinks_H=sinks)
    assert lse.dtype == torch.float64 and lse.shape == (15, 4)
    grads = attention.backward(grad, q, k, v, out, lse, mask, scale=SCALE, sinks_H=sinks)
    assert worst([out, *grads], exact(case, inputs, grad)) <= 1e-12


def test_the_default_is_bit_for_bit_what_it_was() -> None:
    inputs, _ = VarlenCase(0, (9, 4), 4, 2, 8, 8, None, False).draw(torch.bfloat16)
    q, k, v, _ = inputs
    found = attention_for(RunConfig(), "cpu").attend(q, k, v, (9, 4), SCALE)
    assert torch.equal(found, attend(q, k, v, (9, 4), SCALE))


def test_what_fills_its_storage_is_not_copied() -> None:
    x = torch.randn(5, 2, 8)
    assert compact(x) is x and compact(x.transpose(0, 1)).data_ptr() == x.data_ptr()
    small = compact(x[..., :4])
    assert small.untyped_storage().nbytes() == small.numel() * 4 and torch.equal(small, x[..., :4])


# ---- by name ----


def test_every_backend_of_the_table_can_be_made() -> None:
    named = {backend.name for backend in BACKENDS if backend.job == "attention"}
    assert named == set(ATTENTION)


def test_auto_follows_the_backend_of_kernels() -> None:
    assert attention_in_use(RunConfig()) == "sdpa"
    assert attention_in_use(RunConfig(kernels=KernelsConfig(backend="triton"))) == "triton"
    assert attention_in_use(RunConfig(kernels=KernelsConfig(attention="reference"))) == "reference"
    assert attention_for(RunConfig(kernels=KernelsConfig(attention="reference")), "cpu").name == "reference"


@pytest.mark.parametrize("name", ["triton", "flex", "flash_attn_2", "flash_attn_3", "flash_attn_4"])
def test_what_needs_a_gpu_is_refused_without_one(name: str) -> None:
    with pytest.raises(BackendError, match=f"kernels.attention: {name} cannot do attention: runs on cuda, not on cpu"):
        attention_named(name, "cpu")


def test_a_missing_or_old_package_says_how_to_install_it() -> None:
    here = dataclasses.replace(probe_host(), gpus=(GpuInfo("H100", (9, 0), 80 << 30),), packages={"triton": "3.9.0"})
    with pytest.raises(
        BackendError, match=r"flash-attn is not installed, .* needed: pip install 'moefold\[flash-attn-2\]'"
    ):
        attention_named("flash_attn_2", "cuda", "bfloat16", here)
    old = dataclasses.replace(here, packages={"flash-attn": "2.5.9.post1"})
    with pytest.raises(BackendError, match=r"flash-attn 2.5.9.post1 is installed, flash-attn >=2.7,<3 is needed"):
        attention_named("flash_attn_2", "cuda", "bfloat16", old)
    with pytest.raises(BackendError, match="takes bfloat16, not float32"):
        attention_named("flash_attn_4", "cuda", "float32", dataclasses.replace(here, packages={"flash-attn-4": "4.0"}))
