"""The standard deviation with which each parameter starts, by its name alone.

Embeddings, the head, routers and matrices start normal with `model.init_std`. Every block adds two outputs to the
hidden state, attention's and the feed-forward's, so the variance of the hidden state grows with depth. With
`model.init_output_scale: depth` the output projections start smaller and the sum of the 2 * num_layers outputs has
about the variance of one:

    std = init_std / sqrt(2 * num_layers)

This is GPT-2's rule, and what Megatron calls `output_layer_init_method`. As there, it covers attention's output, the
down projection of dense, shared and routed experts, and the projection out of a latent; blocks of MTP modules use
the model's own number of layers. Where experts compute in a latent, two scaled matrices follow each other.
"""

from __future__ import annotations

from math import sqrt

from moefold.config.model import ModelConfig

OUTPUT_PROJECTIONS = (
    ".attention.out.weight",
    ".feed_forward.down",
    ".feed_forward.experts.down",
    ".feed_forward.shared.down",
    ".feed_forward.latent_up.weight",
)


def is_output_projection(name: str) -> bool:
    """Whether a parameter is the last matrix of a block's attention or feed-forward."""
    return name.endswith(OUTPUT_PROJECTIONS)


def init_std(model: ModelConfig, name: str) -> float:
    """Of the normal distribution that the parameter is drawn from."""
    if model.init_output_scale == "depth" and is_output_projection(name):
        return model.init_std / sqrt(2 * model.num_layers)
    return model.init_std
