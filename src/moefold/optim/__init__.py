"""AdamW, the gradient norm and clipping, and the lr schedule."""
