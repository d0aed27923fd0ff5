"""The calls of NVIDIA's driver that the cuda transport needs, directly from libcuda, without toolkit or torch.

All work goes to the legacy default stream of the current context of the calling thread (torch's, where torch computes on a GPU), or else
of the primary context of the first device. So it is ordered with torch's default stream without synchronization with torch. Memory is
shared by CUDA IPC: an allocation is exported as 64 bytes, which one other process opens. Both processes must see the same device.
"""

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

from flowrt.transports.errors import UnavailableError

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_DISABLE_TIMING = 2
_NOT_READY = 600


class DriverError(Exception):
    """A call of the driver failed; the text names the call and the driver's own word for it. Stays inside `transports`."""


class Driver(ABC):
    """Memory of one device. A pointer is an int; `fence` and `passed` report when all work so far is done."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Memory of the device, aligned to 256 bytes at least."""

    @abstractmethod
    def free(self, pointer: int) -> None:
        """Give back what `allocate` returned."""

    @abstractmethod
    def export(self, pointer: int) -> bytes:
        """HANDLE_BYTES with which another process may open the allocation."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """The allocation that another process has exported; `close` it."""

    @abstractmethod
    def close(self, pointer: int) -> None:
        """Closes what `open` returned."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """From device to device, in order with all other work; returns at once."""

    @abstractmethod
    def read(self, target: bytearray, source: int) -> None:
        """Fill `target` from the device; returns when it is there."""

    @abstractmethod
    def write(self, target: int, source: memoryview) -> None:
        """Copy all of `source` to the device; returns when it may be changed again."""

    @abstractmethod
    def wait(self) -> None:
        """Waits for all work so far, torch's on its default stream included."""

    @abstractmethod
    def fence(self) -> object:
        """A mark after all work so far."""

    @abstractmethod
    def passed(self, fence: object) -> bool:
        """Whether all work before `fence` is done. Not called again after True."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class CUDADriver(Driver):
    """libcuda, for the device of the context that is current, or device 0. Raises UnavailableError."""

    def __init__(self) -> None:
        reason = unavailable_reason()
        if reason is not None:
            raise UnavailableError(reason)
        self._library = _library()
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            device = ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(device), 0)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context

    def allocate(self, nbytes: int) -> int:
        pointer = ctypes.c_uint64()
        self._use("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        return pointer.value

    def free(self, pointer: int) -> None:
        self._use("cuMemFree_v2", ctypes.c_uint64(pointer))

    def export(self, pointer: int) -> bytes:
        handle = _Handle()
        self._use("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        pointer = ctypes.c_uint64()
        self._use("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS))
        return pointer.value

    def close(self, pointer: int) -> None:
        self._use("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._use("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), None)

    def read(self, target: bytearray, source: int) -> None:
        if target:
            host = (ctypes.c_char * len(target)).from_buffer(target)
            self._use("cuMemcpyDtoH_v2", host, ctypes.c_uint64(source), ctypes.c_size_t(len(target)))

    def write(self, target: int, source: memoryview) -> None:
        if source.nbytes:
            host = bytes(source)
            self._use("cuMemcpyHtoD_v2", ctypes.c_uint64(target), host, ctypes.c_size_t(len(host)))
            self.wait()

    def wait(self) -> None:
        self._use("cuStreamSynchronize", None)

    def fence(self) -> object:
        event = ctypes.c_void_p()
        self._use("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_DISABLE_TIMING))
        self._use("cuEventRecord", event, None)
        return event

    def passed(self, fence: object) -> bool:
        status = self._library.cuEventQuery(fence)
        if status == _NOT_READY:
            return False
        self._use("cuEventDestroy_v2", fence)
        self._check("cuEventQuery", status)
        return True

    def _use(self, name: str, *arguments: object) -> None:
        """Call with our context current, and leave the thread as it was."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            raise DriverError(f"{name}: {_word(self._library, status)}")


@cache
def _library() -> Any:
    return ctypes.CDLL(_LIBRARY)


def load() -> Driver:
    """The driver of this thread's device. Raises UnavailableError."""
    return CUDADriver()


def unavailable_reason() -> str | None:
    """None when there is a driver and a device to share memory of. Makes no context."""
    if sys.platform != "linux":
        return "cuda needs Linux (CUDA IPC is offered there only); use zmq here"
    try:
        library = _library()
    except OSError as error:
        return f"cuda needs an NVIDIA GPU and its driver ({error}); without one, use shm"
    status = library.cuInit(0)
    count = ctypes.c_int()
    if not status:
        status = library.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"cuda cannot use the NVIDIA driver ({_word(library, status)}); use shm, or see what nvidia-smi says"
    if not count.value:
        return "cuda sees no GPU (is CUDA_VISIBLE_DEVICES empty?); use shm"
    return None


def _word(library: Any, status: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(status, ctypes.byref(text))
    return (text.value or b"").decode("ascii", "replace") or f"error {status}"
