"""The Python API: what `import moefold` offers, and what the command line calls."""
