"""Seeded faults, each of which the proof must catch at a named quantity."""
