"""Training: the loop, its state, callbacks and reports."""
