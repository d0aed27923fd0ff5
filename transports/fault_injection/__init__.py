"""Fault injection: a transport that drops, delays or corrupts messages as planned."""
