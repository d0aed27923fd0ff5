"""Encodes messages to bytes and decodes them, in two halves for media that must know the sizes before they read the tensors.

On the wire a message is one envelope and its tensors' bytes. The envelope is a MessagePack array
`[sequence, kind, edge, tag, header, tensors]`: tag is null or `[source, epoch, micro_batch, step, layer]`, header is null or a
bin holding the MessagePack form of the typed header, tensors is an array of `[dtype, shape]`. The tensors follow in order, each as
exactly its own bytes, row-major, in the byte order of the machine (little-endian everywhere flowrt runs).

A received envelope is not trusted: it is a private copy, decoded at once into typed structs, and every count and size in it is checked in
Python integers against the limits before the caller allocates anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from flowrt.transports.contract import Limits
from flowrt.transports.errors import InvalidMessageError, LimitError
from flowrt.transports.wire.message import DTYPE_BYTES, MAX_DIMENSIONS, Message, Tag, Tensor, TensorSpec

if TYPE_CHECKING:
    from flowrt.transports.native._words import KnownEnvelopes

Part: TypeAlias = bytes | bytearray | memoryview


class WireError(ValueError):
    """Received bytes are not a message of this channel. Stays inside `transports`: a channel turns it into BrokenChannelError."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All of a message but its tensors' bytes. `sequence` counts the messages of one direction of one channel from 0."""

    sequence: int
    kind: str
    edge: int
    tag: Tag | None
    header: bytes | None
    tensors: tuple[TensorSpec, ...]


_encode_msgpack = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode


def encode(message: Message, sequence: int, limits: Limits | None = None) -> list[Part]:
    """The wire parts of `message`: the envelope, then one part per tensor, which is a view of the tensor's own memory, or of a copy
    where that has strides or is lent.

    Raises InvalidMessageError when it cannot be encoded, LimitError when `limits` are given and too small for it.
    """
    message = with_own_tensors(message)
    return [encode_envelope(message, sequence, limits)[0], *map(tensor_bytes, message.tensors)]


def encode_envelope(message: Message, sequence: int, limits: Limits | None = None) -> tuple[bytes, list[int], int]:
    """The envelope alone, the bytes of each tensor and their sum, for media that look at the tensors' buffers themselves."""
    header = header_bytes(message)
    tensors = message.tensors
    specs: list[TensorSpec] = []
    sizes: list[int] = []
    total = 0
    if tensors:
        try:
            if len(tensors) == 1:  # the usual case, and the one in which a microsecond counts
                spec = tensors[0].spec
                total = _nbytes(spec.dtype, spec.shape)
                specs, sizes = [spec], [total]
            else:
                specs = [tensor.spec for tensor in tensors]
                sizes = [_nbytes(spec.dtype, spec.shape) for spec in specs]
                total = sum(sizes)
        except (WireError, TypeError) as error:
            raise InvalidMessageError(str(error)) from error
    try:
        envelope = _encode_msgpack((sequence, message.kind, message.edge, message.tag, header, specs))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessageError(f"a {message.kind!r} message cannot be encoded: {error}") from error
    if limits is not None:
        if len(envelope) > limits.max_header_bytes:
            raise LimitError(
                f"the header of a {message.kind!r} message takes {len(envelope)} bytes, the limit is {limits.max_header_bytes}"
            )
        if total > limits.max_message_bytes or len(tensors) > limits.max_tensors:
            check_limits(message, total, limits)
    return envelope, sizes, total


def check_limits(message: Message, payload_bytes: int, limits: Limits) -> None:
    """Raise LimitError when the tensors of `message`, `payload_bytes` together, are more than `limits` allow."""
    if len(message.tensors) > limits.max_tensors:
        raise LimitError(f"a {message.kind!r} message has {len(message.tensors)} tensors, the limit is {limits.max_tensors}")
    if payload_bytes > limits.max_message_bytes:
        raise LimitError(f"the tensors of a {message.kind!r} message take {payload_bytes} bytes, the limit is {limits.max_message_bytes}")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of `tensor` as a flat view of its own memory, or of a copy if that has strides; InvalidMessageError when buffer and
    spec disagree."""
    data: Any = tensor.data
    try:
        view = memoryview(data)
        if not view.c_contiguous:
            view = memoryview(view.tobytes())
        elif type(data) is not bytearray and (view.format != "B" or view.ndim != 1):
            view = view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise InvalidMessageError(f"the buffer of a {tensor.spec.dtype} tensor cannot be sent: {error}") from error
    try:
        nbytes = _nbytes(tensor.spec.dtype, tensor.spec.shape)
    except (WireError, TypeError) as error:
        raise InvalidMessageError(str(error)) from error
    if nbytes != len(view):
        raise InvalidMessageError(f"a {tensor.spec.dtype} tensor of shape {tensor.spec.shape} has {nbytes} bytes, its buffer {len(view)}")
    return view


def with_own_tensors(message: Message) -> Message:
    """`message`; with copies of its tensors if they are lent."""
    if message.lent is None:
        return message
    buffers = [bytearray(tensor.spec.nbytes) for tensor in message.tensors]
    header = message.lent.copy_into([memoryview(buffer) for buffer in buffers])
    tensors = tuple(Tensor(tensor.spec, buffer) for tensor, buffer in zip(message.tensors, buffers, strict=True))
    return Message(message.kind, message.tag, message.edge, header, tensors)


def spec_bytes(spec: TensorSpec) -> int:
    """How many bytes a tensor of `spec` has; WireError when no tensor can be like that."""
    return _nbytes(spec.dtype, spec.shape)


@lru_cache(maxsize=4096)  # the specs of a graph's edges come again and again
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    item = DTYPE_BYTES.get(dtype)
    if item is None:
        raise WireError(f"unknown dtype {dtype[:32]!r}; known: {', '.join(DTYPE_BYTES)}")
    if len(shape) > MAX_DIMENSIONS:
        raise WireError(f"a tensor of {len(shape)} dimensions; at most {MAX_DIMENSIONS} are allowed")
    if shape and min(shape) < 0:
        raise WireError(f"a tensor with a dimension of {min(shape)}")
    return item * prod(shape)


def decode_envelope(part: bytes, limits: Limits) -> tuple[Envelope, list[int]]:
    """The envelope in `part` (a private copy of received bytes) and the size of each tensor that must follow, all checked.

    Raises WireError. After it the caller may allocate these sizes.
    """
    if len(part) > limits.max_header_bytes:
        raise WireError(f"an envelope of {len(part)} bytes; the limit is {limits.max_header_bytes}")
    try:
        envelope = _decode_envelope(part)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"bytes that are no envelope: {error}") from error
    specs = envelope.tensors
    if len(specs) > limits.max_tensors:
        raise WireError(f"{len(specs)} tensors in a message; the limit is {limits.max_tensors}")
    if not specs:
        return envelope, []
    if len(specs) == 1:
        spec = specs[0]
        total = _nbytes(spec.dtype, spec.shape)
        sizes = [total]
    else:
        sizes = [_nbytes(spec.dtype, spec.shape) for spec in specs]
        total = sum(sizes)
    if total > limits.max_message_bytes:
        raise WireError(f"tensors of {total} bytes in a message; the limit is {limits.max_message_bytes}")
    return envelope, sizes


def learn(known: KnownEnvelopes, message: Message, header: bytes | None, envelope: bytes, sequence: int, payload_bytes: int) -> None:
    """Gives the form of an envelope to `known`, if messages that repeat it can be expected: those without a header, or without a tag."""
    tag, sent_header = message.tag, message.header
    if known.is_full or len(message.tensors) > 1 or bool(payload_bytes) != bool(message.tensors):
        return
    if header is not None and (tag is not None or not (type(sent_header) is bytes or _is_frozen(sent_header))):
        return
    begin_of_tag = b"\xc0" if tag is None else b"\x95" + _encode_msgpack(tag.source)
    before = _encode_msgpack(message.kind) + _encode_msgpack(message.edge) + begin_of_tag
    numbers = b"" if tag is None else b"".join(map(_encode_msgpack, (tag.epoch, tag.micro_batch, tag.step, tag.layer)))
    after = _encode_msgpack(header) + _encode_msgpack([tensor.spec for tensor in message.tensors])
    if b"\x96" + _encode_msgpack(sequence) + before + numbers + after == envelope:  # a peer may write the same otherwise
        spec = message.tensors[0].spec if message.tensors else None
        source = None if tag is None else tag.source
        known.learn(message.kind, message.edge, source, sent_header, header, spec, before, after, payload_bytes)


def _is_frozen(header: object) -> bool:
    return isinstance(header, msgspec.Struct) and header.__struct_config__.frozen


def split_buffers(data: bytes | memoryview, start: int, sizes: Sequence[int]) -> list[object]:
    """Copies of the tensors of `sizes` that lie end to end in `data` from `start` on, each in memory of its own, for alignment."""
    buffers: list[object] = []
    for size in sizes:
        buffers.append(bytearray(data[start : start + size]))
        start += size
    return buffers


def assemble(envelope: Envelope, buffers: Sequence[object], is_private: bool = False) -> Message:
    """The message of a checked envelope and the buffers that hold its tensors. `is_private`: see Tensor."""
    if len(buffers) == 1:
        tensors: tuple[Tensor, ...] = (Tensor(envelope.tensors[0], buffers[0], is_private),)
    else:
        tensors = tuple(map(Tensor, envelope.tensors, buffers, repeat(is_private))) if buffers else ()
    return Message(envelope.kind, envelope.tag, envelope.edge, envelope.header, tensors)


def decode(parts: Sequence[Part], limits: Limits) -> tuple[Message, int]:
    """The message and its sequence number from the parts that `encode` made. The tensors alias `parts[1:]`.

    Raises WireError for anything that is not a message within `limits`.
    """
    if not parts:
        raise WireError("no bytes where a message was expected")
    envelope, sizes = decode_envelope(bytes(parts[0]), limits)
    if sizes != [len(part) for part in parts[1:]]:
        raise WireError(f"tensors of {sizes[:16]} bytes were announced, {[len(part) for part in parts[1:17]]} came")
    return assemble(envelope, parts[1:]), envelope.sequence


def is_repeat(sequence: int, expected: int) -> bool:
    """Whether a received sequence number is one already seen, whose message is dropped; WireError when some are missing."""
    if sequence == expected:
        return False
    if 0 <= sequence < expected:
        return True
    raise WireError(f"message {sequence} came where {expected} was due: messages are missing")


def header_bytes(message: Message) -> bytes | None:
    """The header as it travels. Raises InvalidMessageError when it cannot be encoded."""
    header = message.header
    if header is None or type(header) is bytes:
        return header
    try:
        return bytes(header) if isinstance(header, (bytearray, memoryview)) else _encode_msgpack(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessageError(f"the header of a {message.kind!r} message cannot be encoded: {error}") from error
