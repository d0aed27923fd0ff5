"""Lazy links: the state table for every order of events, and two real ends with either one sending first."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.actors import lazy_opener
from flowrt.actors.lazy_channel import LazyChannel
from flowrt.actors.lazy_opener import FIRST, SECOND, LazyOpener, OpenerAction, OpenerEvent, OpenerState
from flowrt.transports.conformance.connection_checks import HERE, KEY, SMALL, THERE
from flowrt.transports.conformance.kit import numbered, receive_all
from flowrt.transports.contract import Channel, Listener
from flowrt.transports.errors import (
    AddressError,
    BrokenChannelError,
    ClosedChannelError,
    EndOfChannel,
    HandshakeError,
    LimitError,
    TransportError,
    UnavailableError,
)
from flowrt.transports.inproc import InprocChannel
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

SCHEMES = [scheme for scheme in ("inproc", "shm", "zmq") if unavailable_reason(scheme) is None]


@pytest.mark.parametrize("table", [FIRST, SECOND])
def test_every_channel_is_adopted_or_dropped_in_every_state(
    table: dict[tuple[OpenerState, OpenerEvent], tuple[OpenerState, tuple[OpenerAction, ...]]],
) -> None:
    for state in OpenerState:
        for event in (OpenerEvent.ARRIVED, OpenerEvent.OPENED):
            if (state, event) in table:
                _, actions = table[state, event]
                assert (OpenerAction.ADOPT in actions) != (OpenerAction.DROP in actions)
                assert (OpenerAction.MARK in actions) == (OpenerAction.ADOPT in actions and event is OpenerEvent.ARRIVED)
        assert (state, OpenerEvent.CLOSE) in table
        assert (state, OpenerEvent.WANTED) in table
        assert (state, OpenerEvent.ARRIVED) in table


@given(st.lists(st.sampled_from(["first wants", "second wants", "deliver"]), max_size=12), st.randoms(use_true_random=False))
def test_two_ends_agree_on_one_channel_whatever_the_order(happenings: list[str], choice: random.Random) -> None:
    """Calls are answered at the other end in any order; one that is not taken there is refused here; one hung up gets no answer."""
    states = {"first": OpenerState.IDLE, "second": OpenerState.IDLE}
    tables = {"first": FIRST, "second": SECOND}
    other = {"first": "second", "second": "first"}
    adopted: dict[str, str | None] = {"first": None, "second": None}  # by whose call the channel came
    calls: list[str] = []  # on the way, by caller
    hung_up: set[str] = set()

    def step(end: str, event: OpenerEvent, caller: str | None = None) -> tuple[OpenerAction, ...]:
        states[end], actions = tables[end][states[end], event]
        if OpenerAction.CALL in actions:
            calls.append(end)
        if OpenerAction.HANG_UP in actions:
            hung_up.add(end)
        if OpenerAction.ADOPT in actions:
            adopted[end] = caller
        return actions

    def deliver() -> None:
        caller = calls.pop(choice.randrange(len(calls)))
        if caller in hung_up:
            return
        taken = OpenerAction.ADOPT in step(other[caller], OpenerEvent.ARRIVED, caller)
        if caller not in hung_up:
            step(caller, OpenerEvent.OPENED if taken else OpenerEvent.REFUSED, caller)

    for happening in happenings:
        if happening == "deliver":
            if calls:
                deliver()
        else:
            step(happening.split()[0], OpenerEvent.WANTED)
    while calls:
        deliver()
    if any("wants" in happening for happening in happenings):
        assert states == {"first": OpenerState.READY, "second": OpenerState.READY}
        assert adopted["first"] == adopted["second"] is not None
    else:
        assert states == {"first": OpenerState.IDLE, "second": OpenerState.IDLE}


def states(*ends: LazyChannel) -> set[OpenerState]:
    return {end.opener.state for end in ends}


@asynccontextmanager
async def two_ends(scheme: str) -> AsyncIterator[tuple[LazyChannel, LazyChannel]]:
    """Two ends that both listen; nothing is open yet."""
    transport = get_transport(scheme)
    async with (
        await transport.listen(f"{scheme}://", SMALL, KEY, HERE) as here,
        await transport.listen(f"{scheme}://", SMALL, KEY, THERE) as there,
    ):

        async def accept(listener: Listener, opener: LazyOpener) -> None:
            while True:
                opener.offer(await listener.accept())

        one = LazyChannel(THERE, scheme, SMALL, partial(transport.connect, there.address, SMALL, KEY, HERE), True)
        two = LazyChannel(HERE, scheme, SMALL, partial(transport.connect, here.address, SMALL, KEY, THERE), False)
        accepting = [asyncio.ensure_future(accept(here, one.opener)), asyncio.ensure_future(accept(there, two.opener))]
        try:
            yield one, two
        finally:
            for task in accepting:
                task.cancel()
            await asyncio.wait(accepting)
            for end in (one, two):
                await end.aclose()


async def speak(end: LazyChannel, num_messages: int) -> None:
    for number in range(num_messages):
        if not end.send_nowait(numbered(number)):
            await end.send(numbered(number))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("speaker", ["first", "second", "both"])
async def test_channel_opens_at_the_first_send_of_either_end(scheme: str, speaker: str, loop_kind: str) -> None:
    async with asyncio.timeout(60), two_ends(scheme) as (one, two):
        receiving = [asyncio.ensure_future(receive_all(end, 0, 5)) for end in (one, two)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert states(one, two) == {OpenerState.IDLE}
        speakers = {"first": [one], "second": [two], "both": [one, two]}[speaker]
        await asyncio.gather(*(speak(end, 5) for end in speakers))
        for end in (one, two):
            if end not in speakers:
                await speak(end, 5)
        await asyncio.gather(*receiving)
        assert states(one, two) == {OpenerState.READY}
        assert one.statistics().messages_sent == two.statistics().messages_received in (5, 6)  # whoever was called has marked it ready


async def test_a_call_that_fails_is_a_broken_channel() -> None:
    async def call() -> Channel:
        raise AddressError("no process listens at inproc://x")

    end = LazyChannel(THERE, "inproc", SMALL, call, True)
    receiving = asyncio.ensure_future(end.recv())
    with pytest.raises(BrokenChannelError, match="inproc: no process listens"):
        await end.send(numbered(0))
    with pytest.raises(BrokenChannelError):
        await receiving
    assert end.closed
    await end.aclose()


async def test_a_handshake_that_is_hung_up_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known about the peer then; only when no process listens there, the link is lost at once."""
    monkeypatch.setattr(lazy_opener, "RETRY_SECONDS", (0.001, 0.001, 0.001))
    errors: list[TransportError] = [HandshakeError("hung up"), BrokenChannelError("reset"), UnavailableError("no descriptor")]
    async with asyncio.timeout(20), two_ends("inproc") as (one, two):
        call, one.opener._call = one.opener._call, lambda: flaky()

        async def flaky() -> Channel:
            if errors:
                raise errors.pop()
            return await call()

        await one.send(numbered(0))
        await receive_all(two, 0, 1)
        assert not errors

    async def hang_up() -> Channel:
        calls.append(None)
        raise HandshakeError("hung up")

    calls: list[None] = []
    end = LazyChannel(THERE, "inproc", SMALL, hang_up, True)
    with pytest.raises(BrokenChannelError, match="inproc: hung up"):
        await end.send(numbered(0))
    assert len(calls) == 4
    await end.aclose()


async def test_a_message_that_is_too_large_is_refused_at_once_and_opens_nothing() -> None:
    async with two_ends("inproc") as (one, _):
        large = SMALL.max_message_bytes + 1
        with pytest.raises(LimitError, match=str(large)):
            one.send_nowait(Message("data", tensors=(Tensor(TensorSpec("uint8", (large,)), bytes(large)),)))
        assert states(one) == {OpenerState.IDLE}


@pytest.mark.parametrize("plan", ["out.delay:0.05@0", "out.delay:0.02@100%"])
async def test_the_mark_goes_first_also_where_messages_are_held_up(plan: str) -> None:
    async with asyncio.timeout(60), two_ends(f"faulty+inproc?{plan}") as (one, two):
        await one.send(numbered(0))
        await receive_all(two, 0, 1)
        await speak(two, 3)
        await receive_all(one, 0, 3)


class Full(InprocChannel):
    """Has no room for its first message until `open` is called."""

    is_open = False

    def send_nowait(self, message: Message) -> bool:
        return self.is_open and super().send_nowait(message)

    async def send(self, message: Message) -> None:
        while not self.is_open:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await super().send(message)


async def test_no_message_overtakes_the_mark_on_a_full_channel() -> None:
    async def call() -> Channel:
        raise AssertionError

    for is_closed_first in (False, True):
        ours, theirs = Full.pair(SMALL, HERE, THERE)
        assert isinstance(ours, Full)
        assert isinstance(theirs, Full)
        end = LazyChannel(THERE, "inproc", SMALL, call, False)
        end.opener.offer(ours)
        sending = asyncio.ensure_future(end.send(numbered(0)))
        await asyncio.sleep(0)
        if is_closed_first:
            ours.is_open = True
            await end.aclose()
            with pytest.raises(ClosedChannelError):
                await sending
            continue
        ours.is_open = True
        assert not end.send_nowait(numbered(1)), "the mark has not gone yet"
        await sending
        theirs.is_open = True
        async with asyncio.timeout(20):
            assert (await theirs.recv()).kind == lazy_opener.READY_KIND
            await receive_all(theirs, 0, 1)
        await end.aclose()
        await theirs.aclose()


async def test_open_it_costs_nothing_more() -> None:
    """Every message passes these four."""
    async with two_ends("inproc") as (one, two):
        await one.send(numbered(0))
        await receive_all(two, 0, 1)
        for end in (one, two):
            for name in ("send", "send_nowait", "recv", "recv_nowait"):
                assert getattr(end, name).__self__ is end._channel
            assert end._channel is not None
            assert end.copies_at_once == end._channel.copies_at_once


async def test_closing_before_the_first_use_and_while_it_calls() -> None:
    async def call() -> Channel:
        await asyncio.Event().wait()
        raise AssertionError

    for speak in (False, True):
        end = LazyChannel(THERE, "inproc", SMALL, call, True)
        receiving = asyncio.ensure_future(end.recv())
        if speak:
            assert not end.send_nowait(numbered(0))
        await asyncio.sleep(0)
        await end.aclose()
        with pytest.raises(ClosedChannelError):
            await receiving
        with pytest.raises(ClosedChannelError):
            await end.send(numbered(0))


async def test_an_orderly_end_goes_through() -> None:
    async with two_ends("inproc") as (one, two):
        await one.send(numbered(0))
        await receive_all(two, 0, 1)
        await one.aclose()
        with pytest.raises(EndOfChannel):
            await two.recv()
