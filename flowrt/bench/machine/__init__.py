"""Measures this machine as a device card, and compares what the cost model predicts with it with real runs."""
