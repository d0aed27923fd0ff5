"""What the nodes of a benchmark's graph compute: as little as possible, so that what is measured is the way between them.

Not here: the graphs (hop.py). Imported by workers, by name.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def echo(x: T) -> T:
    """Its input, unread."""
    return x
