"""The configuration of a run: frozen nested dataclasses, readable without torch."""
