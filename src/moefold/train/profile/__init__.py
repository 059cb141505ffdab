"""Profiled steps: where every rank's time goes, what slows the step, and traces of all ranks on one clock."""
