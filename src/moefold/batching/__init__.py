"""Which tokens form a microbatch and which ranks run it: plain integers, decided before a step."""
