"""A run: the loop, its state, and what it writes down."""
