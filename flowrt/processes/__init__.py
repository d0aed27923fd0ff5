"""OS processes: the fork server, exit locks, output tails and descriptors."""
