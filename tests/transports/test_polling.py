"""Polling before sleep, of the shared-memory transport: how often, and that no message waits for a wake-up in it."""

from __future__ import annotations

import asyncio
import os

import pytest

from flowrt.transports.conformance.connection_checks import pair_maker
from flowrt.transports.conformance.kit import check_numbered, numbered, opened, until, within
from flowrt.transports.contract import Channel
from flowrt.transports.registry import unavailable_reason
from flowrt.transports.shared_memory.polling import MAX_POLLS, MAX_SLEEPS, Polling

needs_shm = pytest.mark.skipif(unavailable_reason("shm") is not None, reason=str(unavailable_reason("shm")))


def poll_in_vain(polling: Polling) -> int:
    """How often a wait polls that finds nothing."""
    num_polls = 1
    while polling.found_nothing():
        num_polls += 1
    return num_polls


def waits_that_sleep(polling: Polling) -> int:
    """How many waits sleep at once before the next one that polls."""
    count = 0
    while not polling.begin():
        count += 1
    return count


def test_waits_sleep_more_often_while_polls_are_in_vain() -> None:
    polling, sleeps = Polling(), list[int]()
    for _ in range(8):
        sleeps.append(waits_that_sleep(polling))
        assert poll_in_vain(polling) == MAX_POLLS
    assert sleeps == [0, 1, 3, 7, 15, 31, MAX_SLEEPS, MAX_SLEEPS]


def test_a_message_that_is_found_ends_the_sleeps() -> None:
    polling = Polling()
    for _ in range(5):
        waits_that_sleep(polling)
        poll_in_vain(polling)
    waits_that_sleep(polling)
    assert polling.found_nothing(), "one poll in vain"
    polling.found()
    for _ in range(3):
        assert polling.begin()
        polling.found()
    assert polling.begin()
    poll_in_vain(polling)
    assert waits_that_sleep(polling) == 1


def sleep_flag_is_up(channel: Channel) -> bool:
    return channel._reader.flag_is_up()  # type: ignore[attr-defined]


@needs_shm
async def test_a_message_found_by_polling_needs_no_wake_up(monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    monkeypatch.setattr(os, "eventfd_read", lambda descriptor: pytest.fail("a wake-up"))
    async with opened(pair_maker("shm")) as (one, two):
        for number in range(50):
            receiving = asyncio.ensure_future(two.recv())
            for _ in range(number):  # turns of the loop, fewer than MAX_POLLS
                await asyncio.sleep(0)
            assert not sleep_flag_is_up(two)
            await one.send(numbered(number))
            check_numbered(await within(receiving, "recv"), number)
        monkeypatch.undo()


@needs_shm
async def test_a_receiver_that_has_polled_in_vain_sleeps_and_is_woken(loop_kind: str) -> None:
    async with opened(pair_maker("shm")) as (one, two):
        for number in range(10):
            receiving = asyncio.ensure_future(two.recv())
            await until(lambda: sleep_flag_is_up(two), "the receiver sleeps")
            await one.send(numbered(number))
            check_numbered(await within(receiving, "recv"), number)


@needs_shm
@pytest.mark.parametrize("ends", ["own", "peer", "cancelled"])
async def test_an_end_while_a_receiver_polls(ends: str, loop_kind: str) -> None:
    failures = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    async with opened(pair_maker("shm")) as (one, two):
        receiving = asyncio.ensure_future(two.recv())
        await asyncio.sleep(0)
        assert not sleep_flag_is_up(two), "it polls"
        if ends == "cancelled":
            receiving.cancel()
            await asyncio.wait([receiving])
            second = asyncio.ensure_future(two.recv())
            await one.send(numbered(0))
            check_numbered(await within(second, "recv"), 0)
        else:
            await (two if ends == "own" else one).aclose()
            assert isinstance((await within(asyncio.gather(receiving, return_exceptions=True), "recv"))[0], Exception)
        for _ in range(2 * MAX_POLLS):
            await asyncio.sleep(0)
    assert not failures
