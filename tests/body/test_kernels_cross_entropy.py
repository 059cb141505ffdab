"""The cross entropy kernels, interpreted, against float32 logits and against the chunked reference."""

from __future__ import annotations

import pytest
import torch
from tests.marks import slow_except
from torch import Tensor

pytest.importorskip("triton", reason="kernels are an extra")

from tests.body.kernel_cases import ROUNDING, Case, assert_near, counting_bytes, run, run_kernel

from moefold.ops import cross_entropy
from moefold.ops.kernels import cross_entropy_triton as kernel
from moefold.ops.kernels.interpret import interpreting


def targets(case: Case, tokens: int, vocabulary: int) -> Tensor:
    """Of these rows, of another rank's rows, or of none because the label is ignored."""
    drawn = torch.randint(-vocabulary // 4, vocabulary + vocabulary // 4 + 1, (tokens,), generator=case.generator)
    return torch.where(torch.rand(tokens, generator=case.generator) < 0.2, -100, drawn)


def stats_reference(logits_Tv: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    here = (target_T >= 0) & (target_T < logits_Tv.shape[1])
    picked = logits_Tv.gather(1, target_T.clamp(0, logits_Tv.shape[1] - 1)[:, None])[:, 0]
    return logits_Tv.logsumexp(1), torch.where(here, picked, 0.0)


@pytest.mark.parametrize("seed", slow_except(range(50), *range(12)))
def test_chunks_of_logits_as_the_reference(seed: int) -> None:
    """Numbers are float32 whatever the logits are; gradients are rounded once, to the logits' format."""
    case = Case(seed)
    tokens, vocabulary = case.among(1, 3, 6), case.among(1, 17, 100, 2048, 4096, 9000)
    chunk = case.among(vocabulary, max(1, vocabulary // 3), max(1, vocabulary // 5), 2 * vocabulary)
    logits, target = case.randn(tokens, vocabulary, spread=case.among(1.0, 20.0)), targets(case, tokens, vocabulary)
    grads = [case.randn(tokens, dtype=torch.float32) for _ in range(2)]
    lse, target_logit = torch.full((tokens,), -torch.inf), torch.zeros(tokens)
    gradient = logits.clone()
    begins = range(0, vocabulary, chunk)
    with interpreting():
        for begin in begins:
            kernel.add_stats(logits[:, begin : begin + chunk], target, begin, lse, target_logit)
        for begin in begins:
            part = gradient[:, begin : begin + chunk]
            kernel.logits_to_gradient(part, target, begin, lse, *grads)
    found = [lse, target_logit, gradient]
    wanted = run(lambda x: stats_reference(x, target), [logits.float()], grads)
    for name, ours, reference in zip(("lse", "target logit", "d logits"), found, wanted, strict=True):
        # An exponential turns the last digits of a large logit into leading ones.
        assert_near(ours, reference, name, terms=max(1.0, logits.abs().max().item() / 4) * reference.abs().max().item())


@pytest.mark.parametrize("seed", slow_except(range(50), *range(12)))
def test_whole_function_as_the_chunked_reference(seed: int) -> None:
    case = Case(seed)
    tokens, dim, vocabulary = case.among(1, 4, 9), case.among(1, 8, 33), case.among(5, 23, 300)
    chunk, target = case.among(1 + vocabulary // 4, vocabulary, 8192), targets(case, tokens, vocabulary)
    inputs = [case.randn(tokens, dim), case.randn(vocabulary, dim, dtype=torch.float32)]
    grads = [case.randn(tokens, dtype=torch.float32) for _ in range(2)]
    found = run_kernel(lambda x, w: kernel.vocab_stats(x, w, target, chunk), inputs, grads)
    wanted = run(lambda x, w: cross_entropy.vocab_stats(x, w, target, chunk), inputs, grads)
    for name, ours, reference in zip(("lse", "target logit", "dx", "dweight"), found, wanted, strict=True):
        assert ours.dtype == reference.dtype
        # Products come from the same library; the gradients of the logits that go into them differ by one rounding.
        allowed = (ROUNDING[case.dtype] if name.startswith("d") else 0.0) + 1e-5
        assert (ours.float() - reference.float()).norm() <= allowed * reference.float().norm() + 1e-6, name


def test_two_halves_of_the_vocabulary_merge_to_the_summed_loss() -> None:
    case, labels = Case(0), torch.tensor([0, 39, 20, -100, 19])
    x, weight = case.randn(5, 12), case.randn(40, 12)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        parts = [
            kernel.vocab_stats(x, half, labels - first, 7) for first, half in ((0, weight[:20]), (20, weight[20:]))
        ]
        lse, target_logit = torch.logaddexp(parts[0][0], parts[1][0]), parts[0][1] + parts[1][1]
        return torch.where(labels != -100, lse - target_logit, 0.0).sum()

    found = run_kernel(loss, [x, weight], [torch.ones(())])
    wanted = run(
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.T, labels, reduction="sum"), [x, weight], [torch.ones(())]
    )
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    assert (found[1][3] == 0).all()


def test_the_maximum_may_come_early_or_late() -> None:
    """Within one program's walk, in both directions, and from chunk to chunk."""
    rising = torch.linspace(-300, 300, 2 * kernel.STATS_BLOCK + 100)
    logits, target = torch.stack((rising, rising.flip(0), rising.roll(kernel.STATS_BLOCK))), torch.tensor([0, 1, 2])
    for chunk in (len(rising), kernel.STATS_BLOCK + 50):
        lse, target_logit = torch.full((3,), -torch.inf), torch.zeros(3)
        with interpreting():
            for begin in range(0, len(rising), chunk):
                kernel.add_stats(logits[:, begin : begin + chunk], target, begin, lse, target_logit)
        torch.testing.assert_close(lse, logits.logsumexp(1), rtol=1e-6, atol=0)


def test_an_ignored_row_is_cleared_without_being_read() -> None:
    logits, target = torch.full((2, 10), torch.nan), torch.tensor([-100, 3])
    logits[1] = 0.0
    numbers = torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([0.0, -1.0])
    with interpreting():
        kernel.logits_to_gradient(logits, target, 0, *numbers)
    assert (logits[0] == 0).all() and not logits.isnan().any()


def test_nothing_of_the_size_of_the_logits_is_kept() -> None:
    kept: list[int] = []
    x, weight = torch.randn(16, 4, requires_grad=True), torch.randn(500, 4, requires_grad=True)
    with (
        interpreting(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t),
    ):
        kernel.vocab_stats(x, weight, torch.zeros(16, dtype=torch.long), 100)
    assert sum(kept) == x.numel() + weight.numel() + 2 * 16


def test_float64_is_sent_to_the_reference() -> None:
    with pytest.raises(ValueError, match=r"cross_entropy\.vocab_stats takes float64"):
        kernel.vocab_stats(torch.zeros(1, 2).double(), torch.zeros(3, 2), torch.zeros(1, dtype=torch.long))


def test_moves_the_bytes_it_says() -> None:
    tokens, vocabulary, chunk = 3, 2200, 1000
    logits, target = torch.randn(tokens, vocabulary).bfloat16(), torch.tensor([5, 1500, 2199])
    lse, target_logit, grads = torch.full((tokens,), -torch.inf), torch.zeros(tokens), torch.ones(2, tokens)
    moved = [0, 0]
    for begin in range(0, vocabulary, chunk):
        part = logits[:, begin : begin + chunk]
        with counting_bytes() as counted:
            kernel.add_stats(part, target, begin, lse, target_logit)
        moved[0] += counted[0]
        with counting_bytes() as counted:
            kernel.logits_to_gradient(part, target, begin, lse, *grads)
        moved[1] += counted[0]
    assert moved[0] == tokens * kernel.stats_traffic(vocabulary, chunk).moved
    assert moved[1] == tokens * kernel.gradient_traffic(vocabulary, chunk).moved
