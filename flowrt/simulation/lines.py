"""The launcher's end of one worker: its process, its control connection, what it says and how it ends.

Here: Line. Not here: what the whole run does (cluster.py), who may die and live again (servers.py). The rules of blame are those of
flowrt/launcher/launcher.py: who ends without being told, fails, or loses a peer whose death nothing explains, is accused; the verdict
weighs the accusations.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, Protocol

from flowrt.actors.control import (
    Cleared,
    Condemned,
    Connected,
    Control,
    Ended,
    ExpertsLost,
    Failed,
    Heartbeat,
    Late,
    LinkLost,
    Listening,
    Progress,
    Statistics,
    Stop,
    Suspected,
    Tokens,
    as_message,
    from_message,
)
from flowrt.actors.links import LOST
from flowrt.actors.mailbox import Mailbox, MailboxClosedError
from flowrt.graph.model import GATEWAY, MONITOR
from flowrt.launcher.root_cause import Kind, Verdict
from flowrt.seams import Seams
from flowrt.simulation.inside import Inside
from flowrt.simulation.transport import SimulatedChannel
from flowrt.simulation.waitables import current_node
from flowrt.simulation.world import World
from flowrt.transports.contract import Channel, Identity, Limits

WorkerMain = Callable[[Channel, Seams], Awaitable[None]]
WORKERS = "flowrt.workers.process"  # brings torch, so it is imported when it is used
LINE_LIMITS = Limits(max_header_bytes=1 << 24, capacity_messages=1 << 10)  # one header holds the whole graph
EXPLAINED_SECONDS = 2.0  # from a lost link to the death that explains it
OUTBOX_MESSAGES = 1 << 16  # what is said about others waits here for a worker that does not listen


class Owner(Protocol):
    """Whom a line tells what it hears."""

    def on_words(self, words: Tokens | Ended) -> list[tuple[str, Control]]:
        """Returns what is to be told to whom."""

    async def tell(self, name: str, control: Control) -> None: ...

    def explains(self) -> bool:
        """Whether somebody has ended, so that a lost link is no wonder."""

    def outlives(self, line: Line) -> bool:
        """Whether the run goes on without this one, whose life is over now."""

    def on_word(self, line: Line, word: Control) -> None:
        """A sign of life, or its lack, from a worker; a verdict from the monitor."""

    def on_link_lost(self, line: Line, lost: LinkLost) -> bool:
        """False: it is the run's end, unless somebody's death explains it."""


class Line:
    """One life of one worker. `listening` and `connected` are its first words, `ended` is set when its process is over; `over` says why
    nobody is to use this life any more, which may be said before that."""

    def __init__(self, world: World, verdict: Verdict, name: str, owner: Owner, worker: WorkerMain | None, exact: bool) -> None:
        self.name = name
        self.incarnation = world.new_incarnation()
        self.began_seconds = world.loop.time()
        self.inside: Inside | None = None
        self.statistics = Statistics()
        self.listening: asyncio.Future[Listening] = world.loop.create_future()
        self.connected: asyncio.Future[None] = world.loop.create_future()
        self.over: asyncio.Future[str] = world.loop.create_future()
        self.ended = asyncio.Event()
        self.told_to_stop = False
        self._verdict, self._owner = verdict, owner
        self._world, self._loop = world, world.loop
        self._outbox: Mailbox[Control] = Mailbox(OUTBOX_MESSAGES)
        node, here = world.next_node(name), current_node.get()
        limits = LINE_LIMITS if name == MONITOR else world.network.shrink(LINE_LIMITS, node)  # a beat for which it has no room is dropped
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

    @property
    def is_dead(self) -> bool:
        """Whether its process has met a power cut, heard of or not."""
        return self._loop.is_dead(self._process.node)

    async def tell(self, control: Control) -> None:
        """Does nothing when the line is over: how the worker ended is heard of otherwise."""
        with contextlib.suppress(*LOST):
            await self._channel.send(as_message(control))

    def post(self, control: Control) -> None:
        """As `tell`, soon and in order."""
        with contextlib.suppress(MailboxClosedError):
            self._outbox.post(control)

    def try_tell(self, control: Control) -> None:
        """Now or never."""
        with contextlib.suppress(*LOST):
            self._channel.send_nowait(as_message(control))

    async def follow(self) -> None:
        """Hear the worker, and tell it what is posted, until its line is over."""
        async with asyncio.TaskGroup() as tasks:
            speaking = tasks.create_task(self._speak(), name=f"words for {self.name}")
            with contextlib.suppress(*LOST):
                while True:
                    for name, control in self._hear(from_message(await self._channel.recv())):
                        await self._owner.tell(name, control)
            speaking.cancel()

    async def _speak(self) -> None:
        with contextlib.suppress(MailboxClosedError):
            while True:
                control = await self._outbox.wait_item()
                await self.tell(control)
                self._outbox.take_nowait()

    def condemn(self, why: str) -> None:
        """Its life is to be over, though its process lives."""
        if not self.over.done():
            self.over.set_result(why)
            self._owner.outlives(self)

    def kill(self) -> None:
        """If it is not dead."""
        self._world.kill(self._process)

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
            case Progress() | ExpertsLost():
                pass
            case Failed(error, user):
                self._accuse(Kind.BAD_INPUT if user else Kind.COMPLAINED, error)
            case Heartbeat() | Late() | Suspected() | Cleared() | Condemned():
                self._owner.on_word(self, control)
            case LinkLost(peer, reason):
                if not self._owner.on_link_lost(self, control):
                    self._loop.call_later(EXPLAINED_SECONDS, self._complain, f"lost its link to {peer}: {reason}")
            case _:
                self._accuse(Kind.COMPLAINED, f"said {control.kind} out of turn")
        return []

    def _complain(self, reason: str) -> None:
        if not self._owner.explains():
            self._accuse(Kind.COMPLAINED, reason)

    def _on_exit(self, exit: asyncio.Future[str]) -> None:
        self.ended.set()
        self._outbox.close()
        how = exit.result()
        if self.over.done():
            return
        self.over.set_result(how)
        if not self.told_to_stop and self._owner.outlives(self):
            return
        if not self._verdict.accused(self.name):
            self._accuse(Kind.DIED, how if how.startswith("was") else f"{how} without being told to")

    def _accuse(self, kind: Kind, reason: str) -> None:
        if not self.told_to_stop:
            self._verdict.accuse(kind, self.name, self.name, reason)
