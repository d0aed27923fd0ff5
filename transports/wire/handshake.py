"""Implements the handshake by which two processes prove to each other that they belong to the same run.

The handshake is a pure state machine, bytes in and bytes out, for any medium that carries bytes in order; message boundaries are not
needed. rendezvous.py has the sockets and time-outs. The pattern is challenge and response with HMAC-SHA256 on both sides, as in SASL SCRAM
or WireGuard's pre-shared key; a random 32-byte key needs neither their password part nor their key exchange. Both proofs cover both hellos,
and so both nonces, identities, limits and the protocol version.

    connector                                 listener
    hello(version, nonce, identity, limits)  ->
                                             <-  hello(...), proof("listener")
    proof("connector"), payload              ->

A listener may send `evicted` in place of its response; the connector may then connect again.

Each frame is `uint32 length, uint8 kind, body`, little-endian. In every version, a hello's body starts with the magic word and the version,
so that the error of a mismatch can name both versions. The payload is the first data of the scheme (an endpoint, sizes); the proof covers
it as well. No frame larger than MAX_FRAME_BYTES is stored for a peer that has not proved the key.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import Literal

import msgspec

from flowrt.transports.contract import PROTOCOL_VERSION, Identity, Limits
from flowrt.transports.errors import HandshakeError

KEY_BYTES = 32
NONCE_BYTES = 32
MAX_FRAME_BYTES = 2048
MAX_NAME_CHARACTERS = 256
MAX_PAYLOAD_BYTES = 1024
_MAGIC = b"flowrt"
_FRAME = struct.Struct("<IB")
_HELLO, _PROOF, _EVICTED = 1, 2, 3
_VERSION = struct.Struct("<6sH")

Role = Literal["connector", "listener"]


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    scheme: str
    nonce: bytes
    name: str
    incarnation: str
    limits: tuple[int, int, int, int, int, int, int]  # the fields of Limits, in their order


_decode_hello = msgspec.msgpack.Decoder(_Hello).decode


class Handshake:
    """One side of one handshake. Pass received bytes to `receive` and send the bytes that it returns, until `done` is True.

    A connector's `payload` is called with the agreed limits once the listener has proved the key. After the handshake, `peer` is the
    identity of the other side, `limits` is the smaller of both sides' limits field by field, `payload` (listener) is the data that the
    connector sent with its proof, and `session_key(label)` returns a secret that only the two ends share.
    """

    def __init__(
        self,
        role: Role,
        key: bytes,
        identity: Identity,
        limits: Limits,
        *,
        scheme: str,
        payload: Callable[[Limits], bytes] | None = None,
        nonce: bytes | None = None,
    ) -> None:
        check_key(key)
        if len(identity.name) > MAX_NAME_CHARACTERS or len(identity.incarnation) > MAX_NAME_CHARACTERS:
            raise HandshakeError(f"an identity's name and incarnation have at most {MAX_NAME_CHARACTERS} characters each")
        self.role = role
        self.done = False
        self.peer = Identity("")
        self.limits = limits
        self.payload = b""
        self._make_payload = payload
        self._key = key
        self._scheme = scheme
        self._nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        body = msgspec.msgpack.encode(_Hello(scheme, self._nonce, identity.name, identity.incarnation, msgspec.structs.astuple(limits)))
        self._hello = _VERSION.pack(_MAGIC, PROTOCOL_VERSION) + body
        self._peer_hello = b""
        self._buffer = bytearray()

    def start(self) -> bytes:
        """Returns the bytes to send first: the hello of a connector, no bytes for a listener."""
        return _frame(_HELLO, self._hello) if self.role == "connector" else b""

    def receive(self, data: bytes) -> bytes:
        """Processes bytes from the peer and returns the bytes to send to it (possibly none).

        Raises HandshakeError when the peer is refused: RefusedError, whose `reply`, if not empty, should still be sent, so that a peer of
        another version can report the mismatch; EvictedError when the listener evicted this connector.
        """
        self._buffer += data
        frames = list(self._complete_frames())
        if self.role == "connector" and any(kind == _EVICTED for kind, _ in frames):
            raise EvictedError("the listener has too many callers")  # before `payload` is called for a proof in the same data
        reply = b"".join(self._take(kind, body) for kind, body in frames)
        if self.done and self._buffer:
            raise RefusedError("bytes after the end of the handshake")
        return reply

    def session_key(self, label: str) -> bytes:
        """Returns 32 bytes that only the two ends of this handshake can compute. Raises HandshakeError before `done`."""
        if not self.done:
            raise HandshakeError("there is no session key before the end of the handshake")
        return self._mac("session " + label)

    def _complete_frames(self) -> Iterator[tuple[int, bytes]]:
        while len(self._buffer) >= _FRAME.size:
            size, kind = _FRAME.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise RefusedError(f"a handshake frame of {size} bytes, at most {MAX_FRAME_BYTES} are allowed; the peer may not be flowrt")
            if len(self._buffer) < _FRAME.size + size:
                return
            body = bytes(self._buffer[_FRAME.size : _FRAME.size + size])
            del self._buffer[: _FRAME.size + size]
            yield kind, body

    def _take(self, kind: int, body: bytes) -> bytes:
        if self.done:
            raise RefusedError("bytes after the end of the handshake")
        if kind == _HELLO and not self._peer_hello:
            self._read_hello(body)
            if self.role == "listener":
                return _frame(_HELLO, self._hello) + _frame(_PROOF, self._mac("listener"))
            return b""
        if kind == _PROOF and self._peer_hello:
            proof, payload = body[: sha256().digest_size], body[sha256().digest_size :]
            other: Role = "listener" if self.role == "connector" else "connector"
            if not hmac.compare_digest(proof, self._mac(other, payload)):
                raise RefusedError("the peer does not know the key of this run")
            self.done = True
            if self.role == "connector":
                self.payload = self._make_payload(self.limits) if self._make_payload else b""
                if len(self.payload) > MAX_PAYLOAD_BYTES:
                    raise HandshakeError(f"a handshake carries at most {MAX_PAYLOAD_BYTES} bytes of payload, not {len(self.payload)}")
                return _frame(_PROOF, self._mac("connector", self.payload) + self.payload)
            if len(payload) > MAX_PAYLOAD_BYTES:
                raise RefusedError("too much payload in a handshake")
            self.payload = payload
            return b""
        raise RefusedError(f"unexpected handshake frame of kind {kind}")

    def _read_hello(self, body: bytes) -> None:
        magic, version = _VERSION.unpack_from(body) if len(body) >= _VERSION.size else (b"", 0)
        if magic != _MAGIC:
            raise RefusedError("the peer does not speak flowrt's protocol")
        if version != PROTOCOL_VERSION:
            reply = _frame(_HELLO, self._hello) if self.role == "listener" else b""
            raise RefusedError(f"the peer speaks version {version} of the protocol, this process version {PROTOCOL_VERSION}", reply)
        try:
            hello = _decode_hello(body[_VERSION.size :])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RefusedError(f"a hello that cannot be read: {error}") from error
        if len(hello.nonce) != NONCE_BYTES or hello.nonce == self._nonce:
            raise RefusedError("a hello with a bad nonce")
        if max(len(hello.name), len(hello.incarnation)) > MAX_NAME_CHARACTERS or min(hello.limits) < 0:
            raise RefusedError("a hello with an impossible identity or limits")
        if hello.scheme != self._scheme:
            raise RefusedError(f"the peer speaks {hello.scheme[:32]!r} here, this process {self._scheme!r}")
        self._peer_hello = body
        self.peer = Identity(hello.name, hello.incarnation)
        self.limits = self.limits.smaller(Limits(**dict(zip(Limits.__struct_fields__, hello.limits, strict=True))))

    def _mac(self, label: str, payload: bytes = b"") -> bytes:
        hellos = (self._hello, self._peer_hello) if self.role == "connector" else (self._peer_hello, self._hello)
        mac = hmac.new(self._key, digestmod=sha256)
        for field in (label.encode(), *hellos, payload):
            mac.update(struct.pack("<I", len(field)))
            mac.update(field)
        return mac.digest()


class RefusedError(HandshakeError):
    """The peer is refused; `reply` may still be sent to it before the connection is closed."""

    def __init__(self, text: str, reply: bytes = b"") -> None:
        super().__init__(text)
        self.reply = reply


class EvictedError(HandshakeError):
    """The listener closed the connection to make room for others. The connector may connect again."""


def check_key(key: bytes) -> None:
    """Raises HandshakeError unless `key` has KEY_BYTES bytes."""
    if len(key) != KEY_BYTES:
        raise HandshakeError(f"a key has {KEY_BYTES} bytes, this one {len(key)}")


def _frame(kind: int, body: bytes) -> bytes:
    return _FRAME.pack(len(body), kind) + body


EVICTED = _frame(_EVICTED, b"")  # sent by a listener that closes a connection to make room
