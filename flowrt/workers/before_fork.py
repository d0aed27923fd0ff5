"""Does once what each worker would do after its fork: the fork server imports this module before it forks."""

from __future__ import annotations

import msgspec

import flowrt.operators.sampling  # noqa: F401  (of each head)
from flowrt.graph.kinds import all_kinds
from flowrt.graph.model import Graph
from flowrt.operators.families.registry import known_families

all_kinds()
known_families()  # scans all installed packages
msgspec.json.Decoder(Graph)  # msgspec keeps what it has learnt of each class
