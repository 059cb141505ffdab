"""Listeners to a run: each file is one."""
