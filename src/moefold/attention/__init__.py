"""Attention: the projections of GQA and MLA around one attention core."""
