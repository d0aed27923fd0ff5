"""Failure detection, expert maps, hedging, health and restart policy. Pure: events in, decisions out."""
