"""Lazy channels between three workers, over real transports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowrt.actors.lazy_opener import OpenerState
from flowrt.actors.link_plan import LinkPlan
from flowrt.actors.links import Links
from flowrt.transports.conformance.connection_checks import KEY, SMALL
from flowrt.transports.conformance.kit import numbered, until
from flowrt.transports.contract import Channel, HostAddress, Identity, Transport
from flowrt.transports.errors import BrokenChannelError, EndOfChannel
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.wire.message import Message

NAMES = ("a", "b", "c")
SCHEMES = [scheme for scheme in ("inproc", "shm", "zmq") if unavailable_reason(scheme) is None]


class Unreachable:
    """A transport whose listeners work and whose calls fail."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def connect(self, *arguments: object) -> Channel:
        self.num_calls += 1
        raise BrokenChannelError("too many open files")


@asynccontextmanager
async def workers(
    scheme: str,
    transport: Callable[[str], Transport] = get_transport,
    *,
    is_lazy: bool = True,
    host: HostAddress | None = None,
) -> AsyncIterator[tuple[dict[str, Links], dict[str, list[Message]]]]:
    """Each process has a link to each other one, and none is open if they are lazy. `host`: they are on several hosts, all of this
    address."""
    received: dict[str, list[Message]] = {name: [] for name in NAMES}
    links = {
        name: Links(
            Identity(name, f"{name}1"),
            KEY,
            [LinkPlan(peer, scheme, SMALL, 64, name < peer, None, is_lazy) for peer in NAMES if peer != name],
            transport,
            lambda _, message, name=name: received[name].append(message),
            host_address=host or HostAddress(),
        )
        for name in NAMES
    }
    async with contextlib.AsyncExitStack() as stack:
        addresses = {}
        for name, each in links.items():
            stack.push_async_callback(each.aclose)
            addresses[name] = await each.listen()
        await asyncio.gather(*(each.open(addresses, {name: f"{name}1" for name in NAMES}) for each in links.values()))
        running = [asyncio.ensure_future(each.run()) for each in links.values()]
        try:
            yield links, received
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)


def states(links: dict[str, Links]) -> dict[str, OpenerState]:
    return {f"{name}{peer}": channel.opener.state for name, each in links.items() for (peer, _), channel in each._lazy.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
async def test_only_the_links_that_are_used_are_opened(scheme: str, source: str, target: str, loop_kind: str) -> None:
    async with asyncio.timeout(60), workers(scheme) as (links, received):
        assert set(states(links).values()) == {OpenerState.IDLE}
        for number in range(20):
            links[source][target, scheme].post(numbered(number))
        await until(lambda: len(received[target]) >= 20, "all messages arrive")
        assert [message.tag.step for message in received[target] if message.tag] == list(range(20))
        opened = {pair for pair, state in states(links).items() if state is OpenerState.READY}
        assert opened == {"ab", "ba"}


def steps(messages: list[Message]) -> list[int]:
    return [message.tag.step for message in messages if message.tag]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_all_workers_send_at_once(scheme: str) -> None:
    async with asyncio.timeout(60), workers(scheme) as (links, received):
        for number in range(10):
            for source, target in itertools.permutations(NAMES, 2):
                links[source][target, scheme].post(numbered(number))
        await until(lambda: all(len(messages) >= 20 for messages in received.values()), "all messages arrive")
        for source, target in itertools.permutations(NAMES, 2):  # one more each: what came twice before would have come by then
            links[source][target, scheme].post(numbered(99))
        await until(lambda: all(steps(messages).count(99) == 2 for messages in received.values()), "all have the last of both peers")
        assert {len(messages) for messages in received.values()} == {22}
        assert set(states(links).values()) == {OpenerState.READY}


@pytest.mark.skipif("zmq" not in SCHEMES, reason="needs zmq")
async def test_between_hosts_a_link_of_an_earlier_incarnation_gets_no_channel() -> None:
    scheme = "zmq"
    async with asyncio.timeout(60), workers(scheme, host=HostAddress(address="127.0.0.1")) as (links, received):
        links["a"]["b", scheme].post(numbered(0))
        await until(lambda: received["b"], "the link is open")
        address = links["b"]._listeners["zmq"].address
        stranger = await get_transport("zmq").connect(address, SMALL, KEY, Identity("a", "a0"))
        with pytest.raises((BrokenChannelError, EndOfChannel)):
            await stranger.recv()
        await stranger.aclose()
        links["a"]["b", scheme].post(numbered(1))
        await until(lambda: len(received["b"]) == 2, "the link goes on")
        assert links["a"]["b", scheme].scheme == scheme
