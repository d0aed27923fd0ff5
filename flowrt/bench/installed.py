"""Peers that are measured where they are installed: ucxx, Ray's compiled graphs, xoscar.

Here: PeerEcho and `installed_echoes`, the side of the benchmark. Not here: the peers' own processes (echo_child.py), the protocol
with them (peer_process.py), peers that flowrt's own dependencies bring (peers.py, gloo.py). A peer that is not asked takes no core.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import sys
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self

from flowrt.bench.peer_process import PeerProcess
from flowrt.errors import UserError

CHILD = "flowrt.bench.echo_child"
NAMES = {"ucxx": "ucxx", "ray": "Ray compiled graph", "xoscar": "xoscar actor call"}


class PeerEcho:
    """Round trips between two processes of the package `module`; both ends read and check every byte."""

    def __init__(self, module: str) -> None:
        self.name = NAMES[module]
        self._module = module
        self._ends: list[PeerProcess] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._start(self._module)
        if self._module == "ucxx":  # its two ends are both told how many rounds come; elsewhere the package starts the other one
            await self._start(self._module, str(self._ends[0].facts["port"]))
        await self.round_trip_seconds(10, b"\x01")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(UserError):
            await asyncio.gather(*(end.ask(rounds=0, bytes=0) for end in self._ends))
        await self._stack.aclose()

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        """Seconds until a payload as large as this one is back; the median of `num_rounds` one after the other."""
        num_bytes = memoryview(payload).nbytes
        answers = await asyncio.gather(*(end.ask(rounds=num_rounds, bytes=num_bytes) for end in self._ends))
        seconds: list[float] = answers[-1]["seconds"]
        return statistics.median(seconds)

    async def _start(self, *arguments: str) -> None:
        end = PeerProcess(self.name, [sys.executable, "-m", CHILD, *arguments])
        self._ends.append(await self._stack.enter_async_context(end))


def installed_echoes() -> tuple[list[PeerEcho], list[str]]:
    """Those whose package can be imported here, and the names of the other packages."""
    found = [module for module in NAMES if importlib.util.find_spec(module) is not None]
    return [PeerEcho(module) for module in found], [module for module in NAMES if module not in found]
