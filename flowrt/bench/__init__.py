"""Benchmarks of flowrt beside what a user would pick instead: cases, peers, how they are measured, and their reports."""
