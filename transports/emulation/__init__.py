"""Emulated links: channels that take the time of a link profile."""
