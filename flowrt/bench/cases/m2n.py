"""Many senders to many receivers, beside gloo's all_to_all and isend; then receivers beside one that gets ten times as much.

A round goes from the first sender's start to the last receiver's end, when its payloads have arrived and were read and checked; both are
taken inside the operators, as a rank of gloo takes its own. A block of rounds is one measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import chain

from flowrt.api import RunningGraph, open_graph
from flowrt.bench.cases.graphs import many_to_many
from flowrt.bench.measure.benchmark import Results, Trial
from flowrt.bench.peers.gloo import Method, gloo_group
from flowrt.bench.report.figures import Figure, Target, nearest_rank
from flowrt.errors import UserError

ROUNDS = 100  # of one measurement: the 99th percentile is the second largest
UNEVEN_FACTOR = 10
PEERS: tuple[Method, ...] = ("all_to_all", "isend")
# MegaScale-Infer, section 7.3, 8 to 8 at 256 KiB against NCCL: 4.2 times the throughput; its p99 of 0.071 was over 16 NICs.
EQUAL_SIDES = (4, 8)
THROUGHPUT_TARGETS = {"all_to_all": Target(4.2, at_most=False), "isend": Target(2.5, at_most=False)}
TAIL_TARGET = Target(0.3)
UNEQUAL_SIDES = ((1, 8), (8, 1), (2, 6))  # ahead of both peers in median and p99
AHEAD = Target(1.0)
OTHERS_TARGET = Target(1.2)  # the other receivers' median while one gets ten times as much
KIB_256 = 256 << 10


async def measure(num_senders: int, num_receivers: int, num_bytes: int, transport: str) -> Results:
    """Raises UserError for numbers that make no round."""
    if min(num_senders, num_receivers) < 1 or num_bytes < 8:
        raise UserError("flowrt bench m2n takes at least 1 sender, 1 receiver and 8 bytes")
    rounds = many_to_many(num_senders, num_receivers, num_bytes, transport, UNEVEN_FACTOR)
    total = num_senders * num_receivers * num_bytes
    at_target = num_bytes == KIB_256 and num_senders == num_receivers and num_senders in EQUAL_SIDES
    ahead = AHEAD if (num_senders, num_receivers) in UNEQUAL_SIDES else None
    async with open_graph(rounds.graph) as graph, gloo_group(num_senders, num_receivers) as gloo:
        used = sorted({edge.transport for edge in graph.graph.edges.values()})
        yield f"over {', '.join(used)}; {ROUNDS} rounds a block, a block a measurement"

        async def ours() -> list[float]:
            return [max(ends) for ends in await round_seconds(graph, rounds.go, ROUNDS)]

        for method in PEERS:

            async def theirs(method: Method = method) -> list[float]:
                return await gloo.round_seconds(method, ROUNDS, num_bytes)

            def figures(blocks: Sequence[Sequence[Sequence[float]]], method: Method = method) -> list[Figure]:
                peer = f"gloo {method}"
                medians = [[1e6 * statistics.median(block) for block in side] for side in blocks]
                tails = [[1e6 * nearest_rank(block, 0.99) for block in side] for side in blocks]
                rates = [[total / median / 1e3 for median in side] for side in medians]
                throughput = THROUGHPUT_TARGETS[method] if at_target else None
                return [
                    Figure.paired("throughput", "GB/s", rates[0], peer, rates[1], throughput),
                    Figure.paired("round, median", "us", medians[0], peer, medians[1], ahead),
                    Figure.paired("round, p99", "us", tails[0], peer, tails[1], TAIL_TARGET if at_target else ahead),
                ]

            yield Trial((ours, theirs), figures)
        if num_receivers > 1:

            async def others(go: Sequence[int]) -> float:
                """The median over rounds and over the receivers that always get the same."""
                blocks = await round_seconds(graph, go, ROUNDS)
                return 1e6 * statistics.median([end for ends in blocks for end in ends[1:]])

            async def slowed() -> float:
                return await others(uneven) / await others(rounds.go)

            async def slowed_gloo() -> float:
                _, *receivers = await gloo.receiver_seconds("isend", ROUNDS, num_bytes, UNEVEN_FACTOR)
                _, *evenly = await gloo.receiver_seconds("isend", ROUNDS, num_bytes, 1)
                return statistics.median(chain(*receivers)) / statistics.median(chain(*evenly))

            uneven = (*rounds.go[:2], 0, UNEVEN_FACTOR)
            name = f"other receivers, one gets {UNEVEN_FACTOR}x"
            yield Trial.paired(name, "us", lambda: others(uneven), "even traffic", lambda: others(rounds.go), OTHERS_TARGET)
            yield Trial.paired(f"{name}, of even traffic", "", slowed, "gloo isend", slowed_gloo, AHEAD)


async def round_seconds(graph: RunningGraph, go: Sequence[int], num_rounds: int) -> list[list[float]]:
    """`num_rounds` rounds in sequence: for each, the seconds from its start until each receiver had everything."""
    import torch

    rounds = []
    for _ in range(num_rounds):
        outputs = await graph(go=torch.tensor(go))
        times = [each.tolist() for each in outputs.values()] if isinstance(outputs, dict) else [outputs.tolist()]
        start = min(first for first, _ in times)
        rounds.append([end - start for _, end in times])
    return rounds
