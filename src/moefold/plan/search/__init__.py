"""Which layout to take, and why."""
