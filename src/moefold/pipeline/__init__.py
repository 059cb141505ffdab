"""Carrying out an order of microbatches: one stage or many, one after the other or two at once."""
