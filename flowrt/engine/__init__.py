"""The scheduling engine of one group: pure functions from events to decisions, without clock, task or torch."""
