"""Worker processes on several hosts: an engine starts a host server on each, which forks workers and relays their control connections."""
