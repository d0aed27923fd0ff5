"""Many senders to many receivers: `flowrt bench m2n`, against gloo's all_to_all and its isend in the same run.

Here: the comparison, its targets, and uneven traffic. Not here: the rounds themselves (rounds.py, gloo.py), the statistics
(pairs.py). A block of rounds is one measurement: its median, and its 99th percentile; the interval is over the blocks.
"""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator

from flowrt.api import open_graph
from flowrt.bench.gloo import GlooGroup, Method
from flowrt.bench.pairs import Target, take_turns
from flowrt.bench.report import Figure
from flowrt.bench.rounds import block_of, many_to_many, nearest_rank, slowest
from flowrt.errors import UserError

ROUNDS = 100  # of one measurement: the 99th percentile is the second largest
UNEVEN_FACTOR = 10
PEERS: tuple[Method, ...] = ("all_to_all", "isend")
# MegaScale-Infer, section 7.3, 8 to 8 at 256 KiB against NCCL: 4.2 times the throughput; its p99 of 0.071 was over 16 NICs.
EQUAL_SIDES = (4, 8)
THROUGHPUT_TARGETS = {"all_to_all": Target(4.2, at_most=False), "isend": Target(2.5, at_most=False)}
TAIL_TARGET = Target(0.3)
UNEQUAL_SIDES = ((1, 8), (8, 1), (2, 6))  # there: ahead of both in median and p99
AHEAD = Target(1.0)
OTHERS_TARGET = Target(1.2)  # the others' median while one receiver is given ten times as much
KIB_256 = 256 << 10


async def measure(num_senders: int, num_receivers: int, num_bytes: int, num_pairs: int, transport: str) -> AsyncIterator[Figure | str]:
    """The figures one by one. Raises UserError for numbers that make no round."""
    if min(num_senders, num_receivers, num_pairs) < 1 or num_bytes < 8:
        raise UserError("flowrt bench m2n takes at least 1 sender, 1 receiver, 1 pair and 8 bytes")
    made = many_to_many(num_senders, num_receivers, num_bytes, transport, UNEVEN_FACTOR)
    total = num_senders * num_receivers * num_bytes
    async with open_graph(made.graph) as graph, GlooGroup(num_senders, num_receivers) as gloo:
        ours = slowest(graph, made.go, ROUNDS)
        used = sorted({edge.transport for edge in graph.graph.edges.values()})
        yield f"over {', '.join(used)}; {ROUNDS} rounds a block, a block a measurement"
        for method in PEERS:

            async def theirs(method: Method = method) -> list[float]:
                return await gloo.round_seconds(method, ROUNDS, num_bytes)

            blocks = await take_turns((ours, theirs), num_pairs)
            peer = f"gloo {method}"
            at_target = num_bytes == KIB_256 and num_senders == num_receivers and num_senders in EQUAL_SIDES
            ahead = AHEAD if (num_senders, num_receivers) in UNEQUAL_SIDES else None
            medians = [[statistics.median(block) for block in side] for side in blocks]
            tails = [[nearest_rank(block, 0.99) for block in side] for side in blocks]
            rates = [[total / median / 1e9 for median in side] for side in medians]
            yield Figure.paired("throughput", "GB/s", rates[0], peer, rates[1], THROUGHPUT_TARGETS[method] if at_target else None)
            yield _microseconds("round, median", medians, peer, ahead)
            yield _microseconds("round, p99", tails, peer, TAIL_TARGET if at_target else ahead)
        if num_receivers > 1:
            go = (*made.go[:2], 0, UNEVEN_FACTOR)

            async def others(uneven: bool) -> float:
                """The median over rounds and over the receivers that are always given the same."""
                rounds = await block_of(graph, go if uneven else made.go, ROUNDS)
                return statistics.median([end for ends in rounds for end in ends[1:]])

            values = await take_turns((lambda: others(True), lambda: others(False)), num_pairs)
            yield _microseconds(f"other receivers, one given {UNEVEN_FACTOR}x", values, "even traffic", OTHERS_TARGET)


def _microseconds(name: str, sides: list[list[float]], peer: str, target: Target | None) -> Figure:
    ours, theirs = ([1e6 * seconds for seconds in side] for side in sides)
    return Figure.paired(name, "us", ours, peer, theirs, target)
