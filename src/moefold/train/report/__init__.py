"""One self-contained HTML page about a run, made from its `metrics.jsonl` alone."""
