"""The launcher's end of a control connection: messages arrive in the order in which they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from flowrt.actors.control import Cancel, Control, Drain, Statistics, StatisticsRequest, as_message, from_message
from flowrt.launcher.control_connection import MAX_QUEUED, ControlConnection
from flowrt.system.process_backend import CONTROL_LIMITS
from flowrt.transports.contract import Identity
from flowrt.transports.errors import ClosedChannelError, TransportError
from flowrt.transports.inproc import InprocChannel

NUM_POSTED = 4 * CONTROL_LIMITS.capacity_messages


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[ControlConnection, InprocChannel, asyncio.Task[None]]]:
    """A control connection, the worker's end of it, and the task that receives. The worker ends with the block."""
    ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity("gateway"), Identity("worker", "1"))
    connection = ControlConnection("worker", "1", 1, ours, pytest.fail)
    receiving = asyncio.create_task(connection.receive_all(lambda control: None))
    yield connection, theirs, receiving
    await theirs.aclose()
    await receiving
    await connection.aclose()


async def test_no_message_overtakes_a_queued_one() -> None:
    async with connected() as (connection, theirs, receiving):
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


async def test_send_that_waits_fails_when_the_worker_ends() -> None:
    async with connected() as (connection, theirs, _):
        for attempt in range(NUM_POSTED):
            connection.post(Cancel("0", attempt))
        sending = asyncio.create_task(connection.send(Drain()))
        await asyncio.sleep(0)
        await theirs.aclose()
        with pytest.raises(TransportError):
            await sending


async def test_a_full_queue_is_reported_and_loses_nothing_silently() -> None:
    ours, theirs = InprocChannel.pair(CONTROL_LIMITS, Identity("gateway"), Identity("worker", "1"))
    overflows: list[None] = []
    connection = ControlConnection("worker", "1", 1, ours, lambda name, incarnation: overflows.append(None))
    for attempt in range(MAX_QUEUED + CONTROL_LIMITS.capacity_messages):
        connection.post(Cancel("0", attempt))
    await asyncio.sleep(0)
    assert not overflows
    connection.post(Cancel("0", 0))
    with pytest.raises(ClosedChannelError):
        await connection.send(Drain())
    response = connection.request(StatisticsRequest())
    await asyncio.sleep(0)
    assert len(overflows) == 3
    connection.give_up_requests()
    assert response.done()
    await connection.aclose()
    await theirs.aclose()


async def test_requests_to_a_stopped_worker_are_sent_once_and_share_the_response() -> None:
    async with connected() as (connection, theirs, _):
        responses = [connection.request(StatisticsRequest()) for _ in range(NUM_POSTED)]
        assert from_message(await theirs.recv()) == StatisticsRequest()
        await theirs.send(as_message(Statistics(num_steps=3)))
        await asyncio.wait(responses)
        assert connection.statistics.num_steps == 3
        connection.post(Cancel("0", 0))
        assert from_message(await theirs.recv()) == Cancel("0", 0), "no second request was sent"
