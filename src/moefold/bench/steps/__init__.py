"""A whole training step: moefold's, one written by hand on the same kernels, and those of other trainers."""
