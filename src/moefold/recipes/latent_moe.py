"""LatentMoE of any recipe: NAME+latent_efficiency and NAME+latent_accuracy.

Tokens are projected from the model dim d down to a latent dim l before dispatch, and up again after combine; routed
experts live in the latent dim, the router and shared experts stay in d (Elango et al., 2026; section 7.3 of the
Megatron Core MoE report). With the ratio a = d / l, an expert's matrices and a row that travels are 1/a of what they
were. The two presets spend that differently:

    preset               experts   top-k    routed parameters   routed FLOPs and rows' bytes of a token
    latent_efficiency    a E       K        as before           1/a
    latent_accuracy      a E       a K      as before           as before, of more combinations: C(aE, aK) >= C(E, K)^a

The router grows with the number of experts, and two projections of d x l are new. The report recommends the second.
Learning rate and schedule are the recipe's own: nobody has published those of its latent form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from moefold.config.run import RunConfig
from moefold.errors import ConfigError, Problem

RATIO = 4


class LatentPreset(NamedTuple):
    """What is multiplied by the ratio d / l."""

    experts: bool
    top_k: bool
    about: str


PRESETS: Mapping[str, LatentPreset] = {
    "latent_efficiency": LatentPreset(
        experts=True,
        top_k=False,
        about="d/4 as latent dim, four times the experts, the same top-k: a quarter of the work",
    ),
    "latent_accuracy": LatentPreset(
        experts=True, top_k=True, about="d/4 as latent dim, four times the experts and the top-k: the same work"
    ),
}


def with_latent_experts(run: RunConfig, preset: str, ratio: int = RATIO) -> RunConfig:
    """The run with its routed experts in a latent dim, by one of ``PRESETS``."""
    model, moe, (experts, top_k, _) = run.model, run.model.moe, PRESETS[preset]
    if moe is None or moe.latent_dim is not None:
        has = "no experts" if moe is None else "a latent dim already"
        raise ConfigError(Problem("model.moe.latent_dim", f"{run.name} has {has}", "name a recipe with plain experts"))
    if model.dim % ratio:
        raise ConfigError(
            Problem("model.dim", f"{model.dim} does not divide by the ratio {ratio}", "name a recipe whose dim does")
        )
    latent = replace(
        moe,
        latent_dim=model.dim // ratio,
        num_experts=moe.num_experts * (ratio if experts else 1),
        top_k=moe.top_k * (ratio if top_k else 1),
    )
    return replace(run, name=f"{run.name}_{preset}", model=replace(model, moe=latent))
