"""Do two engines agree on the log-probs of the same tokens? Token by token, with a report.

Before a run of reinforcement learning, the trainer's log-probs of sampled tokens are compared with those of the engine
that sampled them. Engines differ by rounding, and by more where a router chooses other experts; a wrong weight, a wrong
temperature or a shifted mask shows as a difference at most tokens. What is reported are differences d = ours - theirs,
the ratios exp(d) that enter the loss, an estimate of KL(theirs || ours), and the tokens that are furthest apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp

import torch
from torch import Tensor

from moefold.errors import MoefoldError

_WORST = 10


@dataclass(frozen=True)
class TokenMatch:
    """One token: which rollout and place, its id, and both log-probs."""

    rollout: int
    place: int
    token: int
    ours: float
    theirs: float

    @property
    def difference(self) -> float:
        return self.ours - self.theirs


@dataclass(frozen=True)
class MatchReport:
    """Over all counted tokens; ``beyond`` of them differ by more than ``tolerance``."""

    tokens: int
    tolerance: float
    beyond: int
    mean_difference: float
    mean_abs_difference: float
    max_abs_difference: float
    # Mean of exp(d) - 1 - d.
    kl: float
    ratios: tuple[float, float]
    worst: tuple[TokenMatch, ...]

    @property
    def matches(self) -> bool:
        """All counted tokens are within the tolerance."""
        return self.tokens > 0 and self.beyond == 0

    def as_json(self) -> dict[str, object]:
        """Plain numbers."""
        return asdict(self) | {"matches": self.matches}

    def text(self) -> str:
        """For people."""
        verdict = "match" if self.matches else "DIFFER"
        lines = [
            f"log-probs {verdict}: {self.beyond:,} of {self.tokens:,} tokens differ by more than {self.tolerance:g}",
            f"  difference  mean {self.mean_difference:+.3e}, mean abs {self.mean_abs_difference:.3e}, "
            f"max abs {self.max_abs_difference:.3e}",
            f"  ratio       {self.ratios[0]:.6f} to {self.ratios[1]:.6f}; KL(theirs || ours) {self.kl:.3e}",
        ]
        if not self.matches:
            lines.append("  rollout  place  token       ours     theirs  difference")
            lines += [
                f"  {each.rollout:7d} {each.place:6d} {each.token:6d} {each.ours:10.5f} {each.theirs:10.5f} "
                f"{each.difference:+11.3e}"
                for each in self.worst
            ]
        return "\n".join(lines)


def compare_logprobs(
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
    counted: Sequence[Tensor],
    tokens: Sequence[Tensor],
    tolerance: float = 1e-3,
) -> MatchReport:
    """Per rollout, all [tokens]; only counted tokens are compared. A NaN on either side is beyond any tolerance."""
    shapes = [[tuple(each.shape) for each in group] for group in (ours, theirs, counted, tokens)]
    if any(other != shapes[0] for other in shapes[1:]):
        raise MoefoldError(f"log-probs, masks and tokens must have the same shapes; they have {shapes}")
    kept = [mask.bool() for mask in counted]
    both = [
        torch.cat([torch.zeros(0, dtype=torch.float64), *(x.double().cpu()[m] for x, m in zip(group, kept))])
        for group in (ours, theirs)
    ]
    places = [(n, int(place)) for n, mask in enumerate(kept) for place in mask.nonzero()[:, 0]]
    less = (both[0] - both[1]).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    apart = less.abs()
    order = apart.argsort(descending=True, stable=True)[:_WORST].tolist()
    worst = tuple(
        TokenMatch(n, place, int(tokens[n][place]), float(both[0][i]), float(both[1][i]))
        for i, (n, place) in ((i, places[i]) for i in order)
    )
    count = max(apart.numel(), 1)
    return MatchReport(
        tokens=apart.numel(),
        tolerance=tolerance,
        beyond=int((apart > tolerance).sum()),
        mean_difference=float(less.sum() / count),
        mean_abs_difference=float(apart.sum() / count),
        max_abs_difference=float(apart.max()) if apart.numel() else 0.0,
        kl=float((less.exp() - 1 - less).sum() / count),
        ratios=(exp(float(less.min())), exp(float(less.max()))) if apart.numel() else (1.0, 1.0),
        worst=worst,
    )
