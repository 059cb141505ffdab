"""Named runs: published models at full size, each with a proxy of the same shape that fits a laptop core."""
