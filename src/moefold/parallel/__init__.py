"""From a model written for one device to one rank's shard of it: tensor, context, expert and data parallelism."""
