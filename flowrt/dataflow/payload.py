"""Payload: the torch side of a message, and the way to and from a transport's buffers.

Here: Payload, `to_message`, `to_device_message` and `from_message`, `by_reference` and `from_reference`. Not here: what the bytes look
like on a wire (transports/wire/codec.py), whether a payload fits a port's spec (specs.py). Called by the runner at every edge that leaves a
process.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec
import torch

from flowrt.transports.wire.message import DTYPE_BYTES, Message, Tag, Tensor, TensorSpec

H = TypeVar("H", bound=msgspec.Struct)

_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_BYTE_TYPES = {name for name in DTYPE_BYTES if not name.startswith("complex")}  # complex tensors may be conjugated lazily
# Those that numpy has too.
_NUMPY_TYPES = {name for name in DTYPE_BYTES if not name.startswith(("bfloat", "float8", "float4", "complex"))}
# What libraries take for indices, masks, lengths or counts.
_INDEX_TYPES = {name for name in DTYPE_BYTES if name == "bool" or "int" in name}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


class Payload(msgspec.Struct, gc=False):
    """What one message means to an operator: a typed header (or its undecoded bytes, or none) and tensors on any device."""

    tensors: tuple[torch.Tensor, ...] = ()
    header: msgspec.Struct | bytes | None = None

    def header_as(self, header_type: type[H]) -> H:
        """Raises msgspec.ValidationError when the header is not one."""
        if type(self.header) is header_type:
            return self.header
        if isinstance(self.header, bytes):
            return msgspec.msgpack.decode(self.header, type=header_type)
        raise msgspec.ValidationError(f"this payload carries no {header_type.__name__}")


def to_message(payload: Payload, edge: int, tag: Tag, kind: str = "data") -> Message:
    """The payload's own bytes only: a view is made contiguous, a tensor on another device is brought to the host."""
    return Message(kind, tag, edge, payload.header, tuple(map(_to_buffer, payload.tensors)))


def to_device_message(payload: Payload, edge: int, tag: Tag) -> Message:
    """As `to_message`, for a transport whose capabilities say `device_memory`: a tensor on a device stays there."""
    return Message("data", tag, edge, payload.header, tuple(map(_to_device_buffer, payload.tensors)))


def by_reference(payload: Payload, edge: int, tag: Tag) -> Message:
    """As `to_message`, for a transport that stays in this process: the tensors themselves, wherever they lie."""
    tensors = payload.tensors
    if len(tensors) == 1:
        only = tensors[0]
        return Message("data", tag, edge, payload.header, (Tensor(_spec(only.dtype, only.shape), only),))
    return Message("data", tag, edge, payload.header, tuple([Tensor(_spec(each.dtype, each.shape), each) for each in tensors]))


def from_reference(message: Message) -> Payload:
    """The tensors themselves, as `by_reference` put them in."""
    tensors: Any = message.tensors
    data = (tensors[0].data,) if len(tensors) == 1 else tuple([tensor.data for tensor in tensors])
    return Payload(data, message.header)


def from_message(message: Message, device: torch.device | None = None) -> Payload:
    """Floating-point tensors alias the message's buffers (which live as long as any tensor on them), unless `device` (None: the host) is
    another one. Integers and booleans are always in memory that the peer cannot write: operators check them, then use them as indices."""
    buffers = message.tensors
    if device is not None and device.type != "cpu":
        tensors = tuple([_from_buffer(buffer, device).to(device, non_blocking=True) for buffer in buffers])
    else:
        tensors = (_from_buffer(buffers[0]),) if len(buffers) == 1 else tuple(map(_from_buffer, buffers))
    header = message.header
    return Payload(tensors, bytes(header) if isinstance(header, (bytearray, memoryview)) else header)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Raises TypeError for a dtype that no transport carries."""
    return _spec(tensor.dtype, tensor.shape)


@lru_cache(maxsize=1024)
def _spec(dtype: torch.dtype, shape: torch.Size) -> TensorSpec:
    name = _NAMES.get(dtype)
    if name is None:
        raise TypeError(f"a tensor of {dtype} cannot travel; possible are {', '.join(DTYPE_BYTES)}")
    return TensorSpec(name, tuple(shape))


def _to_buffer(tensor: torch.Tensor) -> Tensor:
    spec = _spec(tensor.dtype, tensor.shape)
    if spec.dtype in _BYTE_TYPES and tensor.layout is torch.strided and tensor.is_contiguous():
        try:  # the usual cases: one call or two instead of eight
            if spec.dtype in _NUMPY_TYPES:
                return Tensor(spec, tensor.numpy())
            if spec.shape and 0 not in spec.shape:
                return Tensor(spec, tensor.view(torch.uint8).numpy())
        except (RuntimeError, TypeError):  # on another device, part of autograd, or lazily negated
            pass
    if tensor.layout is not torch.strided:
        raise TypeError(f"a {tensor.layout} tensor cannot travel; make it dense first")
    if tensor.numel() == 0:
        return Tensor(spec, b"")
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return Tensor(spec, flat.view(torch.uint8).numpy())


def _to_device_buffer(tensor: torch.Tensor) -> Tensor:
    if not is_on_device(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return _to_buffer(tensor)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return Tensor(_spec(tensor.dtype, tensor.shape), device_buffer(flat.view(torch.uint8)))


def is_on_device(tensor: torch.Tensor) -> bool:
    """Whether its memory is of a kind that transports know by `__cuda_array_interface__`."""
    return tensor.is_cuda


def device_buffer(flat: torch.Tensor) -> object:
    """What a transport takes for the bytes of `flat`, contiguous uint8 on a device: something with `__cuda_array_interface__`."""
    return flat


def from_device_buffer(data: object) -> torch.Tensor:
    """The bytes that such a buffer shows, on their device, without a copy; keeps `data` alive."""
    return torch.as_tensor(data, device="cuda")


def _from_buffer(tensor: Tensor, device: torch.device | None = None) -> torch.Tensor:
    spec, data = tensor.spec, tensor.data
    dtype, shape = _TORCH_DTYPES[spec.dtype], spec.shape
    if isinstance(data, torch.Tensor):
        return data  # passed by reference
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    try:
        view = memoryview(cast("bytearray", data))  # any buffer will do
    except TypeError:
        found = from_device_buffer(data).view(dtype).view(shape)
        if device is None:
            return found.cpu()
        return found.clone() if spec.dtype in _INDEX_TYPES else found
    is_shared = spec.dtype in _INDEX_TYPES and type(data) is not bytearray  # which transports fill for the receiver alone
    if view.readonly or is_shared:
        view = memoryview(bytearray(view))  # torch has no read-only tensors, and a write would reach memory that is not ours
    flat = torch.frombuffer(view, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)
