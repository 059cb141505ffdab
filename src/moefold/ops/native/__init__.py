"""CPU kernels in C, compiled on the machine where they run."""
