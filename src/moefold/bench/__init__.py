"""Measurements of this machine and of moefold's parts on it."""
