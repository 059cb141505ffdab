"""Published measurements: read as workloads, used for fitting, and compared with predictions."""
