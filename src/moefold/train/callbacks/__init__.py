"""The callbacks that moefold brings: console, JSONL, TensorBoard, Weights & Biases."""
