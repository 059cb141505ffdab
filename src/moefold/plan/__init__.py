"""What a run costs, computed before anything is built."""
