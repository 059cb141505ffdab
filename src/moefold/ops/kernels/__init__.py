"""GPU kernels in Triton. Each has a reference in plain torch, and is imported only when a run selects it."""
