"""Report, or remove, overlaps of training text with held-out text: validation set, test set and benchmarks."""
