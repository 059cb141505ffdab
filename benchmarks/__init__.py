"""Comparisons of moefold with other libraries and with lower bounds on time; run from a clone, not in the wheel."""
