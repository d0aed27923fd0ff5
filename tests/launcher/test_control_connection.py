"""The launcher's end of a control connection: messages arrive in the order in which they were sent."""

from __future__ import annotations

import asyncio

import pytest

from flowrt.actors.control import Cancel, Control, Drain, from_message
from flowrt.launcher.control_connection import ControlConnection
from flowrt.process_backend import CONTROL_LIMITS
from flowrt.transports.contract import Identity
from flowrt.transports.errors import TransportError
from flowrt.transports.inproc import InprocChannel

NUM_POSTED = 4 * CONTROL_LIMITS.capacity_messages


async def test_no_message_overtakes_a_queued_one() -> None:
    ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity("gateway"), Identity("worker", "1"))
    connection = ControlConnection("worker", "1", 1, ours)
    receiving = asyncio.create_task(connection.receive_all(lambda control: None))
    for attempt in range(NUM_POSTED):
        connection.post(Cancel("0", attempt))
    sending = asyncio.create_task(connection.send(Drain()))
    received: list[Control] = []
    while not received or not isinstance(received[-1], Drain):
        received.append(from_message(await theirs.recv()))
    await sending
    assert received[:-1] == [Cancel("0", attempt) for attempt in range(NUM_POSTED)]
    await theirs.aclose()
    await receiving
    with pytest.raises(TransportError):
        await connection.send(Drain())
    await connection.aclose()


async def test_send_that_waits_fails_when_the_worker_ends() -> None:
    ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity("gateway"), Identity("worker", "1"))
    connection = ControlConnection("worker", "1", 1, ours)
    receiving = asyncio.create_task(connection.receive_all(lambda control: None))
    for attempt in range(NUM_POSTED):
        connection.post(Cancel("0", attempt))
    sending = asyncio.create_task(connection.send(Drain()))
    await asyncio.sleep(0)
    await theirs.aclose()
    with pytest.raises(TransportError):
        await sending
    await receiving
    await connection.aclose()
