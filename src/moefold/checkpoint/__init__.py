"""Weights at rest: checkpoints of our own, and the formats of others."""
