"""Creates libzmq's context and the sockets of each channel, and authenticates their peers.

Encryption is CURVE. No key is distributed for it: both ends derive both key pairs of a channel from the session key of the handshake, so
each channel has its own keys. libzmq requests a decision from a handler (ZAP) for each client's key. Without a handler, also after the
handler has died, libzmq admits every key. So the server of each channel names a domain of its own and enforces it (ZAP_ENFORCE_DOMAIN):
a missing response is a refusal. The handler admits to a domain only the key of the channel's other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from flowrt.transports.contract import Limits
from flowrt.transports.wire.address import with_port
from flowrt.transports.wire.handshake import Handshake

try:
    import zmq
    from zmq.utils import z85
except ImportError as error:
    missing: str | None = str(error)
else:
    from flowrt.transports.zeromq.loans import Lender, available

    missing = None

FRAME_BYTES = 8  # before the envelope, in the first frame of a message
CURVE_BYTES = 33  # that encryption adds to a frame
INLINE_BYTES = 8192
_NEVER = 7 * 24 * 3600 * 1000  # ms; with -1 (never) libzmq discards what it has read when the connection is lost
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ADMITTED, _REFUSED = (b"200", b"OK"), (b"400", b"this key belongs to no peer of this process")
_FATAL = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Blocks signals, because a signal makes pyzmq abandon the creation of a monitor and the end of a context."""
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FATAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


class CurveKeys(NamedTuple):
    """The secret keys of a channel's two sockets, 32 bytes each."""

    server: bytes  # key of the connector, which binds
    client: bytes

    @classmethod
    def derive(cls, handshake: Handshake) -> CurveKeys:
        """Derives the keys from a completed handshake; both ends derive the same keys."""
        return cls(handshake.session_key("zmq curve server"), handshake.session_key("zmq curve client"))


def public_key(secret: bytes) -> bytes:
    """Returns the public key of `secret` in libzmq's text form."""
    made: bytes = zmq.curve_public(_text(secret))
    return made


def _text(key: bytes) -> bytes:
    text: bytes = z85.encode(key)
    return text


class Authenticator:
    """The ZAP handler, which decides whether a key may connect to a domain. It is bound while the process has encrypted servers."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.admitted: dict[bytes, bytes] = {}  # domain -> the one public key, as raw bytes
        self.refused = 0
        self._socket: zmq.Socket[Any] = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(_ZAP_ENDPOINT)
        except zmq.ZMQError:
            self._socket.close(0)  # the end of the context would wait for it
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(self._socket.get(zmq.FD)), self._respond)

    def close(self) -> None:
        self._loop.remove_reader(int(self._socket.get(zmq.FD)))
        self._socket.unbind(_ZAP_ENDPOINT)  # now; `close` would do it later, and the next handler could not bind meanwhile
        self._socket.close(0)

    def _respond(self) -> None:
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            request = self._socket.recv_multipart(zmq.NOBLOCK)
            status, text = self._decide(request)
            number = request[1] if len(request) > 1 else b""
            self._socket.send_multipart([b"1.0", number, status, text, b"", b""], zmq.NOBLOCK)

    def _decide(self, request: list[bytes]) -> tuple[bytes, bytes]:
        if len(request) == 7 and request[0] == b"1.0" and request[5] == b"CURVE":
            admitted = self.admitted.get(request[2])
            if admitted is not None and secrets.compare_digest(admitted, request[6]):
                return _ADMITTED
        self.refused += 1
        return _REFUSED


class SharedContext:
    """libzmq's context and I/O thread, one per thread with an event loop, alive while any channel's socket is open. The handler of a
    context answers in one loop only, and a graph of another thread may outlive that."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._process = 0
        self._users = 0
        self.authenticator: Authenticator | None = None
        self.lender: Lender | None = None  # None: memory cannot be lent, so every frame is copied

    def socket(self, limits: Limits) -> zmq.Socket[bytes]:
        """Returns a new PAIR socket; pass it to `close` afterwards."""
        if self._context is None or self._process != os.getpid():  # a forked child must not use its parent's context
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, 60000)
            self._process = os.getpid()
            self._users = 0
            self.authenticator = None
            self.lender = Lender() if available() else None
        self._users += 1
        try:
            made: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        except zmq.ZMQError:
            self._release()
            raise
        made.set(zmq.LINGER, 0)
        made.set(zmq.SNDHWM, 0)  # no limit here: the credit window bounds both queues
        made.set(zmq.RCVHWM, 0)
        made.set(zmq.RECONNECT_IVL, _NEVER)
        made.set(zmq.MAXMSGSIZE, max(limits.max_message_bytes, FRAME_BYTES + limits.max_header_bytes + INLINE_BYTES) + CURVE_BYTES)
        return made

    def close(self, pair: zmq.Socket[bytes], monitor: zmq.Socket[Any] | None) -> None:
        """Closes the sockets of one channel, and the context with the last of them."""
        self._withdraw_key(pair)
        pair.disable_monitor()  # first: libzmq's I/O thread blocks forever on an event for a closed monitor
        pair.close(0)
        if monitor is not None:
            monitor.close(0)
        self._release()

    def _release(self) -> None:
        self._users -= 1
        if self.lender is not None:
            self.lender.collect()
        if not self._users and self._context is not None:
            context, self._context = self._context, None
            with _undisturbed():
                context.term()  # returns once all lent memory is returned
            self.lender = None

    def encrypt_server(self, pair: zmq.Socket[bytes], keys: CurveKeys) -> None:
        """Restricts `pair` to the client of `keys`; call it before `bind`."""
        if self.authenticator is None:
            self.authenticator = Authenticator(pair.context)
        domain = secrets.token_hex(16)
        self.authenticator.admitted[domain.encode()] = z85.decode(public_key(keys.client))
        pair.set(zmq.CURVE_SERVER, 1)
        pair.set(zmq.CURVE_SECRETKEY, _text(keys.server))
        pair.set_string(zmq.ZAP_DOMAIN, domain)
        pair.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def encrypt_client(self, pair: zmq.Socket[bytes], keys: CurveKeys) -> None:
        """Restricts `pair` to the server of `keys`; call it before `connect`."""
        pair.set(zmq.CURVE_SERVERKEY, public_key(keys.server))
        pair.set(zmq.CURVE_SECRETKEY, _text(keys.client))
        pair.set(zmq.CURVE_PUBLICKEY, public_key(keys.client))

    def _withdraw_key(self, pair: zmq.Socket[Any]) -> None:
        if self.authenticator is None or not pair.get(zmq.CURVE_SERVER):
            return
        domain = pair.get(zmq.ZAP_DOMAIN)
        self.authenticator.admitted.pop(domain if isinstance(domain, bytes) else str(domain).encode(), None)
        if not self.authenticator.admitted:
            self.authenticator.close()
            self.authenticator = None


_of_thread = threading.local()


def shared_context() -> SharedContext:
    """That of this thread."""
    found: SharedContext | None = getattr(_of_thread, "context", None)
    if found is None:
        found = _of_thread.context = SharedContext()
    return found


def pair_and_monitor(context: SharedContext, limits: Limits) -> tuple[zmq.Socket[bytes], zmq.Socket[Any]]:
    """Returns a PAIR socket for a channel and the monitor socket of its connection."""
    pair = context.socket(limits)
    events = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
    refusals = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    try:
        with _undisturbed():
            return pair, pair.get_monitor_socket(events | refusals)
    except zmq.ZMQError:
        context.close(pair, None)
        raise


def bind(pair: zmq.Socket[bytes], host: str | None, ports: range) -> str:
    """Binds to a new endpoint and returns it: a free TCP port of `host`, or a random ipc name when `host` is None. `ports`: those that may
    be used; 0 means any."""
    if host is not None:
        pair.set(zmq.IPV6, int(":" in host))
        for port in ports:
            try:
                pair.bind(f"tcp://{with_port(host, port or '*')}")
                break
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE or port == ports[-1]:
                    raise
        bound = pair.get(zmq.LAST_ENDPOINT)
        return (bound if isinstance(bound, bytes) else bytes(str(bound), "ascii")).decode("ascii").rstrip("\0")
    endpoint = f"ipc://@flowrt/zmq-data/{secrets.token_hex(16)}"
    pair.set(zmq.IPC_FILTER_UID, os.geteuid())
    pair.bind(endpoint)
    return endpoint
