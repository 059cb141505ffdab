"""One rank of a large job, on one small machine: the real training step on tensors without memory."""
