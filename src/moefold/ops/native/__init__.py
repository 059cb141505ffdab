"""C for CPUs, compiled where it runs."""
