"""The messages between the launcher and a host server: two lines at its start, then structs on their connection."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import msgspec

from flowrt.system.clock_offset import ClockStamp
from flowrt.transports.contract import HostAddress, Identity
from flowrt.transports.wire.message import Message


class HostStart(msgspec.Struct, frozen=True, kw_only=True):
    """The line that a host server reads from stdin. `scheme`: of its connections. `host_address`: of this host, as in Seams.
    `public_key`: of the launcher, for this start. `is_watched`: the run has a monitor. `model_path`: of the model's files; "": none."""

    version: str
    run_id: str
    host: str
    host_address: HostAddress
    scheme: str
    public_key: bytes
    preload: tuple[str, ...]
    num_processes: int
    load_seconds: float
    dead_seconds: float
    is_watched: bool
    model_path: str


class HostReply(msgspec.Struct, frozen=True, kw_only=True):
    """The line that a host server writes to stdout. `error`: why it does not listen, else "". `address`: where it listens."""

    error: str = ""
    address: str = ""
    public_key: bytes = b""


class HostMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages of the connection. `number` is the launcher's number of the start of a process."""


class HostHeartbeat(HostMessage, frozen=True):
    """From both ends, at even intervals, with a stamp of the sender's machine clock (clock_offset.py)."""

    stamp: ClockStamp


class HostReady(HostMessage, frozen=True):
    """The host's fork server serves; `num_threads` as in ProcessBackend. `model_path`: where this host has the model's files, if elsewhere
    than in the graph; else ""."""

    num_threads: int
    model_path: str = ""


class HostFailed(HostMessage, frozen=True):
    """The host's fork server could not start. `is_user`: the host does not have what the run needs."""

    error: str
    is_user: bool = False


class ModelRequest(HostMessage, frozen=True):
    """The host does not have the model's files. The launcher opens a connection named MODEL, on which ModelOffer comes first; then, for
    each file, FileChunks and FileEnd (model_copy.py)."""


class ModelFile(msgspec.Struct, frozen=True, array_like=True):
    name: str
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]


class ModelOffer(HostMessage, frozen=True):
    files: tuple[ModelFile, ...]


class FileChunk(HostMessage, frozen=True):
    data: bytes


class FileEnd(HostMessage, frozen=True):
    """`digest`: of the whole file, BLAKE2b."""

    digest: bytes


class ProcessRequest(HostMessage, frozen=True):
    """To the host server: start a process; the fields are those of ProcessSpec. ProcessStarted or ProcessRefused is the response."""

    number: int
    name: str
    workers: tuple[Identity, ...]
    entry: str
    threads: int
    log_level: str
    weights: tuple[str, ...]


class ProcessStarted(HostMessage, frozen=True):
    """The process runs. The launcher now opens a control connection per worker, under the name "NUMBER/INDEX"."""

    number: int
    pid: int


class ProcessRefused(HostMessage, frozen=True):
    """`is_fork_server_lost`: the fork server of the host has ended, and is started again."""

    number: int
    error: str
    is_fork_server_lost: bool = False


class ProcessKilled(HostMessage, frozen=True):
    """To the host server: send SIGKILL, or SIGTERM if `gently`. A start in progress is cancelled, and nothing is reported about it."""

    number: int
    gently: bool = False


class ProcessDying(HostMessage, frozen=True):
    """Reports on_dying of BackendOwner, with the process's last lines."""

    number: int
    how: str
    output_tail: tuple[str, ...]


class ProcessEnded(HostMessage, frozen=True):
    """Reports on_exited of BackendOwner, with the process's last lines."""

    number: int
    how: str
    output_tail: tuple[str, ...]


class OutputLine(HostMessage, frozen=True):
    """A process has written a line. Such lines are dropped while many messages wait."""

    name: str
    line: str


AnyHostMessage = (
    HostHeartbeat
    | HostReady
    | HostFailed
    | ModelRequest
    | ModelOffer
    | FileChunk
    | FileEnd
    | ProcessRequest
    | ProcessStarted
    | ProcessRefused
    | ProcessKilled
    | ProcessDying
    | ProcessEnded
    | OutputLine
)
_KIND = "host"
MODEL = "model"  # name of the connection that carries the files of the model
_decode = msgspec.msgpack.Decoder(AnyHostMessage).decode


def own_version() -> str:
    """The installed version of flowrt, "" where it is not installed."""
    try:
        return version("flowrt")
    except PackageNotFoundError:
        return ""


def as_message(message: HostMessage) -> Message:
    return Message(kind=_KIND, header=message)


def from_message(message: Message) -> AnyHostMessage:
    """Raises msgspec.DecodeError for any other message."""
    if message.kind != _KIND or not isinstance(message.header, bytes):
        raise msgspec.ValidationError(f"{message.kind!r} is not a message of a host")
    decoded: AnyHostMessage = _decode(message.header)
    return decoded
