"""Simulation in virtual time: the real actors, runner, engine and workers on one seeded event loop with a simulated transport."""
