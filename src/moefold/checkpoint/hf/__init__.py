"""Weights in the files and names that the transformers library uses, and back."""
