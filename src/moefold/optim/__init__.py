"""From gradients to new parameters."""
