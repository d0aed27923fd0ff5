"""Lazy channels between three workers, over real transports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from flowrt.actors import lazy_opener
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
    fallbacks: tuple[str, ...] = (),
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
            [
                LinkPlan(peer, scheme, SMALL, 64, name < peer, None, fallbacks, is_lazy, between_hosts=host is not None)
                for peer in NAMES
                if peer != name
            ],
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


def states(links: dict[str, Links], scheme: str) -> dict[str, OpenerState]:
    return {
        f"{name}{peer}": channel.opener.state
        for name, each in links.items()
        for (peer, _), channel in each._channels.items()
        if channel.opener is not None
    }


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
async def test_only_the_links_that_are_used_are_opened(scheme: str, source: str, target: str, loop_kind: str) -> None:
    async with asyncio.timeout(60), workers(scheme) as (links, received):
        assert set(states(links, scheme).values()) == {OpenerState.IDLE}
        for number in range(20):
            links[source][target, scheme].post(numbered(number))
        await until(lambda: len(received[target]) >= 20, "all messages arrive")
        assert [message.tag.step for message in received[target] if message.tag] == list(range(20))
        opened = {pair for pair, state in states(links, scheme).items() if state is OpenerState.READY}
        assert opened == {"ab", "ba"}


def steps(messages: list[Message]) -> list[int]:
    return [message.tag.step for message in messages if message.tag]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_all_workers_send_at_once(scheme: str) -> None:
    async with asyncio.timeout(60), workers(scheme) as (links, received):
        for number in range(10):
            for name in NAMES:
                for peer in NAMES:
                    if peer != name:
                        links[name][peer, scheme].post(numbered(number))
        await until(lambda: all(len(messages) >= 20 for messages in received.values()), "all messages arrive")
        for name in NAMES:  # one more each: what came twice of those before would have come by then
            for peer in NAMES:
                if peer != name:
                    links[name][peer, scheme].post(numbered(99))
        await until(lambda: all(steps(messages).count(99) == 2 for messages in received.values()), "all have the last of both peers")
        assert {len(messages) for messages in received.values()} == {22}
        assert set(states(links, scheme).values()) == {OpenerState.READY}


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
async def test_first_call_that_fails_goes_to_the_fallback_transport(monkeypatch: pytest.MonkeyPatch, source: str, target: str) -> None:
    monkeypatch.setattr(lazy_opener, "RETRY_SECONDS", (0.001,))
    unreachable = Unreachable(get_transport(SCHEMES[-2]))

    def transport(scheme: str) -> Transport:
        return cast("Transport", unreachable) if scheme == SCHEMES[-2] else get_transport(scheme)

    async with asyncio.timeout(60), workers(SCHEMES[-2], (SCHEMES[-1],), transport) as (links, received):
        for number in range(20):
            links[source][target, SCHEMES[-2]].post(numbered(number))
        await until(lambda: len(received[target]) >= 20, "all messages arrive")
        links[target][source, SCHEMES[-2]].post(numbered(0))
        await until(lambda: len(received[source]) >= 1, "the other direction works too")
        assert [message.tag.step for message in received[target] if message.tag] == list(range(20))
        assert unreachable.num_calls == 2
        assert {each[peer, SCHEMES[-2]].scheme for each, peer in ((links[source], target), (links[target], source))} == {SCHEMES[-1]}


class LosesTheMark:
    """A transport whose first call is accepted and marked, and whose connection breaks before the caller has received the mark."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.num_broken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def connect(self, *arguments: Any) -> Channel:
        channel: Channel = await self._transport.connect(*arguments)
        if not self.num_broken:
            self.num_broken += 1
            assert (await channel.recv()).kind == lazy_opener.READY_KIND
            channel.abort("the connection was reset")
            with contextlib.suppress(BrokenChannelError):
                while True:  # what came behind the mark is lost with it
                    await channel.recv()
        return channel


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
async def test_call_that_breaks_before_its_mark_falls_back_and_loses_nothing(source: str, target: str) -> None:
    breaks = LosesTheMark(get_transport(SCHEMES[-2]))

    def transport(scheme: str) -> Transport:
        return cast("Transport", breaks) if scheme == SCHEMES[-2] else get_transport(scheme)

    async with asyncio.timeout(60), workers(SCHEMES[-2], (SCHEMES[-1],), transport) as (links, received):
        for number in range(20):
            links[source][target, SCHEMES[-2]].post(numbered(number))
        await until(lambda: len(received[target]) >= 20, "all messages arrive")
        assert [message.tag.step for message in received[target] if message.tag] == list(range(20))
        assert breaks.num_broken == 1
        assert {each[peer, SCHEMES[-2]].scheme for each, peer in ((links[source], target), (links[target], source))} == {SCHEMES[-1]}


BETWEEN_HOSTS = pytest.mark.skipif("zmq" not in SCHEMES, reason="needs zmq")
THIS_HOST = HostAddress(address="127.0.0.1")


async def check_carried_on(links: dict[str, Links], received: dict[str, list[Message]], scheme: str, source: str, target: str) -> None:
    """Messages both ways over a channel that breaks in the middle arrive once and in order, at last over zmq."""
    for number in range(60):
        links[source][target, scheme].post(numbered(number))
        links[target][source, scheme].post(numbered(number))
        await asyncio.sleep(0)
    await until(lambda: all(len(received[name]) >= 60 for name in (source, target)), "all messages arrive")
    for one, other in ((source, target), (target, source)):
        assert steps(received[one]) == list(range(60))
        assert links[one][other, scheme].scheme == "zmq"
        assert [text for text in links[one].fallbacks() if "broke, zmq carried on" in text]


@BETWEEN_HOSTS
@pytest.mark.parametrize("is_lazy", [True, False], ids=["lazy", "at start"])
@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
async def test_between_hosts_a_link_goes_on_at_the_published_address(source: str, target: str, is_lazy: bool) -> None:
    """The channel breaks at both ends; only one of them connects again."""
    scheme = "faulty+zmq?drop@17"
    async with asyncio.timeout(60), workers(scheme, ("zmq",), is_lazy=is_lazy, host=THIS_HOST) as (links, received):
        assert "127.0.0.1:" in links["b"]._listeners["zmq"].address
        await check_carried_on(links, received, scheme, source, target)


@BETWEEN_HOSTS
@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
async def test_between_hosts_a_call_that_breaks_before_its_mark_falls_back_and_loses_nothing(source: str, target: str) -> None:
    breaks = LosesTheMark(get_transport("faulty+zmq"))

    def transport(scheme: str) -> Transport:
        return cast("Transport", breaks) if scheme == "faulty+zmq" else get_transport(scheme)

    async with asyncio.timeout(60), workers("faulty+zmq", ("zmq",), transport, host=THIS_HOST) as (links, received):
        await check_carried_on(links, received, "faulty+zmq", source, target)
        assert breaks.num_broken == 1


@BETWEEN_HOSTS
async def test_between_hosts_a_call_that_the_other_end_has_not_seen_opens_its_link() -> None:
    """The calling end has lost a channel, and the other end has never had one: it takes the next call for the first."""

    class NeverArrives(LosesTheMark):
        async def connect(self, *arguments: Any) -> Channel:
            other = get_transport("inproc")
            async with await other.listen("inproc://", SMALL, KEY, Identity("b", "b1")) as listener:
                channel = await other.connect(listener.address, SMALL, KEY, Identity("a", "a1"))
                channel.abort("the connection was reset")
                await (await listener.accept()).aclose()
            return channel

    scheme = "faulty+zmq"
    never = NeverArrives(get_transport(scheme))

    def transport(name: str) -> Transport:
        return cast("Transport", never) if name == scheme else get_transport(name)

    async with asyncio.timeout(60), workers(scheme, ("zmq",), transport, host=THIS_HOST) as (links, received):
        links["a"]["b", scheme].post(numbered(0))
        await until(lambda: received["b"], "it arrives")
        assert links["a"]["b", scheme].scheme == "zmq"


@BETWEEN_HOSTS
async def test_between_hosts_a_link_of_an_earlier_incarnation_gets_no_channel() -> None:
    """Only the incarnation to which the link belongs may carry it on."""
    scheme = "faulty+zmq"
    async with asyncio.timeout(60), workers(scheme, ("zmq",), host=THIS_HOST) as (links, received):
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
