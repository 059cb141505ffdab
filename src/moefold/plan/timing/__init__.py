"""How long a step takes: rates, links, layers, the pipeline, and the constants behind them."""
