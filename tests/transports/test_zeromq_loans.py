"""Zero-copy sends over ZeroMQ: a large tensor stays in place until libzmq has written it, and no longer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from flowrt.transports.channel import greeted
from flowrt.transports.conformance.connection_checks import SMALL
from flowrt.transports.conformance.kit import within
from flowrt.transports.conformance.process_checks import other_process, pause
from flowrt.transports.contract import Channel
from flowrt.transports.registry import transport_class
from flowrt.transports.wire.message import Message, Tensor, TensorSpec
from flowrt.transports.zeromq import sockets as zeromq_sockets
from flowrt.transports.zeromq import transport as zeromq
from flowrt.transports.zeromq.loans import Lender, available

needs_loans = pytest.mark.skipif(not available(), reason="nothing can be lent without the C module")
LARGE = SMALL.max_message_bytes  # more than the kernel takes of a message for a peer that is stopped


def one_tensor(data: bytearray) -> Message:
    return Message("data", tensors=(Tensor(TensorSpec("uint8", (len(data),)), data),))


async def echoed(channel: Channel) -> bytes:
    data: Any = (await within(channel.recv(), "the echo")).tensors[0].data
    return bytes(data)


def num_lent(lender: Lender) -> int:
    """The number of frames that libzmq has not returned."""
    return sum(not loan.returned for loan in lender._lent)


async def until_returned(lender: Lender, still: int = 0) -> None:
    async with asyncio.timeout(60):
        while num_lent(lender) > still:  # noqa: ASYNC110  # no task is woken when a loan ends
            await asyncio.sleep(0.001)
    lender.collect()


def the_lender() -> Lender:
    lender = zeromq_sockets.shared_context().lender
    assert lender is not None
    return lender


@needs_loans
async def test_a_large_tensor_is_sent_from_where_it_lies(loop_kind: str) -> None:
    assert transport_class("zmq").capabilities.borrows_sender
    async with other_process("zmq", "echo") as (channel, peer):
        pause(peer)
        data = bytearray(b"a" * LARGE)
        await channel.send(one_tensor(data))
        assert num_lent(the_lender()) == 1
        with pytest.raises(BufferError):
            data.append(0)  # the memory cannot be taken away meanwhile
        data[-1:] = b"b"  # against the contract: a copy would not have it
        peer.send_signal(signal.SIGCONT)
        assert await echoed(channel) == b"a" * (LARGE - 1) + b"b"
        await until_returned(the_lender())
        data.append(0)


@needs_loans
async def test_a_small_tensor_is_the_callers_again() -> None:
    async with other_process("zmq", "echo") as (channel, peer):
        pause(peer)
        data = bytearray(b"a" * (zeromq.LENT_BYTES - 1))
        await channel.send(one_tensor(data))
        data[:] = bytes(len(data))
        peer.send_signal(signal.SIGCONT)
        assert set(await echoed(channel)) == {ord("a")}


async def test_without_the_c_module_all_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    async with other_process("zmq", "echo") as (channel, peer):
        monkeypatch.setattr(zeromq_sockets.shared_context(), "lender", None)
        pause(peer)
        data = bytearray(b"a" * LARGE)
        await channel.send(one_tensor(data))
        data.append(0)
        data[:] = bytes(len(data))
        peer.send_signal(signal.SIGCONT)
        assert set(await echoed(channel)) == {ord("a")}


@needs_loans
async def test_what_is_lent_comes_back_when_the_channel_ends_before_the_peer_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeted, "LINGER_SECONDS", 0.05)
    data = bytearray(os.urandom(LARGE))
    async with other_process("zmq", "echo") as (channel, peer):
        lender = the_lender()
        pause(peer)
        await channel.send(one_tensor(data))
        assert num_lent(lender) == 1
        await channel.aclose()
        await until_returned(lender)
    data.append(0)
    assert zeromq_sockets.shared_context().lender is None


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Two PAIR sockets; frames for the second leave, frames without a receiver wait in the first."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    there, nowhere = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    other = context.socket(zmq.PAIR)
    other.bind(f"ipc://{tmp_path}/there")
    there.connect(f"ipc://{tmp_path}/there")
    nowhere.connect(f"ipc://{tmp_path}/nowhere")
    yield there, nowhere
    for socket in (there, nowhere, other):
        socket.close(0)
    context.term()


@needs_loans
async def test_one_that_is_held_up_does_not_keep_the_others(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    there, nowhere = pair
    lender = Lender()
    lender.send(nowhere, bytes(100), zmq.NOBLOCK)
    for _ in range(20):
        lender.send(there, bytes(100), zmq.NOBLOCK)
    await until_returned(lender, 1)
    nowhere.close(0)
    await until_returned(lender)


@needs_loans
async def test_a_frame_that_cannot_be_sent_is_not_lent(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    lender = Lender()
    alone: zmq.Socket[bytes] = pair[0].context.socket(zmq.PAIR)
    data = bytearray(100)
    try:
        with pytest.raises(zmq.ZMQError):
            lender.send(alone, data, zmq.NOBLOCK)
    finally:
        alone.close(0)
    assert num_lent(lender) == 0
    lender.collect()
    data.append(0)
