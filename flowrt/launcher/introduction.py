"""The startup handshake of workers: Start, Listening, Peers, Connected; the same for first and later incarnations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrt.actors.control import Peers, Start
from flowrt.errors import WorkerDiedError
from flowrt.graph.model import Graph, to_json
from flowrt.launcher.control_connection import ControlConnection


class Introduction:
    """Runs the startup handshake. `addresses`: process -> scheme -> address, of each process's current incarnation."""

    def __init__(
        self,
        graph: Graph,
        key: bytes,
        log_level: str,
        incarnations: Mapping[str, str],
        answer_seconds: float,
        output_tail: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._graph, self._key, self._log_level = to_json(graph), key, log_level
        self._incarnations, self._output_tail = incarnations, output_tail
        self.answer_seconds = answer_seconds
        self.addresses: dict[str, dict[str, str]] = {}

    async def start(self, line: ControlConnection) -> None:
        """Send Start: the worker's name, incarnation, graph, key and log level."""
        await line.tell(Start(name=line.name, incarnation=line.incarnation, graph=self._graph, key=self._key, log_level=self._log_level))

    async def wait_loaded(self, lines: Sequence[ControlConnection]) -> bool:
        """Wait until all workers listen, and record their addresses. False as soon as one that is not listening yet has ended.

        Raises WorkerDiedError for a worker that sends no message at all for `answer_seconds`.
        """
        if not await self._wait("loading", {line: line.listening for line in lines}):
            return False
        self.addresses |= {line.name: line.listening.result().addresses for line in lines}
        return True

    async def wait_connected(self, lines: Sequence[ControlConnection]) -> bool:
        """Send each worker the addresses and incarnations of its peers, and wait until all are connected. Result and errors as in
        `wait_loaded`."""
        for line in lines:
            await line.tell(Peers(addresses=dict(self.addresses), incarnations=dict(self._incarnations)))
        return await self._wait("connecting", {line: line.connected for line in lines})

    async def _wait(self, doing: str, answers: Mapping[ControlConnection, asyncio.Future[Any]]) -> bool:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while waiting := {line: answer for line, answer in answers.items() if not answer.done()}:
            if any(line.is_over for line in waiting):
                return False
            silent = min(waiting, key=lambda line: line.last_word_seconds)
            left = max(begun, silent.last_word_seconds) + self.answer_seconds - loop.time()
            if left <= 0:
                reason = f"gave no word for {self.answer_seconds:g} s while {doing}"
                raise WorkerDiedError(silent.name, reason, self._output_tail(silent.host))
            ends = [line.ended for line in waiting]
            await asyncio.wait([*waiting.values(), *ends], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return True
