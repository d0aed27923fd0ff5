"""Virtual time: the real actors, runner, engine and workers on one seeded event loop over a transport that never meets the world."""
