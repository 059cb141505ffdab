"""Keys, values and options that once had another name: each is refused with today's name, never read as if it were new.

Whoever renames a key adds a row here. The reader of configurations looks a refused key up in these tables, so YAML
files, dotted overrides, kept proof cases and the configurations inside old checkpoints all give the same answer.
"""

from __future__ import annotations

# Old dotted key -> today's. A renamed section stands for the keys inside it.
RENAMED_KEYS = {
    "data.documents": "data.packing",
    "model.width": "model.dim",
    "model.dense_width": "model.dense_hidden_dim",
    "model.moe.expert_width": "model.moe.expert_hidden_dim",
    "model.moe.shared_width": "model.moe.shared_hidden_dim",
    "model.moe.latent_width": "model.moe.latent_dim",
    "model.moe.expert_bias": "model.moe.expert_mlp_bias",
    "model.moe.router.bias_rate": "model.moe.router.bias_update_rate",
    "optim.rate": "optim.lr",
    "optim.rates": "optim.lr_schedule",
    "parallel.link.exchange_gb_s": "parallel.link.all_to_all_gb_s",
    "parallel.link.gather_gb_s": "parallel.link.all_gather_gb_s",
    "parallel.link.message_us": "parallel.link.latency_us",
    "parallel.link.sum_gb_s": "parallel.link.reduce_scatter_gb_s",
    "precision.experts": "kernels.experts",
    "precision.kernels": "kernels.backend",
    "train.health.most_skips": "train.health.max_consecutive_skips",
}

# Recipes were formats of `precision.compute` in plans, some by another name.
_NARROW = ("fp8_delayed", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4")
_RECIPES = {"fp8_row": "fp8_rowwise", "fp8_block": "fp8_blockwise"}

# Today's dotted key -> old value -> what to write now.
RENAMED_VALUES = {
    "data.packing": {"joined": "concat", "apart": "concat_masked", "packed": "bin_packed"},
    "model.moe.router.group_score": {"top2_sum": "topk_sum, which adds top_k / top_groups scores"},
    # Words of plans (`--fix`), which are the configuration's now.
    "parallel.sharding": {"zero3": "fsdp"},
    "precision.compute": {
        "bf16": "bfloat16",
        "fp16": "float16",
        **{name: f"bfloat16, with precision.recipe: {_RECIPES.get(name, name)}" for name in _NARROW},
    },
    "precision.recipe": _RECIPES,
}

# Verb -> old command-line option -> today's.
RENAMED_OPTIONS = {
    "plan": {"--stack": "--framework"},
    "bench": {"--width": "--dim"},
}


def renamed_key(path: str, given: object) -> str | None:
    """What to say about an unknown key that was once known, and about its value if that was renamed too."""
    new = RENAMED_KEYS.get(path)
    if new is None:
        return None
    value = renamed_value(new, given)
    return f"is called {new} now" + (f", and its value {given} is {value}" if value else "")


def renamed_value(path: str, given: object) -> str | None:
    """Today's name of a value that `path` no longer takes."""
    return RENAMED_VALUES.get(path, {}).get(given) if isinstance(given, str) else None


def renamed_option(words: list[str]) -> str | None:
    """What to say about a command line that has an option by its old name."""
    options = RENAMED_OPTIONS.get(words[0], {}) if words else {}
    for word in words[1:]:
        if (new := options.get(word.partition("=")[0])) is not None:
            return f"{word.partition('=')[0]} is called {new} now"
    return None
