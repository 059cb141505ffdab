"""Pure tensor functions: no process group, no module, and an obvious twin beside every fast path."""
