"""Pipeline schedules as data: orders built from sizes, rewritten by passes, checked, simulated and drawn."""
