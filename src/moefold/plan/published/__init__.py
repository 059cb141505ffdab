"""Published measurements: read as jobs, fitted to, and held against."""
