"""The launcher's end of one worker: its process, its control line, what it says and how it ends.

Here: Line. Not here: what the whole run does (cluster.py). The rules of blame are those of flowrt/cluster/launcher.py: who ends without
being told, fails, or loses a peer whose death nothing explains, is accused; the verdict weighs the accusations.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, Protocol

from flowrt.actors.control import (
    Connected,
    Control,
    Ended,
    Failed,
    LinkLost,
    Listening,
    Progress,
    Statistics,
    Stop,
    Tokens,
    as_message,
    from_message,
)
from flowrt.actors.links import LOST
from flowrt.cluster.verdict import Kind, Verdict
from flowrt.graph.model import GATEWAY
from flowrt.seams import Seams
from flowrt.simulation.inside import Inside
from flowrt.simulation.transport import SimulatedChannel
from flowrt.simulation.waitables import current_node
from flowrt.simulation.world import World
from transports.contract import Channel, Identity, Limits

WorkerMain = Callable[[Channel, Seams], Awaitable[None]]
WORKERS = "flowrt.workers.process"  # brings torch, so it is imported when it is used
LINE_LIMITS = Limits(max_header_bytes=1 << 24, capacity_messages=1 << 10)  # one header holds the whole graph
EXPLAINED_SECONDS = 2.0  # from a lost link to the death that explains it


class Owner(Protocol):
    """Whom a line tells what it hears."""

    def on_words(self, words: Tokens | Ended) -> list[tuple[str, Control]]:
        """Returns what is to be told to whom."""

    async def tell(self, name: str, control: Control) -> None: ...

    def explains(self) -> bool:
        """Whether somebody has ended, so that a lost link is no wonder."""


class Line:
    """One life of one worker. `listening` and `connected` are its first words, `ended` is set when its process is over."""

    def __init__(self, world: World, verdict: Verdict, name: str, owner: Owner, worker: WorkerMain | None, exact: bool) -> None:
        self.name = name
        self.incarnation = world.new_incarnation()
        self.inside: Inside | None = None
        self.statistics = Statistics()
        self.listening: asyncio.Future[Listening] = world.loop.create_future()
        self.connected: asyncio.Future[None] = world.loop.create_future()
        self.ended = asyncio.Event()
        self.told_to_stop = False
        self._verdict, self._owner = verdict, owner
        self._loop = world.loop
        node, here = world.next_node(name), current_node.get()
        limits = world.network.shrink(LINE_LIMITS, node)
        ends = (Identity(GATEWAY), here), (Identity(name, self.incarnation), node)
        self._channel, theirs = SimulatedChannel.pair(world.network, *ends, limits)

        async def host(seams: Seams) -> None:
            async with theirs:
                if worker is not None:
                    await worker(theirs, seams)
                else:
                    await import_module(WORKERS).serve(theirs, seams, None, begin)

        def begin(made: Any) -> None:
            self.inside = Inside(name, made)
            if exact:
                self.inside.use_exact_model()

        self._process = world.start(name, host)
        self._process.exit.add_done_callback(self._on_exit)

    async def tell(self, control: Control) -> None:
        """Does nothing when the line is over: how the worker ended is heard of otherwise."""
        with contextlib.suppress(*LOST):
            await self._channel.send(as_message(control))

    async def follow(self) -> None:
        """Hear the worker until its line is over."""
        with contextlib.suppress(*LOST):
            while True:
                for name, control in self._hear(from_message(await self._channel.recv())):
                    await self._owner.tell(name, control)

    async def stop(self) -> None:
        self.told_to_stop = True
        if not self.ended.is_set():
            await self.tell(Stop())

    async def aclose(self) -> None:
        await self._channel.aclose()

    def _hear(self, control: Control) -> list[tuple[str, Control]]:
        match control:
            case Listening():
                self.listening.set_result(control)
            case Connected():
                self.connected.set_result(None)
            case Tokens() | Ended():
                return self._owner.on_words(control)
            case Statistics():
                self.statistics = control
            case Progress():
                pass
            case Failed(error, user):
                self._accuse(Kind.BAD_INPUT if user else Kind.COMPLAINED, error)
            case LinkLost(peer, reason):
                self._loop.call_later(EXPLAINED_SECONDS, self._complain, f"lost its link to {peer}: {reason}")
            case _:
                self._accuse(Kind.COMPLAINED, f"said {control.kind} out of turn")
        return []

    def _complain(self, reason: str) -> None:
        if not self._owner.explains():
            self._accuse(Kind.COMPLAINED, reason)

    def _on_exit(self, exit: asyncio.Future[str]) -> None:
        self.ended.set()
        if not self._verdict.accused(self.name):
            how = exit.result()
            self._accuse(Kind.DIED, how if how.startswith("was") else f"{how} without being told to")

    def _accuse(self, kind: Kind, reason: str) -> None:
        if not self.told_to_stop:
            self._verdict.accuse(kind, self.name, self.name, reason)
