"""Faults against the real processes of a running graph, and what comes of them: `flowrt chaos`, and `flowrt run --chaos`."""
