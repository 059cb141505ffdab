"""How tokens are put into microbatches and microbatches onto ranks: plain integers, decided before anything moves."""
