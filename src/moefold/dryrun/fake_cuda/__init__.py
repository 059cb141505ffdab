"""CUDA without a GPU: devices, streams and events that compute nothing and remember who waits for whom."""
