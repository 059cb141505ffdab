"""The MoE layer: router, load balancing, dispatchers and experts."""
