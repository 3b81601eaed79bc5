"""Benchmarks: each prints ratios side by side, measured in one run."""
