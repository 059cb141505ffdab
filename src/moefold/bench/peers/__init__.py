"""Layers of other libraries, given the same weights. One library, one file, which imports it when it is asked for."""
