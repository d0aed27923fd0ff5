"""Payload: the torch representation of a message, and its conversion to and from transport buffers.

The wire format is in transports/wire/codec.py; checks against a port's spec are in schemas.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec
import torch

from flowrt.operators.int8_rows import dequantize_rows, quantize_rows
from flowrt.transports.wire.message import DTYPE_BYTES, Lent, Message, Tag, Tensor, TensorSpec

H = TypeVar("H", bound=msgspec.Struct)

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_BYTE_TYPES = {name for name in DTYPE_BYTES if not name.startswith("complex")}  # complex tensors may be conjugated lazily
# dtypes that numpy has too
_NUMPY_TYPES = {name for name in DTYPE_BYTES if not name.startswith(("bfloat", "float8", "float4", "complex"))}
# dtypes that libraries use for indices, masks, lengths or counts
INDEX_TYPES = frozenset(name for name in DTYPE_BYTES if name == "bool" or "int" in name)
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Payload(msgspec.Struct, gc=False):
    """Content of a message as an operator sees it: a typed header (or its undecoded bytes, or None) and tensors on any device.

    `copy_into`: copies the tensors of a response, which may change later, and returns its header. The call that passes the payload on calls
    it before it returns, with tensors on the host of the dtypes and shapes of `tensors`, whose values are not read.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    header: msgspec.Struct | bytes | None = None
    copy_into: Callable[[Sequence[torch.Tensor]], msgspec.Struct] | None = None

    def header_as(self, header_type: type[H]) -> H:
        """Decode the header. Raises msgspec.ValidationError when it is not of this type."""
        if type(self.header) is header_type:
            return self.header
        if isinstance(self.header, bytes):
            return msgspec.msgpack.decode(self.header, type=header_type)
        raise msgspec.ValidationError(f"this payload carries no {header_type.__name__}")


def to_message(payload: Payload, edge: int, tag: Tag, kind: str = "data") -> Message:
    """Convert to a host message with the payload's own bytes: a view is made contiguous, a device tensor is copied to the host."""
    if payload.copy_into is not None:
        return _to_lent_message(payload, payload.copy_into, edge, tag)
    return Message(kind, tag, edge, payload.header, tuple(map(_to_buffer, payload.tensors)))


def to_device_message(payload: Payload, edge: int, tag: Tag) -> Message:
    """Like `to_message`, for a transport with the capability `device_memory`: a tensor in device memory stays there."""
    if payload.copy_into is not None:
        return to_message(payload, edge, tag)
    return Message("data", tag, edge, payload.header, tuple(map(_to_device_buffer, payload.tensors)))


def by_reference(payload: Payload, edge: int, tag: Tag) -> Message:
    """Like `to_message`, for a transport within this OS process: the message holds the tensors themselves, on any device."""
    if payload.copy_into is not None:
        targets = tuple([torch.empty(each.shape, dtype=each.dtype) for each in payload.tensors])
        payload = Payload(targets, payload.copy_into(targets))
    tensors = payload.tensors
    if len(tensors) == 1:
        only = tensors[0]
        return Message("data", tag, edge, payload.header, (Tensor(_spec(only.dtype, only.shape), only),))
    return Message("data", tag, edge, payload.header, tuple([Tensor(_spec(each.dtype, each.shape), each) for each in tensors]))


def from_reference(message: Message) -> Payload:
    """Return the tensors that `by_reference` put into the message, without a copy."""
    tensors: Any = message.tensors
    data = (tensors[0].data,) if len(tensors) == 1 else tuple([tensor.data for tensor in tensors])
    return Payload(data, message.header)


def from_message(message: Message, device: torch.device | None = None, index_types: Collection[str] = INDEX_TYPES) -> Payload:
    """Convert a message to a payload on `device` (None: the host).

    Floating-point tensors alias the message's buffers, which live as long as any tensor on them, unless they are copied to another device.
    Tensors of `index_types` are in memory that the peer cannot write: operators check them, then use them as indices.
    """
    buffers = message.tensors
    if device is not None and device.type != "cpu":
        tensors = tuple([_from_buffer(buffer, device, index_types).to(device, non_blocking=True) for buffer in buffers])
    else:
        first = (_from_buffer(buffers[0], None, index_types),) if buffers else ()
        tensors = (*first, *[_from_buffer(buffer, None, index_types) for buffer in buffers[1:]]) if len(buffers) > 1 else first
    header = message.header
    return Payload(tensors, bytes(header) if isinstance(header, (bytearray, memoryview)) else header)


def with_int8_rows(payload: Payload) -> Payload:
    """The payload with its first tensor, rows, as INT8, and the scales of the rows as its last one. No-op if they are INT8 already."""
    if not payload.tensors or payload.tensors[0].dtype is torch.int8:  # none: a FailedHeader
        return payload
    rows, *others = payload.tensors
    quantized, scales = quantize_rows(rows)
    return Payload((quantized, *others, scales), payload.header)


def from_int8_rows(payload: Payload, dtype: torch.dtype) -> Payload:
    """The inverse of `with_int8_rows`, with rows of `dtype`."""
    if not payload.tensors:
        return payload
    quantized, *others, scales = payload.tensors
    return Payload((dequantize_rows(quantized, scales, dtype), *others), payload.header)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """dtype and shape of a tensor. Raises TypeError for a dtype that no transport carries."""
    return _spec(tensor.dtype, tensor.shape)


@lru_cache(maxsize=1024)
def _spec(dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    name = _NAMES.get(dtype)
    if name is None:
        raise TypeError(f"a tensor of {dtype} cannot travel; possible are {', '.join(DTYPE_BYTES)}")
    return TensorSpec(name, tuple(shape))


def _to_buffer(tensor: torch.Tensor) -> Tensor:
    spec = _spec(tensor.dtype, tensor.shape)
    if spec.dtype in _BYTE_TYPES:
        try:  # the usual cases: two calls or three instead of eight
            if not tensor.is_contiguous():
                pass
            elif spec.dtype in _NUMPY_TYPES:
                return Tensor(spec, tensor.numpy())
            elif spec.shape and 0 not in spec.shape:
                return Tensor(spec, tensor.view(torch.uint8).numpy())
        except (
            RuntimeError,
            TypeError,
            ValueError,
        ):  # sparse, on a device, part of autograd, lazily negated, or too large when it has rows
            pass
    if tensor.layout is not torch.strided:
        raise TypeError(f"a {tensor.layout} tensor cannot travel; make it dense first")
    if tensor.numel() == 0:
        return Tensor(spec, b"")
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return Tensor(spec, flat.view(torch.uint8).numpy())


def _to_lent_message(payload: Payload, copy_into: Callable[[Sequence[torch.Tensor]], msgspec.Struct], edge: int, tag: Tag) -> Message:
    def copy_into_buffers(buffers: Sequence[memoryview]) -> msgspec.Struct:
        pairs = zip(buffers, payload.tensors, strict=True)
        views = (torch.frombuffer(buffer, dtype=each.dtype).view(each.shape) if each.numel() else each for buffer, each in pairs)
        return copy_into(list(views))

    specs = tuple([Tensor(_spec(each.dtype, each.shape), None) for each in payload.tensors])
    return Message("data", tag, edge, payload.header, specs, Lent(copy_into_buffers))


def _to_device_buffer(tensor: torch.Tensor) -> Tensor:
    if not is_on_device(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return _to_buffer(tensor)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return Tensor(_spec(tensor.dtype, tensor.shape), device_buffer(flat.view(torch.uint8)))


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether transports can read the tensor's memory through `__cuda_array_interface__`."""
    return tensor.is_cuda


def device_buffer(flat: torch.Tensor) -> object:
    """The transport buffer for `flat`, contiguous uint8 on a device: an object with `__cuda_array_interface__`."""
    return flat


def from_device_buffer(data: object) -> torch.Tensor:
    """The bytes of a device buffer as a tensor on its device, without a copy. The tensor keeps `data` alive."""
    return torch.as_tensor(data, device="cuda")


def _from_buffer(tensor: Tensor, device: torch.device | None, index_types: Collection[str]) -> torch.Tensor:
    spec, data = tensor.spec, tensor.data
    dtype, shape = TORCH_DTYPES[spec.dtype], spec.shape
    if type(data) is bytearray and data:  # the usual case of a small tensor
        flat = torch.frombuffer(data, dtype=dtype)
        return flat if len(shape) == 1 else flat.view(shape)
    if isinstance(data, torch.Tensor):
        return data  # passed by reference
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    try:
        view = memoryview(cast("bytearray", data))  # any buffer object works
    except TypeError:
        found = from_device_buffer(data).view(dtype).view(shape)
        if device is None:
            return found.cpu()
        return found.clone() if spec.dtype in index_types else found
    is_shared = spec.dtype in index_types and not (tensor.is_private or type(data) is bytearray)
    if view.readonly or is_shared:
        view = memoryview(bytearray(view))  # torch has no read-only tensors, and a write would change the peer's memory
    flat = torch.frombuffer(view, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)
