"""The contract of a transport: what every scheme promises, and all that the rest of flowrt may rely on.

Here: Limits, Identity, Capabilities, ChannelStatistics, and the abstract Channel, Listener, Transport. Not here: any scheme
(one file each), finding one by name (registry.py), the executable form of these promises (checks.py).

The promises, held by every scheme and checked by `flowrt.transports.conformance.channel_checks`:

* Order: messages of one channel arrive in the order sent, each exactly once; channels are independent of each other.
* Bounded: a channel holds at most `limits.capacity_bytes` and `limits.capacity_messages` on the way; when it is full `send`
  waits. The sender's side may hold no more than that.
* Ownership: the tensors given to `send` must not change until `send` returns; afterwards they are the caller's again, with two
  exceptions. `capabilities.aliases_sender`: the receiver may see the sender's own memory (then: never write to them again).
  `capabilities.borrows_sender`: large ones are read where they lie, after `send` has returned (then: write to them only once the peer
  has taken the message, as `send_acknowledged` tells). Either way the transport keeps the memory for as long as it is looked at.
* Received tensors may alias the transport's memory; that memory is kept until the last object referring to `Tensor.data` is
  gone, even after `aclose`. Received headers are copies. A buffer that came from another process may be written to.
* Cancelling `recv` loses no message. Cancelling `send` either sent the whole message or nothing of it.
* `aclose` is idempotent; it wakes pending `send` and `recv` of this side with ClosedChannelError. The peer still receives all
  that was sent before, then EndOfChannel; its own `send` raises BrokenChannelError, as nobody will read it. A peer that dies is
  BrokenChannelError once what it had sent completely is received. A peer that is stopped delays `aclose` by LINGER_SECONDS at most.
* Nothing is allocated on a peer's word before it is checked against the limits; an invalid message closes the channel
  (BrokenChannelError), never more.
* One-sided windows: `open_window` registers memory, and whoever is given its key, the peer of this very channel, writes to it and reads
  from it without this side's user doing anything, and either side raises flags in it. Every scheme has them; where
  `capabilities.native_windows` is true, a write is one copy into the registered memory, elsewhere messages carry it.
* Nothing outlives the channel: no descriptor, task, thread, file, shared memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

import msgspec

from flowrt.transports.errors import UnavailableError
from flowrt.transports.wire.message import Message

PROTOCOL_VERSION = 2
MAX_LANES = 16
MAX_WINDOWS = 64  # that one end of a channel may have open at a time
MAX_FLAGS = 256  # of a window
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
    lanes: int = 1  # over how many lanes, each with a copier of its own, a bulk payload is cut; at most MAX_LANES; shm only


class Identity(msgspec.Struct, frozen=True):
    """Who speaks: the process's name in the graph and its incarnation (one life of it)."""

    name: str
    incarnation: str = ""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheme can do beyond the promises. Asked here, never by type or by the scheme's name."""

    aliasing_receive: bool = False  # received tensors may lie in memory the transport owns
    aliases_sender: bool = False  # received tensors may be the sender's own memory
    borrows_sender: bool = False  # sent tensors may be read until the peer has taken them
    device_memory: bool = False  # buffers with __cuda_array_interface__ may be sent, and arrive as such without passing the host
    native_windows: bool = False  # a peer reaches a window's memory itself, without messages
    between_processes: bool = True
    between_hosts: bool = False


class ChannelStatistics(msgspec.Struct):
    """Counters of one end of a channel since it opened."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0  # payload bytes
    bytes_received: int = 0
    sends_waited: int = 0  # sends that found the channel full
    late_wakeups: int = 0  # wake-ups found only by the bounded re-check: a lost one, must stay 0
    held_buffers: int = 0  # received buffers still referred to that lie in the transport's memory
    messages_dropped: int = 0  # repeated messages, each dropped once
    nonsense: int = 0  # 1 when the channel broke because the peer sent what is no message, or more than it may


class Window(ABC):
    """Memory that this end has registered for its peer. Closed with the channel; `buffer` may be used for as long as it is referred to.

    Flags are words of 64 bits, 0 at first. A flag that the peer raised with a write is seen only after the bytes written.
    """

    key: bytes  # to be sent to the peer in a message; nobody can guess it, and it opens nothing but this window on this channel
    nbytes: int
    num_flags: int
    buffer: memoryview  # writable, `nbytes` long, zero at first

    @abstractmethod
    def flag(self, flag: int) -> int:
        """What the flag is now. Raises WindowError when there is no such flag."""

    @abstractmethod
    def set_flag(self, flag: int, value: int) -> None:
        """Set it, and wake whoever waits for it on the other side. `value` is from 0 to 2**64 - 1. Raises WindowError."""

    @abstractmethod
    async def wait_flag(self, flag: int, seen: int = 0) -> int:
        """The flag's value once it is another than `seen`; values between may be missed. Any number of tasks may wait.

        Raises WindowError, ClosedChannelError, BrokenChannelError.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Take the window back: later calls of the peer raise WindowError. Idempotent."""


class RemoteWindow(ABC):
    """The peer's window, seen from this end. All errors as in Window; places outside of it are WindowErrors."""

    nbytes: int
    num_flags: int

    @abstractmethod
    async def write(self, offset: int, data: object, flag: int | None = None, value: int = 1) -> None:
        """Copy `data`, any buffer, to `offset` of the window; then, if a flag is given, set it to `value`.

        Returns when the bytes are there and `data` is the caller's again. Cancelled, some bytes may be there, but the flag is not set.
        """

    @abstractmethod
    async def read(self, offset: int, nbytes: int) -> memoryview:
        """A copy of what is there now."""

    @abstractmethod
    async def set_flag(self, flag: int, value: int) -> None:
        """Set it, after all that this side has written before, and wake whoever waits for it."""

    @abstractmethod
    def flag(self, flag: int) -> int:
        """What the flag is, as far as this end knows."""

    @abstractmethod
    async def wait_flag(self, flag: int, seen: int = 0) -> int:
        """As Window.wait_flag."""

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of it. The window stays. Idempotent."""


class Channel(ABC):
    """One end of a connection between two processes; both directions. One task may be in `recv`, any number in `send`."""

    peer: Identity
    scheme: ClassVar[str]

    @abstractmethod
    async def send(self, message: Message) -> None:
        """Hand over `message`; waits while the channel is full. Does not suspend when there is room.

        Raises LimitError or InvalidMessageError (nothing sent), ClosedChannelError, BrokenChannelError.
        """

    @abstractmethod
    async def send_acknowledged(self, message: Message) -> None:
        """Synchronous send: as `send`, and returns only once the peer's user has taken `message` (and so all before it).

        Cancelled after the message was sent, it is sent all the same. A peer that ends without taking it: BrokenChannelError.
        """

    @abstractmethod
    def send_nowait(self, message: Message) -> bool:
        """As `send` if it need not wait: True. False, and nothing sent, when the channel is full or a `send` is waiting.

        Also False for a message of more than an eighth of the capacity that this transport sends in parts, or copies while others have
        their turn.
        """

    @abstractmethod
    async def recv(self) -> Message:
        """The next message. Raises EndOfChannel, ClosedChannelError, BrokenChannelError, BusyChannelError."""

    @abstractmethod
    def recv_nowait(self) -> Message | None:
        """The next message if one is here already, else None. Same errors as `recv`."""

    def open_window(self, nbytes: int, num_flags: int = 1) -> Window:
        """Register `nbytes` of memory, at least one, which this side provides, and up to MAX_FLAGS flags.

        Raises UnavailableError (no memory, or a scheme without windows), WindowError (MAX_WINDOWS), Closed- and BrokenChannelError.
        """
        raise UnavailableError(f"{self.scheme} has no windows")

    async def attach_window(self, key: bytes) -> RemoteWindow:
        """The peer's window that has this key. Raises WindowError when there is none, Closed- and BrokenChannelError."""
        raise UnavailableError(f"{self.scheme} has no windows")

    @abstractmethod
    async def aclose(self) -> None:
        """Close this end, as the contract above says. Returns when nothing of the channel is left but aliased buffers."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True once this end was closed or found broken."""

    @abstractmethod
    def statistics(self) -> ChannelStatistics:
        """A snapshot of the counters."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


class Listener(ABC):
    """Accepts channels at `address` (the real one: a wildcard in the request has been filled in)."""

    address: str

    @abstractmethod
    async def accept(self) -> Channel:
        """The next channel whose peer has proved the key. A peer that fails costs nothing but its own connection.

        Raises ClosedChannelError once closed; BusyChannelError when two tasks accept at once.
        """

    @property
    @abstractmethod
    def rejected(self) -> int:
        """How many connections failed the handshake or spoke nonsense."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop listening. Accepted channels live on. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


class Transport(ABC):
    """A scheme. Stateless but for what the whole process shares; make one per event loop through `registry.get_transport`."""

    scheme: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """None when this scheme works here, else one sentence: why not, and what would help."""

    @abstractmethod
    async def listen(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Listener:
        """Listen at `address` ("scheme://..." or "scheme://" for any free one on this host).

        Raises AddressError, UnavailableError.
        """

    @abstractmethod
    async def connect(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Channel:
        """A channel to whoever listens at `address`. `key` is 32 bytes; both sides prove it. No time-out of its own.

        Raises AddressError (nobody there), HandshakeError, UnavailableError.
        """
