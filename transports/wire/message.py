"""Messages, which every transport carries, and tags, which order the work. Imports nothing of flowrt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import TypeVar

import msgspec

H = TypeVar("H", bound=msgspec.Struct)

DTYPE_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
}  # fmt: skip
MAX_DIMENSIONS = 8


class Tag(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a message belongs to. A node fires when its inputs for one tag are there; nothing else orders the work.

    `source` is the emitting node's name and incarnation ("attention.0.source@5f3a"), kept when a message is forwarded.
    `epoch` counts the rollbacks of that group, `micro_batch` is the micro-batch, `step` its step, `layer` the layer within it.
    """

    source: str
    epoch: int = 0
    micro_batch: int = 0
    step: int = 0
    layer: int = 0


@lru_cache(maxsize=4096)  # the specs of a graph's edges come again and again
def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return DTYPE_BYTES[dtype] * prod(shape)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """dtype (a key of DTYPE_BYTES) and shape of a dense, contiguous, row-major tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Raises KeyError for an unknown dtype."""
        return num_bytes(self.dtype, self.shape)


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """A spec and the buffer that holds exactly spec.nbytes bytes.

    `data` is any object with the buffer protocol, C-contiguous, or with `__cuda_array_interface__` where the transport's
    capabilities include `device_memory`; then it arrives with that too. (Over a transport that stays within a process, which passes
    messages by reference, it may be whatever both ends know how to read.) A received buffer may alias the transport's memory, for
    as long as anything still refers to `data` (contract.py). `is_private`: no other process can write a received buffer; a bytearray
    is private without it.
    """

    spec: TensorSpec
    data: object
    is_private: bool = False


class Lent(msgspec.Struct, frozen=True, gc=False):
    """Tensors that their owner may change as soon as the call that got the message returns.

    `copy_into` copies them into one writable buffer each, of the sizes of their specs, and returns the header, which may depend on what was
    copied. When it raises, nothing is sent.
    """

    copy_into: Callable[[Sequence[memoryview]], msgspec.Struct | bytes | None]


class Message(msgspec.Struct, gc=False):
    """kind, edge, tag, typed header, tensors.

    `kind` names what this is ("data", "credit", ...), `edge` the edge of the graph it travels on (-1: none). `header` is a
    msgspec struct on the way out and, from a wire, its undecoded MessagePack bytes; read it with `decode_header`.

    `lent`: the tensors, whose `data` is None, are not copied yet. This does not travel with the message.
    """

    kind: str
    tag: Tag | None = None
    edge: int = -1
    header: msgspec.Struct | bytes | None = None
    tensors: tuple[Tensor, ...] = ()
    lent: Lent | None = None

    @property
    def payload_bytes(self) -> int:
        total = 0
        for tensor in self.tensors:
            spec = tensor.spec
            total += num_bytes(spec.dtype, spec.shape)
        return total

    def decode_header(self, header_type: type[H]) -> H:
        """The header as `header_type`; raises msgspec.DecodeError (ValidationError, as a rule) when it is not one."""
        if type(self.header) is header_type:
            return self.header
        if isinstance(self.header, (bytes, bytearray, memoryview)):
            decoder: msgspec.msgpack.Decoder[H] = _decoder(header_type)
            try:
                return decoder.decode(self.header)
            except (UnicodeDecodeError, RecursionError) as error:
                raise msgspec.DecodeError(str(error)) from error
        raise msgspec.ValidationError(f"a {self.kind!r} message carries no {header_type.__name__} header")


@lru_cache(maxsize=256)
def _decoder(header_type: type[H]) -> msgspec.msgpack.Decoder[H]:
    return msgspec.msgpack.Decoder(header_type)
