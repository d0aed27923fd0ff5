"""Accepts the connections of a listening socket one after another.

A loop's own server accepts all that wait before it reads from any, so a crowd would push out its own members before their requests are
read. Without a descriptor left, that of uvloop accepts connections only to close them. And no loop shows a connection to its protocol
before the TLS handshake has ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import Any

from flowrt.processes.descriptors import is_too_few, too_few_descriptors

log = logging.getLogger("flowrt.front_end")

TLS_SECONDS = 10.0
ACCEPT_SECONDS = 1.0  # until the next try when no descriptor is left


async def accept_connections(
    listener: socket.socket, context: SSLContext | None, new_protocol: Callable[[], Any], wait_for_room: Callable[[], Awaitable[None]]
) -> None:
    """Accept until it is cancelled, then close the socket. `context`: of TLS. `new_protocol` makes a BoundedProtocol (http_server.py)."""
    loop = asyncio.get_running_loop()
    has_noted = False

    async def open_connection(accepted: socket.socket, protocol: Any) -> None:
        try:
            seconds = None if context is None else TLS_SECONDS
            await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context, ssl_handshake_timeout=seconds)
        except Exception as error:  # it must not end the others
            accepted.close()
            log.debug("a connection ended in its first moment: %r", error)

    async def shake_hands(accepted: socket.socket, protocol: Any) -> None:
        try:
            await open_connection(accepted, protocol)
        finally:
            protocol.end_handshake()

    with listener:
        listener.setblocking(False)
        async with asyncio.TaskGroup() as handshakes:
            while True:
                await wait_for_room()
                try:
                    accepted, _ = await loop.sock_accept(listener)
                except OSError as error:
                    if is_too_few(error):
                        if not has_noted:
                            log.warning("connections wait: %s", too_few_descriptors())
                        has_noted = True
                        await _pause(loop, ACCEPT_SECONDS)
                    else:  # its client has left already; should the system be the cause, others are served meanwhile
                        await asyncio.sleep(0)
                    continue
                has_noted = False
                protocol = new_protocol()
                if context is None:
                    await open_connection(accepted, protocol)
                else:
                    protocol.begin_handshake(handshakes.create_task(shake_hands(accepted, protocol), name="TLS handshake").cancel)
                await asyncio.sleep(0)  # what gave way is closed; until a handshake has begun, its cancellation would leave the socket open


async def _pause(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    may_go_on = asyncio.Event()
    loop.call_later(seconds, may_go_on.set)
    await may_go_on.wait()
