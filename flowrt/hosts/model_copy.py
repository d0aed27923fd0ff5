"""Copies the files of a model to a host that does not have them: the launcher sends them, and the host server keeps them until it ends.

They travel on a channel of their own, so that they delay no heartbeat; its window bounds what is on the way. The receiver checks names and
sizes before it writes, and the digest of each file before it is used. Its folder is locked while its host server lives; the next copy on
that host removes those of host servers that were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
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
PREFIX = "flowrt-model-"
T = TypeVar("T", bound=HostMessage)
_BOUND_SECONDS = 60.0  # of one read or write of CHUNK_BYTES
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


def has_model(path: str) -> bool:
    """Whether the files of a model are at this path of this host."""
    return (Path(path) / "config.json").is_file()


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
        text = f"the model needs {total / 2**30:.1f} GiB, and {folder.parent} has {free_bytes / 2**30:.1f} GiB"
        raise UserError(f"{text}; copy the model to the same path on this host, or set TMPDIR there")


async def _receive_file(channel: Channel, compute: Compute, path: Path, num_bytes: int) -> None:
    digest, left = blake2b(), num_bytes

    def write(data: bytes) -> None:
        file.write(data)
        digest.update(data)

    with path.open("xb", buffering=0) as file:
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


@contextlib.contextmanager
def model_folder() -> Iterator[Path]:
    """A folder of this host for a copy, which is removed at the end. Removes those of processes that were killed."""
    parent = Path(tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        with _locked(parent):  # no other process sees the folder before it is locked
            others = list(parent.glob(f"{PREFIX}*"))
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(_locked(folder))
            for other in others:
                with contextlib.suppress(OSError), _locked(other, fcntl.LOCK_NB):
                    shutil.rmtree(other, ignore_errors=True)
        yield folder


@contextlib.contextmanager
def _locked(folder: Path, more: int = 0) -> Iterator[None]:
    """With LOCK_NB, raises OSError when another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | more)
        yield
    finally:
        os.close(descriptor)
