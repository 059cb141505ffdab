"""The pipeline runtime: runs a schedule's actions, of one stage or many, sequential or overlapped."""
