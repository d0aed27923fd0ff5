"""The contract of a transport: what every scheme guarantees, and all that the rest of flowrt may rely on.

`flowrt.transports.conformance` checks every property:

* Order: messages of one channel arrive in the order sent, each exactly once. Channels are independent of each other.
* Bounded: a channel holds at most `limits.capacity_bytes` and `limits.capacity_messages` in flight. When it is full, `send` waits. The
  sender's side holds no more than that.
* Ownership: the tensors given to `send` must not change until `send` returns. Afterwards they belong to the caller again, with two
  exceptions. Within a process, the receiver may see the sender's own memory (never write to them again).
  `capabilities.borrows_sender`: the transport reads large tensors in place after `send` has returned (write to them only after a response
  shows that the peer has taken the message). In both cases the transport keeps the memory alive while it uses it.
* Received tensors may alias the transport's memory. That memory stays valid until the last object that refers to `Tensor.data` is freed,
  even after `aclose`. Received headers are copies. A buffer from another process is writable.
* Cancelling `recv` loses no message. A cancelled `send` has sent either the whole message or nothing of it.
* `aclose` is idempotent. It wakes pending `send` and `recv` of this side with ClosedChannelError. The peer still receives everything sent
  before, then EndOfChannel; its own `send` raises BrokenChannelError, because no one reads it. A dead peer is BrokenChannelError after
  everything that it sent completely is received. A stopped peer delays `aclose` by at most LINGER_SECONDS.
* Sizes from a peer are checked against the limits before anything is allocated. An invalid message closes the channel
  (BrokenChannelError) and has no other effect.
* Nothing outlives the channel: no descriptor, task, thread, file, shared memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Literal, Self

import msgspec

from flowrt.transports.wire.message import Message

PROTOCOL_VERSION = 4
MAX_COPY_THREADS = 16
LINGER_SECONDS = 2.0  # how long `aclose` waits for a peer to take what was sent


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one channel, from the specs of the edges it carries. All sizes in bytes.

    When the two ends declare different limits, the smaller value holds, field by field. A message larger than
    `capacity_bytes` but within `max_message_bytes` travels alone: it waits until nothing else is on the way.
    """

    max_header_bytes: int = 1 << 16  # the whole encoded envelope: kind, tag, header, tensor specs
    max_tensors: int = 16
    max_message_bytes: int = 1 << 24
    capacity_messages: int = 64
    capacity_bytes: int = 1 << 25
    copy_threads: int = 1  # that copy a bulk payload in stripes; at most MAX_COPY_THREADS; shm only
    silent_seconds: int = 0  # after which an end gives up a channel to a silent host; each its own; 0: when the system does

    def smaller(self, other: Limits) -> Limits:
        """The smaller of both values, field by field."""
        return Limits(**{name: min(getattr(self, name), getattr(other, name)) for name in Limits.__struct_fields__})


class HostAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How processes of other hosts reach those of this one. `address`: "" when the run has one host. `ports`: FROM-TO, those at which
    processes may listen; "": any. `trusted`: networks (10.1.0.0/16) in which messages need no encryption."""

    address: str = ""
    ports: str = ""
    trusted: tuple[str, ...] = ()


class Identity(msgspec.Struct, frozen=True):
    """One end of a channel: the process's name in the graph and its incarnation."""

    name: str
    incarnation: str = ""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheme can do beyond the contract. Code checks these, never the type or the name of a scheme."""

    borrows_sender: bool = False  # sent tensors may be read until the peer has taken them
    device_memory: bool = False  # buffers with __cuda_array_interface__ may be sent, and arrive as such without passing the host
    between_processes: bool = True
    between_hosts: Literal["no", "trusted", "encrypted"] = "no"  # trusted: it does not encrypt


class ChannelStatistics(msgspec.Struct):
    """Counters of one end of a channel since it opened."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0  # payload bytes
    bytes_received: int = 0
    sends_waited: int = 0  # sends that found the channel full
    late_wakeups: int = 0  # wake-ups found only by the bounded re-check; must stay 0
    held_buffers: int = 0  # received buffers in use that alias the transport's memory
    messages_dropped: int = 0  # repeated messages, each dropped once
    nonsense: int = 0  # 1 when the channel broke because of an invalid or too large message of the peer


class Closable(ABC):
    """What `async with` closes at its end."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closes this object. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


class Channel(Closable):
    """One end of a connection between two processes; both directions. One task may be in `recv`, any number in `send`."""

    peer: Identity
    slowness = 1.0  # how many times as long as they should messages to this end take now, by an injected fault; modelled times follow it
    copies_at_once = False  # `send_nowait` has copied the tensors when it returns, so that it may be given lent ones (Message.lent)

    @property
    @abstractmethod
    def scheme(self) -> str:
        """The scheme that carries the messages."""

    @abstractmethod
    async def send(self, message: Message) -> None:
        """Sends `message`; waits while the channel is full. Does not suspend when there is room.

        Raises LimitError or InvalidMessageError (nothing sent), ClosedChannelError, BrokenChannelError.
        """

    @abstractmethod
    def send_nowait(self, message: Message) -> bool:
        """As `send`, when it need not wait: True. False, with nothing sent, when the channel is full or a `send` is waiting.

        Also False for a message that this transport sends in parts or copies in another thread.
        """

    @abstractmethod
    async def recv(self) -> Message:
        """The next message. Raises EndOfChannel, ClosedChannelError, BrokenChannelError, BusyChannelError."""

    @abstractmethod
    def recv_nowait(self) -> Message | None:
        """The next message if one has arrived, else None. Errors as in `recv`."""

    async def read(self, on_message: Callable[[Message], None], on_pause: Callable[[], None]) -> None:
        """Calls `on_message` for each message, in order, and `on_pause` after the last one that has arrived, also when `on_message` raises.
        Neither may wait. In place of `recv`.

        Raises what they raise, and as `recv`.
        """
        while True:
            message = await self.recv()
            try:
                on_message(message)
                del message  # while this sleeps it must hold no tensor
                while (more := self.recv_nowait()) is not None:
                    on_message(more)
            finally:
                on_pause()

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Breaks the channel for both ends; `reason` is the text of BrokenChannelError on this side."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closes this end, as the contract says. Returns when only aliased buffers of the channel are left."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True after this end was closed or broke."""

    @abstractmethod
    def statistics(self) -> ChannelStatistics:
        """A snapshot of the counters."""


class Listener(Closable):
    """Accepts channels at `address` (the real one: a wildcard in the request has been filled in)."""

    address: str

    @abstractmethod
    async def accept(self) -> Channel:
        """The next channel whose peer has proved the key. A peer that fails loses only its own connection.

        Raises ClosedChannelError once closed; BusyChannelError when two tasks accept at once.
        """

    @property
    @abstractmethod
    def rejected(self) -> int:
        """Connections that failed the handshake or sent invalid data."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stops listening. Accepted channels stay open. Idempotent."""


class Transport(ABC):
    """A scheme. Stateless but for what the whole process shares; make one per event loop through `registry.get_transport`."""

    scheme: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """None when this scheme works here, else one sentence: why not, and what would help."""

    def address_at(self, host: HostAddress) -> str:
        """Where to listen for peers of other hosts: any free port, or one of `host.ports`, as for all at which either end of a channel
        listens. What travels is encrypted, or stays in a trusted network. Without an address, and where the scheme does not reach other
        hosts: any free address for peers of this host. Raises UnavailableError."""
        return f"{self.scheme}://"

    @abstractmethod
    async def listen(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Listener:
        """Listen at `address` ("scheme://..." or "scheme://" for any free one on this host).

        Raises AddressError, UnavailableError.
        """

    @abstractmethod
    async def connect(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Channel:
        """Opens a channel to the process that listens at `address`. `key` is 32 bytes; both sides prove it. No time-out of its own.

        Raises AddressError (no listener), HandshakeError, UnavailableError.
        """
