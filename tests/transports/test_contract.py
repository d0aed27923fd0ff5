"""Every transport scheme passes the same check suite on both event loops."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref

import pytest

from flowrt.transports.conformance.channel_checks import CHANNEL_CHECKS
from flowrt.transports.conformance.connection_checks import CONNECTION_CHECKS, pair_maker
from flowrt.transports.conformance.kit import Check, MakePair, numbered, opened
from flowrt.transports.conformance.process_checks import PROCESS_CHECKS
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.registry import transport_class, unavailable_reason
from flowrt.transports.stream import StreamChannel

SCHEMES = ("inproc", "shm", "zmq", "ucx")


def _skip_unavailable(scheme: str) -> None:
    if (reason := unavailable_reason(scheme)) is not None:
        pytest.skip(reason)


async def _pipe_pair(limits: Limits) -> tuple[Channel, Channel]:
    one, two = socket.socketpair()
    return await StreamChannel.from_socket(one, limits, Identity("two")), await StreamChannel.from_socket(two, limits, Identity("one"))


def _maker(scheme: str) -> MakePair:
    if scheme == "pipe":
        return _pipe_pair
    if scheme == "zmq-tcp":
        return pair_maker("zmq", "zmq://127.0.0.1:0")
    return pair_maker(scheme)


@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", [*SCHEMES, "pipe", "zmq-tcp"])
async def test_channel(scheme: str, check: Check, loop_kind: str) -> None:
    if scheme != "pipe":
        _skip_unavailable(scheme.partition("-")[0])
    await check(_maker(scheme))


@pytest.mark.parametrize("check", [*CONNECTION_CHECKS, *PROCESS_CHECKS], ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_transport(scheme: str, check: Check, loop_kind: str) -> None:
    _skip_unavailable(scheme)
    if check in PROCESS_CHECKS and not transport_class(scheme).capabilities.between_processes:
        pytest.skip("stays within a process")
    await check(scheme)


@pytest.mark.parametrize("scheme", ["shm", "zmq"])
async def test_large_tensors_alias_the_memory_of_the_transport(scheme: str, loop_kind: str) -> None:
    _skip_unavailable(scheme)
    async with opened(pair_maker(scheme), Limits()) as (one, two):
        await one.send(numbered(0, 100_000))
        message = await two.recv()
        assert two.statistics().held_buffers == 1
        part = memoryview(message.tensors[0].data)[500:600]  # type: ignore[arg-type]
        part[0] = 255  # ours to write
        del message
        assert two.statistics().held_buffers == 1
        del part
        assert two.statistics().held_buffers == 0


@pytest.mark.parametrize("scheme", [*SCHEMES, "pipe"])
def test_nothing_keeps_an_event_loop_that_has_ended(scheme: str) -> None:
    if scheme != "pipe":
        _skip_unavailable(scheme)
    kept: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        kept.append(weakref.ref(asyncio.get_running_loop()))
        await CHANNEL_CHECKS[0](_maker(scheme))

    asyncio.run(main())
    gc.collect()
    assert kept[0]() is None
