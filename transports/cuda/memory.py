"""Manages the device memory of a channel: free ranges (without I/O), areas that live while referenced, and received buffers."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from flowrt.transports.cuda.driver import Driver, DriverError
from flowrt.transports.errors import InvalidMessageError
from flowrt.transports.wire.message import DTYPE_BYTES, Tensor

ALIGNMENT = 256


def aligned(nbytes: int) -> int:
    """Rounds `nbytes` up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Ranges:
    """A first-fit allocator of ranges in an area of `nbytes`; adjacent free ranges are merged. The writer of an area owns it."""

    def __init__(self, nbytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []  # (start, end), sorted, never adjacent
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """Allocates a range of `nbytes` and returns its start, or None when no free range is large enough."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (start + nbytes, end)
                self._taken[start] = nbytes
                return start
        return None

    def give_back(self, start: int) -> bool:
        """Frees the range that starts at `start`. Returns False when no such range is taken."""
        nbytes = self._taken.pop(start, None)
        if nbytes is None:
            return False
        end = start + nbytes
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        insort(self._free, (start, end))
        return True


class Area:
    """An allocation on the device, freed with the last reference to this object."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.pointer = driver.allocate(nbytes)
        self.nbytes = nbytes
        weakref.finalize(self, _free, driver, self.pointer).atexit = False


class HeldRanges:
    """A part of an area that holds received tensors. `on_end` is called, possibly on another thread, when the last one is freed."""

    def __init__(self, area: Area, on_end: Callable[[], None]) -> None:
        self.area = area
        weakref.finalize(self, on_end).atexit = False


class DeviceBuffer:
    """The bytes of one tensor on the device. torch.as_tensor, cupy.asarray and numba accept it without a copy and keep it alive."""

    def __init__(self, held: HeldRanges, pointer: int, nbytes: int) -> None:
        self._held = held
        self.nbytes = nbytes
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer if nbytes else 0, False),
            "strides": None,
            "version": 3,
            "stream": None,  # the bytes are complete, so no stream needs a wait
        }


def _free(driver: Driver, pointer: int) -> None:
    with suppress(DriverError):  # the device or CUDA has ended, which frees the memory
        driver.free(pointer)


def device_pointer(tensor: Tensor) -> int | None:
    """Returns the device address of `tensor`, or None for a tensor on the host. Raises InvalidMessageError when the buffer is not
    contiguous, has a mask, or does not match its spec."""
    interface: Any = getattr(tensor.data, "__cuda_array_interface__", None)
    if interface is None:
        return None
    shape, spec = tuple(interface["shape"]), tensor.spec
    item = int(interface["typestr"][2:])
    if spec.dtype not in DTYPE_BYTES:
        raise InvalidMessageError(f"unknown dtype {spec.dtype[:32]!r}")
    if interface.get("mask") is not None or not _is_contiguous(shape, interface.get("strides"), item):
        raise InvalidMessageError("a tensor on a device must be contiguous and have no mask to be sent")
    nbytes = item
    for size in shape:
        nbytes *= size
    if nbytes != spec.nbytes:
        raise InvalidMessageError(f"a {spec.dtype} tensor of shape {spec.shape} has {spec.nbytes} bytes, its buffer {nbytes}")
    return int(interface["data"][0])


def _is_contiguous(shape: Sequence[int], strides: Sequence[int] | None, item: int) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = item
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
