"""Identities of published numbers: what must hold exactly if the model reads them as they are meant. I1 to I10."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flowrt.costs.equations import best_pipelines, exchanged_volumes, expert_use, fleet_nodes, knee_rows, m2n_bytes, replica_slots
from flowrt.costs.exchange import row_bytes
from flowrt.costs.experts import touched_experts
from flowrt.costs.ping_pong import PingPong
from flowrt.graph.placement import balanced_placement

# DeepEP, docs/legacy.md, low latency on H800: endpoints -> us and GB/s of dispatch, then of combine, for 128 tokens with 8 experts each.
DEEPEP = {
    8: (77, 98, 114, 127),
    16: (118, 63, 195, 74),
    32: (155, 48, 273, 53),
    64: (173, 43, 314, 46),
    128: (192, 39, 369, 39),
    256: (194, 39, 360, 40),
}
# DeepSeek's EPLB, its example of two layers: loads by expert, and the load of the busiest GPU in the published placement.
EPLB = {
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86): 156.0,
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27): 179.5,
}


@dataclass(frozen=True)
class PublishedIdentity:
    """`computed` equals `published` within the share `tolerance`; with `at_most`, it is no more than that."""

    id: str
    name: str
    computed: float
    published: float
    tolerance: float = 1e-9
    at_most: bool = False

    @property
    def holds(self) -> bool:
        slack = self.tolerance * abs(self.published)
        return self.computed <= self.published + slack if self.at_most else abs(self.computed - self.published) <= slack


def identities() -> list[PublishedIdentity]:
    """All of them, computed."""
    found = []
    for endpoints, (dispatch_us, dispatch_rate, combine_us, combine_rate) in DEEPEP.items():
        for name, dtype, microseconds, rate in (
            ("dispatch", "fp8", dispatch_us, dispatch_rate),
            ("combine", "bfloat16", combine_us, combine_rate),
        ):
            computed = 128 * 8 * row_bytes(7168, dtype) / microseconds / 1e3
            found.append(PublishedIdentity("I1", f"payload / latency, {name}, EP{endpoints}, GB/s", computed, rate, 0.021))
    split_step = 0.7 * 2 * 61 + 2 + 5 + 0.17 + 0.12 + 0.19  # ms
    nodes = fleet_nodes(608e9, 73_700) + fleet_nodes(168e9, 14_800)
    volumes = exchanged_volumes(1.0, 8, 8)
    numbers: tuple[tuple[Any, ...], ...] = (
        ("I2", "sequences / time per token, tok/s", 96 / 49.4e-3, 1943, 0.003),
        ("I3", "co-located time per token, ms", (93 + 2) / 1.9, 50.0),
        ("I3", "co-located throughput of a chip, tok/s", 2 * 60 / 0.05, 2400),
        ("I3", "co-located throughput, tok/s", 288 * 60 / 0.05, 345_600),
        ("I4", "split step, ms", split_step, 92.9, 0.001),
        ("I4", "split time per token, ms", split_step / 1.9, 48.9, 0.001),
        ("I5", "nodes for a day's tokens", nodes, 608e9 / 86400 / 73_700 + 168e9 / 86400 / 14_800),
        ("I6", "M2N payload, B", m2n_bytes(128, 2, 8, 6144, 2), 196_608),
        ("I6", "rows at the knee of an A100", knee_rows(312e12, 2e12), 156),
        ("I6", "use of Mixtral's experts at the knee", expert_use(156, 2, 8, knee_rows(312e12, 2e12)), 0.25),
        ("I7", "micro-batches at T_c = T_f / 2", PingPong(1.0, 1.0, 0.5).smallest_micro_batches(), 3),
        ("I7", "micro-batches just above", PingPong(1.0, 1.0, 0.51).smallest_micro_batches(), 4),
        ("I7", "step of 3 micro-batches and 60 layers, s", PingPong(1.0, 0.9, 0.3).total_seconds(3, 60), 1.9 + 0.6 + 3 * 60 - 1),
        ("I8", "experts touched by 100 tokens of 6 in 160", touched_experts(160, 6, 100), 160 * (1 - (1 - 6 / 160) ** 100)),
        ("I8", "pipelines at sqrt(C / k) = 10", best_pipelines(1e-3, 2e-3, 10e-6, 40), math.sqrt(1e-3 / 10e-6)),
        ("I8", "least volume of EP over 8, times 8, over TP", 8 * volumes[1] / volumes[0], 1.0),
        ("I10", "slots per GPU, decode", replica_slots(256, 32, 144), 2),
        ("I10", "slots per GPU, prefill", replica_slots(256, 32, 32), 9),
        ("I10", "slots per GPU, Kimi K2", replica_slots(384, 96, 96), 5),
    )
    found += [PublishedIdentity(*each) for each in numbers]
    for before, after, gain in ((100.61, 122.72, 22.0), (113.52, 150.08, 32.2), (362.78, 545.23, 50.3), (435.82, 625.45, 43.5)):
        found.append(PublishedIdentity("I9", f"gain from {before} to {after} tok/s, %", 100 * (after / before - 1), gain, 0.002))
    for loads, most in EPLB.items():
        placed = balanced_placement(loads, num_servers=8, num_slots=16, groups=4, nodes=2)
        replicas = [sum(expert in server for server in placed) for expert in range(len(loads))]
        heaviest = max(sum(loads[expert] / replicas[expert] for expert in server) for server in placed)
        found.append(PublishedIdentity("I10", "load of the busiest GPU beside EPLB's", heaviest, most, at_most=True))
    return sorted(found, key=lambda each: int(each.id[1:]))
