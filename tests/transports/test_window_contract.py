"""Windows: every scheme passes the same checks on both event loops."""

from __future__ import annotations

import socket

import msgspec
import pytest

from flowrt.transports.conformance.connection_checks import pair_maker
from flowrt.transports.conformance.kit import MakePair
from flowrt.transports.conformance.window_checks import WINDOW_CHECKS
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.registry import unavailable_reason
from flowrt.transports.stream import StreamChannel


async def _pipe_pair(limits: Limits) -> tuple[Channel, Channel]:
    one, two = socket.socketpair()
    return await StreamChannel.from_socket(one, limits, Identity("two")), await StreamChannel.from_socket(two, limits, Identity("one"))


async def _pair_with_copy_threads(limits: Limits) -> tuple[Channel, Channel]:
    return await pair_maker("shm")(msgspec.structs.replace(limits, copy_threads=3))


def _maker(scheme: str) -> MakePair:
    if scheme == "pipe":
        return _pipe_pair
    if (reason := unavailable_reason(scheme.partition("-")[0])) is not None:
        pytest.skip(reason)
    return _pair_with_copy_threads if scheme == "shm-copy-threads" else pair_maker(scheme)


@pytest.mark.parametrize("check", WINDOW_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("scheme", ["inproc", "shm", "shm-copy-threads", "zmq", "pipe"])
async def test_window(scheme: str, check, loop_kind: str) -> None:  # type: ignore[no-untyped-def]
    await check(_maker(scheme))
