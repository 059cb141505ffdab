from __future__ import annotations

import pytest
import torch

from moefold.moe import topk


def test_ties_go_to_the_lower_expert() -> None:
    assert topk.choose_topk(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), 3).tolist() == [[1, 2, 3]]


def test_topk_agrees_with_torch_where_nothing_ties() -> None:
    scores = torch.randn(33, 16, dtype=torch.float64)
    torch.testing.assert_close(topk.choose_topk(scores, 5), scores.topk(5).indices)


@pytest.mark.parametrize(("terms", "open_groups"), [(1, {1, 2}), (2, {0, 1}), (3, {0, 1})])
def test_groups_are_judged_by_the_sum_of_their_best(terms: int, open_groups: set[int]) -> None:
    scores = torch.tensor([[0.5, 0.5, 0.1, 0.6, 0.2, 0.7, 0.7, 0.0, 0.1]])
    limited = topk.limit_groups(scores, 3, 2, terms)
    open_ = {group for group in range(3) if limited[0, 3 * group : 3 * group + 3].isfinite().any()}
    assert open_ == open_groups
    assert limited[limited.isfinite()].tolist() == scores[limited.isfinite()].tolist()


def test_a_group_of_one_expert_can_be_judged_by_its_best_two() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5]])
    assert topk.choose_topk(topk.limit_groups(scores, 3, 2, 2), 2).tolist() == [[1, 2]]


def test_sinkhorn_is_the_rescaled_plan() -> None:
    logits = torch.randn(21, 5, dtype=torch.float64)
    plan = topk.sinkhorn(logits, 6).exp()
    torch.testing.assert_close(plan, topk.sinkhorn_reference(logits, 6))
    per_expert = plan.sum(0)
    torch.testing.assert_close(per_expert, torch.full_like(per_expert, 21 / 5))


def test_sinkhorn_survives_logits_whose_exponential_does_not() -> None:
    plan = topk.sinkhorn(torch.tensor([[2000.0, 0.0], [1000.0, -1000.0]]), 8)
    assert plan.isfinite().all()


@pytest.mark.parametrize("capacity", [1, 4, 9])
def test_expert_choice_equals_the_loop(capacity: int) -> None:
    scores = torch.randint(0, 4, (18, 7)).double()
    kept = topk.choose_by_experts(scores, capacity)
    assert torch.equal(kept, topk.choose_by_experts_reference(scores, capacity))
    assert (kept.sum(0) == capacity).all()


def test_balanced_choices_use_every_expert_equally_and_ignore_the_cut() -> None:
    token = torch.arange(12)
    whole = topk.choose_balanced(token, 8, 2)
    assert whole.flatten().bincount(minlength=8).tolist() == [3] * 8
    assert torch.equal(torch.cat([topk.choose_balanced(part, 8, 2) for part in token.split([5, 4, 3])]), whole)


def test_scores() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(topk.score(logits, "softmax"), logits.exp() / logits.exp().sum(1, keepdim=True))
    torch.testing.assert_close(topk.score(logits, "sigmoid"), 1 / (1 + (-logits).exp()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_without_ties_choose_what_a_stable_sort_chooses(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    few = torch.tensor([-torch.inf, -1.5, -1e-30, -0.0, 0.0, 1e-30, 2.0, torch.inf])
    drawn = few[torch.randint(len(few), (500, 24))].to(dtype)
    for scores in (drawn, torch.randn(300, 130).to(dtype), torch.zeros(3, 7, dtype=dtype)):
        for k in (1, 4, 7):
            assert torch.equal(topk.choose_topk(scores, k), topk.choose_topk_reference(scores, k))
