"""The fault-injecting transport: each fault has its stated effect, other messages are untouched, and the record lists the faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import in_virtual_time

from flowrt.transports.conformance import channel_checks as checks
from flowrt.transports.conformance.connection_checks import HERE, KEY, SMALL, THERE, pair_maker
from flowrt.transports.conformance.kit import Check, carry_one, check_numbered, numbered, received_bytes, until, within
from flowrt.transports.contract import Channel
from flowrt.transports.errors import AddressError, BrokenChannelError
from flowrt.transports.fault_injection import transport as faulty
from flowrt.transports.fault_injection.plan import KINDS, FaultPlan, MessageFault, parse_plan
from flowrt.transports.registry import base_scheme, get_transport, transport_class, unavailable_reason
from flowrt.transports.wire.message import Message

SCHEMES = [scheme for scheme in ("inproc", "shm", "zmq") if unavailable_reason(scheme) is None]
COUNT = 12


@asynccontextmanager
async def afflicted(scheme: str, plan: str) -> AsyncIterator[tuple[Channel, Channel]]:
    """A healthy end, and one under `plan`."""
    faulty.injected.clear()
    bad = transport_class(f"faulty+{scheme}?{plan}")()
    async with await get_transport(scheme).listen(f"{scheme}://", SMALL, KEY, HERE) as listener:
        two = await bad.connect(f"faulty+{listener.address}", SMALL, KEY, THERE)
        one = await listener.accept()
        async with one, two:
            yield one, two


async def collect(channel: Channel) -> tuple[list[Message], type[BaseException] | None]:
    """What comes, and what ends it: the channel's error, or None for the message "last"."""
    messages: list[Message] = []
    try:
        while (message := await within(channel.recv(), "recv")).kind != "last":
            messages.append(message)
    except BrokenChannelError as error:
        return messages, type(error)
    return messages, None


async def collect_cut(sender: Channel, receiver: Channel) -> list[Message]:
    """What `receiver` gets of all that `sender` sends."""
    messages: list[Message] = []

    async def take() -> None:
        while True:
            messages.append(await receiver.recv())

    taking = asyncio.ensure_future(take())
    await send_count(sender)
    await until(lambda: receiver.statistics().messages_received == sender.statistics().messages_sent, "what was sent is received")
    await carry_one(receiver, sender)
    taking.cancel()
    await asyncio.wait([taking])
    assert receiver.recv_nowait() is None
    return messages


async def send_count(channel: Channel, count: int = COUNT) -> type[BaseException] | None:
    """Numbered messages and "last"; the error that ends the channel before."""
    try:
        for number in range(count):
            await channel.send(numbered(number, 3000))
        await channel.send(Message("last"))
    except BrokenChannelError:
        return BrokenChannelError
    return None


def steps(messages: list[Message]) -> list[int]:
    return [message.tag.step for message in messages if message.tag is not None]


@pytest.mark.parametrize("check", checks.CHANNEL_CHECKS, ids=lambda check: check.__name__)
async def test_without_a_plan_every_check_passes(check: Check) -> None:
    await check(pair_maker("faulty+inproc"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", ["", "out."])
@pytest.mark.parametrize(
    ("plan", "expected", "ends"),
    [
        ("drop@5", range(5), True),
        ("duplicate@5", [*range(6), *range(5, COUNT)], False),
        ("truncate@5", range(5), True),
        ("delay:0.01@5", range(COUNT), False),
        ("delay:0.002@3+", range(COUNT), False),
        ("stall:0.1@5", range(COUNT), False),
    ],
)
async def test_effect_of_each_fault(scheme: str, way: str, plan: str, expected: list[int], ends: bool, loop_kind: str) -> None:
    async with afflicted(scheme, way + plan) as (one, two):
        sender, receiver = (two, one) if way else (one, two)
        sending = asyncio.ensure_future(send_count(sender))
        messages, end = await collect(receiver)
        assert steps(messages) == list(expected)
        for message in messages:
            check_numbered(message, steps([message])[0], 3000)
        assert (end is BrokenChannelError) == ends
        if ends:
            assert await within(send_count(sender, 1_000_000), "both ends know") is BrokenChannelError
        await sending
        done = faulty.injected[0]
        kind = plan.partition("@")[0].partition(":")[0]
        number = 3 if "+" in plan else 5
        assert (done.direction, done.number, done.kind) == ("out" if way else "in", number, kind)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("way", ["", "out."])
async def test_a_cut_ends_one_direction(scheme: str, way: str, loop_kind: str) -> None:
    async with afflicted(scheme, f"{way}cut@5") as (one, two):
        sender, receiver = (two, one) if way else (one, two)
        assert steps(await collect_cut(sender, receiver)) == list(range(5))
        assert {(done.direction, done.kind) for done in faulty.injected} == {("out" if way else "in", "cut")}
        assert [done.number for done in faulty.injected][:2] == [5, 6]


async def test_a_flipped_bit_is_one_bit_or_the_end() -> None:
    outcomes = set()
    for seed in range(60):
        async with afflicted("inproc", f"flip@2,seed={seed}") as (one, two):
            for number in range(4):
                await one.send(numbered(number, 60))
            messages, end = await collect_now(two)
            if end is BrokenChannelError:
                assert steps(messages) == [0, 1]
                outcomes.add("broken")
                continue
            for number in (0, 1, 3):
                check_numbered(messages[number], number, 60)
            flipped = int.from_bytes(received_bytes(messages[2].tensors[0])) ^ int.from_bytes(received_bytes(numbered(2, 60).tensors[0]))
            outcomes.add(f"{flipped.bit_count()} bits of the tensor")
    assert outcomes == {"broken", "1 bits of the tensor", "0 bits of the tensor"}


async def collect_now(channel: Channel) -> tuple[list[Message], type[BaseException] | None]:
    messages: list[Message] = []
    try:
        while (message := channel.recv_nowait()) is not None:
            messages.append(message)
    except BrokenChannelError:
        return messages, BrokenChannelError
    return messages, None


@in_virtual_time
async def test_a_stalled_receiver_makes_the_sender_wait() -> None:
    async with afflicted("inproc", "stall:19.5@0") as (one, two):
        begun = asyncio.get_running_loop().time()
        receiving = asyncio.ensure_future(collect(two))
        sending = asyncio.ensure_future(send_count(one, 30))
        await asyncio.sleep(19.0)
        assert not sending.done()
        messages, _ = await receiving
        await sending
        assert asyncio.get_running_loop().time() - begun == pytest.approx(19.5, abs=0.1)
        assert steps(messages) == list(range(30))


@in_virtual_time
async def test_a_delayed_message_survives_a_cancelled_recv() -> None:
    async with afflicted("inproc", "delay:10@0") as (one, two):
        await one.send(numbered(0))
        begun = asyncio.get_running_loop().time()
        receiving = asyncio.ensure_future(two.recv())
        await asyncio.sleep(9.0)
        receiving.cancel()
        await asyncio.wait([receiving])
        assert two.recv_nowait() is None
        check_numbered(await two.recv(), 0)
        assert asyncio.get_running_loop().time() - begun == pytest.approx(10.0, abs=0.1)


async def test_the_same_seed_finds_the_same_messages() -> None:
    seen = []
    for seed in (1, 1, 2):
        async with afflicted("inproc", f"duplicate@20%,seed={seed}") as (one, two):
            sending = asyncio.ensure_future(send_count(one, 200))
            messages, _ = await collect(two)
            await sending
            seen.append(steps(messages))
    assert seen[0] == seen[1] != seen[2]
    assert 220 < len(seen[0]) < 260


@given(st.integers(0, 2**40), st.floats(0, 1))
def test_a_rate_is_a_rate(seed: int, rate: float) -> None:
    plan = FaultPlan((MessageFault(kind="drop", rate=rate),), seed)
    found = sum(bool(plan.faults_of(0, "in", number)) for number in range(500))
    assert abs(found / 500 - rate) < 0.12


def test_the_text_form() -> None:
    plan = parse_plan("drop@100,out.delay:0.005@1%,in.flip@7+,seed=3")
    assert plan == FaultPlan(
        (
            MessageFault(kind="drop", at=100),
            MessageFault(kind="delay", direction="out", rate=0.01, seconds=0.005),
            MessageFault(kind="flip", at=7, onward=True),
        ),
        3,
    )
    assert parse_plan("") == FaultPlan()
    assert all(parse_plan(f"{kind}@1").faults[0].kind == kind for kind in KINDS)


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        ("faulty+shm?explode@1", "'explode@1' is not a fault; kinds are delay"),
        ("faulty+shm?drop", "'drop' is not a fault"),
        ("faulty+shm?drop@1.5", "integer"),
        ("faulty+shm?drop@150%", "at most 100%"),
        ("faulty+shm?cut@5%", "begins at a message"),
        ("faulty+shm?drop:3@5", "only delay and stall take seconds"),
        ("faulty+nosuch", "unknown transport 'nosuch'"),
        ("faulty+faulty+shm", "one plan is enough"),
    ],
)
def test_invalid_plan_is_reported(scheme: str, text: str) -> None:
    with pytest.raises(AddressError, match=text.replace("?", "\\?").replace("+", "\\+")):
        get_transport(scheme)


def test_names() -> None:
    assert base_scheme("faulty+shm?drop@3") == base_scheme("faulty+shm") == base_scheme("shm") == "shm"
    wrapped = transport_class("faulty+shm?drop@3")
    assert wrapped.scheme == "faulty+shm?drop@3"
    assert wrapped.capabilities == transport_class("shm").capabilities
