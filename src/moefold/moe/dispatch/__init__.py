"""Tokens to experts and back, one strategy per file."""
