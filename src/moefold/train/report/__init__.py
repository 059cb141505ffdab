"""One self-contained HTML page about a run, from its `metrics.jsonl` alone."""
