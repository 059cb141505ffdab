"""One mixture-of-experts layer: who goes where, what keeps it balanced, and the experts."""
