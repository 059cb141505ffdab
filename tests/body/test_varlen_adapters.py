"""Attention of other libraries, which need a GPU: every call fits the recorded signature, and a stand-in with the same
contract, computed by the reference, gives the values and gradients of the definition."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.body.varlen_cases import SCALE, VarlenCase, computed, exact, varlen_case, worst
from tests.engines.record_signatures import FOLDER
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from moefold.attention.flash_sequences import sequences
from moefold.attention.mask_blocks import Run
from moefold.attention.packed_mask import PackedMask, whole_documents
from moefold.attention.varlen import VarlenAttention
from moefold.attention.varlen_flash import FlashAttention, FlashCalls, calls_2, calls_3, calls_4, flash_calls
from moefold.attention.varlen_flex import FlexAttention
from moefold.attention.varlen_reference import ReferenceAttention
from moefold.attention.varlen_sdpa import SdpaAttention
from moefold.errors import BackendError
from moefold.parallel.ring_plan import ring_steps

RECORDED: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("flash_attn_*.json"))
}
CALLS = {"flash_attn_2": calls_2, "flash_attn_3": calls_3, "flash_attn_4": calls_4}
REFERENCE = ReferenceAttention()


def recorded(release: str, function: str) -> inspect.Signature:
    kinds = {"any": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(each["name"], kinds[each["how"]], default=None if "default" in each else empty)
            for each in RECORDED[release]["functions"][function]["parameters"]
        ]
    )


def library_of(release: str) -> str:
    return str(RECORDED[release]["library"])


# ---- stand-ins ----


def mask_of(given: dict[str, Any]) -> PackedMask:
    """Each pair of sequences as a document. Causal masks of these packages end at the last row and the last key."""
    cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    for cu, rows, longest in ((cu_q, given["q"], "max_seqlen_q"), (cu_k, given["k"], "max_seqlen_k")):
        assert cu.dtype == torch.int32 and cu.is_contiguous() and cu[0] == 0 and cu[-1] == rows.shape[0]
        assert given[longest] == cu.diff().max()
    left, right = given["window_size"] or (given["window_size_left"], given["window_size_right"])
    causal = given["causal"] or right == 0
    assert right in ((0, None) if causal else (-1, None))
    q_runs, k_runs = [], []
    for number, (q, k) in enumerate(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)):
        first = k - q if causal else k
        assert first >= 0
        q_runs.append(Run(number, first, first + q, int(cu_q[number])))
        k_runs.append(Run(number, 0, k, int(cu_k[number])))
    window = None if left in (None, -1) else left + 1
    return PackedMask(
        tuple(run for run in q_runs if run.stop > run.start), tuple(run for run in k_runs if run.stop), window
    )


def bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, checked as the packages check them."""
    found = signature.bind(*args, **kwargs)
    found.apply_defaults()
    given = dict.fromkeys(("window_size", "window_size_left", "window_size_right"), None) | dict(found.arguments)
    given["causal"] = given.get("causal", given.get("is_causal"))
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        x = given.get(name)
        assert x is None or (x.dtype in (torch.bfloat16, torch.float16) and x.stride(-1) == 1), name
        assert x is None or x.shape[-1] % 8 == 0
    return given


def stand_in(release: str) -> SimpleNamespace:
    """The functions of a release, as its signatures say."""
    forward_name, backward_name = RECORDED[release]["functions"]

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = bound(recorded(release, forward_name), args, kwargs)
        q, k, v, mask = given["q"], given["k"], given["v"], mask_of(given)
        assert release.startswith("flash_attn_4") is bool(given.get("return_lse"))
        out, lse = REFERENCE.forward(q, k, v, mask, scale=given["softmax_scale"])
        blind = lse == -torch.inf
        # What a package writes where a row has no keys is its own affair.
        return (
            out.masked_fill(blind[..., None], torch.nan),
            lse.masked_fill(blind, torch.inf).t().contiguous(),
            None,
            None,
        )

    def backward(*args: Any, **kwargs: Any) -> Any:
        given = bound(recorded(release, backward_name), args, kwargs)
        q, k, v, out, dout = (given[name] for name in ("q", "k", "v", "out", "dout"))
        lse = given.get("softmax_lse", given.get("lse"))
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32 and lse.is_contiguous()
        assert out.is_contiguous() and dout.is_contiguous()
        grads = REFERENCE.backward(dout, q, k, v, out, lse.t(), mask_of(given), scale=given["softmax_scale"])
        if release.startswith("flash_attn_4"):
            return grads[:3]
        for name, grad in zip(("dq", "dk", "dv"), grads[:3], strict=True):
            given[name].copy_(grad)
        return lse

    forward.__signature__ = recorded(release, forward_name)  # type: ignore[attr-defined]
    backward.__signature__ = recorded(release, backward_name)  # type: ignore[attr-defined]
    return SimpleNamespace(**{forward_name: forward, backward_name: backward})


def flash(release: str) -> FlashAttention:
    return FlashAttention(CALLS[library_of(release)](stand_in(release)))


# ---- flash-attn ----


def fits(case: VarlenCase) -> bool:
    """What ``flash_sequences`` says it can express."""
    return case.size == 1 or case.window is None


@pytest.mark.parametrize("release", RECORDED)
@pytest.mark.parametrize("seed", range(30))
def test_flash_as_the_definition(release: str, seed: int) -> None:
    case = varlen_case(seed, most_tokens=30, multiple=8)
    inputs, grad = case.draw(torch.bfloat16)
    if not fits(case):
        return
    if case.dim != case.value_dim and release.startswith("flash_attn_2"):
        with pytest.raises(BackendError, match="needs one head dim"):
            computed(flash(release), case, inputs, grad)
        return
    assert worst(computed(flash(release), case, inputs, grad), exact(case, inputs, grad)) <= 4e-2


def test_masks_that_flash_cannot_express_are_refused() -> None:
    for step in ring_steps((40, 9), 2, 1, 0, 30):
        with pytest.raises(BackendError, match=r"flash_attn has no mask .* use triton"):
            sequences(step.mask)
    assert sequences(whole_documents((3, 0, 5), 2)).q_lengths == (3, 5)


def test_dtypes_and_odd_dims_are_refused() -> None:
    attention = flash("flash_attn_4-4.0.0b36")
    for dtype, dim, words in ((torch.float32, 16, "takes bfloat16"), (torch.bfloat16, 12, "multiples of 8")):
        q = torch.randn(3, 1, dim, dtype=dtype)
        with pytest.raises(BackendError, match=words):
            attention.attend(q, q, q, (3,), SCALE)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_missing_package_is_told(version: int) -> None:
    with pytest.raises(
        BackendError, match=rf"flash_attn_{version}: flash-attn.* is not installed, .* is needed: (pip install|build)"
    ):
        flash_calls(version)


def test_a_changed_signature_is_noticed() -> None:
    """Without this the stand-ins would accept anything."""
    release = "flash_attn_2-2.8.3.post1"
    module = stand_in(release)
    name = "_flash_attn_varlen_forward"

    def renamed(*args: Any, **kwargs: Any) -> Any:
        kwargs["window"] = kwargs.pop("window_size_left")
        return getattr(stand_in(release), name)(*args, **kwargs)

    setattr(module, name, renamed)
    calls: FlashCalls = calls_2(module)
    q = torch.randn(3, 1, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="window"):
        FlashAttention(calls).attend(q, q, q, (3,), SCALE)


# ---- launches ----

# Packed in one batch of 24 tokens; the last has a window.
PACKED = (((24,), None), ((5, 1, 0, 7, 11), None), ((1,) * 24, None), ((3, 8, 13), 4))


def calls_for(attention: VarlenAttention, lengths: tuple[int, ...], window: int | None, counted: list[str]) -> int:
    """Calls of the library in a forward and a backward of one layer."""
    counted.clear()
    inputs, grad = VarlenCase(1, lengths, 2, 1, 16, 16, window, True).draw(torch.bfloat16)
    computed(attention, VarlenCase(1, lengths, 2, 1, 16, 16, window, True), inputs, grad)
    return len(counted)


@pytest.mark.parametrize("release", RECORDED)
def test_flash_is_called_once_forward_and_once_backward_for_any_documents(release: str) -> None:
    counted: list[str] = []
    module = stand_in(release)
    for name, function in vars(module).copy().items():

        def watched(*args: Any, _function: Any = function, _name: str = name, **kwargs: Any) -> Any:
            counted.append(_name)
            return _function(*args, **kwargs)

        watched.__signature__ = function.__signature__  # type: ignore[attr-defined]
        setattr(module, name, watched)
    attention = FlashAttention(CALLS[library_of(release)](module))
    assert attention.one_call
    assert {calls_for(attention, *packed, counted) for packed in PACKED} == {2}


def test_flex_is_called_once_for_any_documents() -> None:
    """Its gradient is autograd's."""
    counted: list[str] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        counted.append("flex")
        return flex_stand_in(*args, **kwargs)

    attention = FlexAttention(watched)
    assert attention.one_call
    assert {calls_for(attention, *packed, counted) for packed in PACKED} == {1}


def test_who_claims_one_call() -> None:
    """`triton` is counted in `test_kernels_attention.py`; the others loop over documents or their shapes."""
    TritonAttention = pytest.importorskip("moefold.attention.varlen_triton").TritonAttention
    classes = (FlashAttention, FlexAttention, TritonAttention, SdpaAttention, ReferenceAttention)
    assert {each.name: each.one_call for each in classes} == {
        "flash_attn": True,
        "flex": True,
        "triton": True,
        "sdpa": False,
        "reference": False,
    }


# ---- flex_attention ----


def flex_stand_in(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, scale: float, enable_gqa: bool, return_aux: AuxRequest
) -> tuple[Tensor, Any]:
    """In plain operations, so that it has gradients on a CPU; what is seen is read off the block mask."""
    inspect.signature(flex_attention).bind(
        q, k, v, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa, return_aux=return_aux
    )
    assert return_aux.lse and enable_gqa is (q.shape[1] != k.shape[1])
    seen = seen_by(block_mask, q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.float() @ k.float().mT * scale).masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1)
    lse = scores.masked_fill(blind[:, None], 0.0).logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.float()
    return out.to(q.dtype), SimpleNamespace(lse=lse.masked_fill(blind, -torch.inf))


def seen_by(mask: BlockMask, num_q: int, num_k: int) -> Tensor:
    q, k, (size, _) = torch.arange(num_q), torch.arange(num_k), mask.BLOCK_SIZE
    listed = {}
    for name in ("kv", "full_kv"):
        count, index = getattr(mask, f"{name}_num_blocks")[0, 0], getattr(mask, f"{name}_indices")[0, 0]
        chosen = torch.zeros(index.shape, dtype=torch.bool)
        for row, number in enumerate(count.tolist()):
            chosen[row, index[row, :number].long()] = True
        listed[name] = chosen[q // size][:, k // size]
    zero = torch.tensor(0)
    return (listed["kv"] & mask.mask_mod(zero, zero, q[:, None], k[None])) | listed["full_kv"]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("block", [4, 128])
def test_flex_as_the_definition(seed: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefold.attention import varlen_flex

    monkeypatch.setattr(varlen_flex, "BLOCK", block)
    varlen_flex._block_mask.cache_clear()
    case = varlen_case(seed, most_tokens=30)
    inputs, grad = case.draw(torch.float32)
    found = computed(FlexAttention(flex_stand_in), case, inputs, grad)
    varlen_flex._block_mask.cache_clear()
    assert worst(found, exact(case, inputs, grad)) <= 1e-5


@pytest.mark.slow
def test_torch_flex_attention_itself() -> None:
    """On a CPU it has a forward only."""
    case = VarlenCase(0, (130, 3, 60), 4, 2, 16, 16, 50, True)
    inputs, grad = case.draw(torch.float32)
    q, k, v, sinks = inputs
    out, lse = FlexAttention(flex_attention).forward(
        q, k, v, whole_documents(case.lengths, case.window), scale=SCALE, sinks_H=sinks
    )
    assert worst([out], exact(case, inputs, grad)[:1]) <= 1e-5 and lse.shape == (193, 4)
