"""What keeps a run going: signals, restarts, hangs, silent corruption, values that are not finite."""
