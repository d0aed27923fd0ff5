"""A service: a process of flowrt that runs beside those of the graph, such as a front end. The launcher starts and watches it like them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Service:
    """`entry`: what it runs, "module:function". It finds `settings` in its Start, and gets copies of these `descriptors` of the launching
    process (Seams.descriptors), by name. Its death is never the end of a run that is ready: it is restarted within its restart budget."""

    entry: str
    settings: bytes = b""
    descriptors: Mapping[str, int] = field(default_factory=dict)
