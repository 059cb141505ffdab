"""Where a step's tokens come from: files, mixtures, and an order that is a function of the seed and one integer."""
