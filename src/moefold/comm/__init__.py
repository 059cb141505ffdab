"""Process groups, collectives, point-to-point transfers, and the start of ranks."""
