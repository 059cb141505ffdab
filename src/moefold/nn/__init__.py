"""What every layer is made of: batches, linear layers, matmul policies, phases, and the interfaces to other ranks."""
