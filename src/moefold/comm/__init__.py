"""Ranks, groups and the few collectives everything else is made of."""
