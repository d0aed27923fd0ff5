"""Predicts what a deployment does without running it: times of steps and of requests. Pure: no torch, no processes, no clock."""
