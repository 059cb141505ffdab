"""The tokens of a step: files, mixtures, and an order that is a function of the seed and the sample's number."""
