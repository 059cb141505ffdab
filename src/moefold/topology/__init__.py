"""Ranks, grids and groups as arithmetic, without processes."""
