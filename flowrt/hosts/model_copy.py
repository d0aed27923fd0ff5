"""Copies the files of a model to a host that does not have them: the launcher sends them, and the host server keeps them until it ends.

They travel on a channel of their own, so that they delay no heartbeat; its window bounds what is on the way. The receiver checks names and
sizes before it writes, and the digest of each file before it is used. Its folder is locked while its host server lives; the next copy on
that host removes those of host servers that were killed. Other users may write to the parent folder, so no link in it is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

from flowrt.errors import UserError
from flowrt.hosts.messages import FileChunk, FileEnd, HostMessage, ModelFile, ModelOffer, as_message, from_message
from flowrt.operators.checkpoint_files import INDEX_NAME
from flowrt.seams import Compute
from flowrt.transports.contract import Channel
from flowrt.transports.errors import EndOfChannel, TransportError

CHUNK_BYTES = 1 << 20
MAX_FILES = 1 << 12
PREFIX, MAX_FOLDERS = "flowrt-model-", 10
T = TypeVar("T", bound=HostMessage)
_BOUND_SECONDS = 60.0  # of one read or write of CHUNK_BYTES
_REMEDY = "copy the model to the same path on this host, or set TMPDIR there"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # no link, and no pipe, whose opening would wait for a writer


def has_model(path: str) -> bool:
    """Whether the files of a model are at this path of this host, and this user may reach them."""
    try:
        return (Path(path) / "config.json").is_file()
    except OSError:
        return False


async def send_model(directory: Path, channel: Channel, compute: Compute, on_progress: Callable[[], None]) -> None:
    """Send all files that determine the weights. Calls `on_progress` after each chunk. Raises UserError and TransportError."""
    try:
        files = await compute.run("list", partial(_list_files, directory), _BOUND_SECONDS)
        await channel.send(as_message(ModelOffer(files)))
        for each in files:
            await _send_file(directory / each.name, each.num_bytes, channel, compute, on_progress)
        with contextlib.suppress(EndOfChannel):
            await channel.recv()  # the receiver closes it, when it has everything
    except OSError as error:
        raise UserError(f"{error.filename or directory} cannot be read to copy it ({error.strerror})") from None


def _list_files(directory: Path) -> tuple[ModelFile, ...]:
    paths = [directory / "config.json", directory / INDEX_NAME, *sorted(directory.glob("*.safetensors"))]
    if wrong := next((path for path in paths if not _NAME.fullmatch(path.name)), None):
        raise UserError(f"{wrong} cannot be copied to another host: its name has other characters than A-Z a-z 0-9 _ . -; rename the file")
    return tuple(ModelFile(path.name, path.stat().st_size) for path in paths if path.exists())


async def _send_file(path: Path, num_bytes: int, channel: Channel, compute: Compute, on_progress: Callable[[], None]) -> None:
    digest, left = blake2b(), num_bytes

    def read() -> bytes:
        data = file.read(min(CHUNK_BYTES, left))
        digest.update(data)
        return data

    with path.open("rb") as file:
        while left:
            data = await compute.run("read", read, _BOUND_SECONDS)
            if not data:
                raise UserError(f"{path} has become shorter while it was copied; start again")
            left -= len(data)
            await channel.send(as_message(FileChunk(data)))
            on_progress()
    await channel.send(as_message(FileEnd(digest.digest())))


async def receive_model(channel: Channel, compute: Compute, folder: Path) -> None:
    """Write the files into an empty folder. Raises UserError, after which the folder may have some of them."""
    try:
        offer = await _next(channel, ModelOffer)
        free = shutil.disk_usage(folder).free
        _check_offer(offer, free, folder)
        for each in offer.files:
            await _receive_file(channel, compute, folder / each.name, each.num_bytes)
    except (TransportError, msgspec.DecodeError) as error:
        raise UserError(f"the model did not arrive whole: {error}") from None
    except OSError as error:
        raise UserError(f"the model cannot be written to {folder} ({error.strerror}); set TMPDIR there") from None


def _check_offer(offer: ModelOffer, free_bytes: int, folder: Path) -> None:
    names = [each.name for each in offer.files]
    if len(names) > MAX_FILES or len(set(names)) < len(names) or not all(map(_NAME.fullmatch, names)):
        raise msgspec.ValidationError("its list of files is not valid")
    if (total := sum(each.num_bytes for each in offer.files)) > free_bytes:
        raise UserError(f"the model needs {total / 2**30:.1f} GiB, and {folder.parent} has {free_bytes / 2**30:.1f} GiB; {_REMEDY}")


async def _receive_file(channel: Channel, compute: Compute, path: Path, num_bytes: int) -> None:
    digest, left = blake2b(), num_bytes

    def write(data: bytes) -> None:
        file.write(data)
        digest.update(data)
        file.flush()

    with path.open("xb") as file:
        while left:
            data = (await _next(channel, FileChunk)).data
            if not 0 < len(data) <= left:
                raise msgspec.ValidationError(f"{path.name} has another size than announced")
            await compute.run("write", partial(write, data), _BOUND_SECONDS)
            left -= len(data)
    if (await _next(channel, FileEnd)).digest != digest.digest():
        raise msgspec.ValidationError(f"{path.name} has another digest than announced")


async def _next(channel: Channel, kind: type[T]) -> T:
    message = from_message(await channel.recv())
    if not isinstance(message, kind):
        raise msgspec.ValidationError(f"{type(message).__name__} came in place of {kind.__name__}")
    return message


def remove_left() -> None:
    """Remove the folders of processes that were killed. Takes long where their files are large."""
    with contextlib.suppress(OSError):  # there is no folder for temporary files: ModelFolder reports it
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


class ModelFolder:
    """An empty folder of this host for a copy, until `remove`. Raises UserError."""

    def __init__(self) -> None:
        try:
            for _ in range(MAX_FOLDERS):
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
                if (lock := _lock(self.path)) is not None:
                    self._lock = lock
                    return
                shutil.rmtree(self.path, ignore_errors=True)  # another process took it for one that was left
        except OSError as error:
            raise UserError(f"no folder for the model can be made: {error}; {_REMEDY}") from None
        raise UserError(f"{self.path.parent} has no file locks, which a copy of the model needs; {_REMEDY}")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder of this user. None: another process holds it, or the folder is no more."""
    try:
        descriptor = os.open(folder, _FOLDER)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        if status.st_uid == os.getuid() and os.path.samestat(status, os.stat(folder)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
