"""Calls NVIDIA's driver (libcuda) directly for the cuda transport, without toolkit or torch.

All work goes to the legacy default stream of the current context of the calling thread (torch's, where torch computes on a GPU), or else
of the primary context of the first device. So it is ordered with torch's default stream without synchronization with torch. Memory is
shared by CUDA IPC: an allocation is exported as 64 bytes, which one other process opens. Both processes must see the same device.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from flowrt.transports.errors import UnavailableError

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
_DISABLE_TIMING = 2
_NOT_READY = 600


class DriverError(Exception):
    """A call of the driver failed; the text has the call and the driver's error name. It never leaves the package `transports`."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class Driver:
    """Access to the memory of the device of the current context, or of device 0. Raises UnavailableError. A pointer is an int. `fence` and
    `passed` report when all earlier work is complete."""

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
        """Allocates device memory, aligned to at least 256 bytes, and returns its pointer."""
        pointer = ctypes.c_uint64()
        self._use("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        return pointer.value

    def free(self, pointer: int) -> None:
        """Frees a pointer from `allocate`."""
        self._use("cuMemFree_v2", ctypes.c_uint64(pointer))

    def export(self, pointer: int) -> bytes:
        """Returns a handle of HANDLE_BYTES bytes, with which another process can open the allocation."""
        handle = _Handle()
        self._use("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Maps the allocation that another process has exported and returns its pointer; pass it to `close` afterwards."""
        pointer = ctypes.c_uint64()
        self._use("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS))
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmaps a pointer from `open`."""
        self._use("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queues a copy from device to device, in order with all other work, and returns at once."""
        self._use("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), None)

    def read(self, target: bytearray, source: int) -> None:
        """Fills `target` from the device and returns when the copy is complete."""
        if target:
            host = (ctypes.c_char * len(target)).from_buffer(target)
            self._use("cuMemcpyDtoH_v2", host, ctypes.c_uint64(source), ctypes.c_size_t(len(target)))

    def write(self, target: int, source: memoryview) -> None:
        """Copies all of `source` to the device and returns when `source` may be changed again."""
        if source.nbytes:
            host = bytes(source)
            self._use("cuMemcpyHtoD_v2", ctypes.c_uint64(target), host, ctypes.c_size_t(len(host)))
            self.wait()

    def wait(self) -> None:
        """Waits for all earlier work, including torch's work on its default stream."""
        self._use("cuStreamSynchronize", None)

    def fence(self) -> object:
        """Returns a marker that follows all earlier work."""
        event = ctypes.c_void_p()
        self._use("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_DISABLE_TIMING))
        self._use("cuEventRecord", event, None)
        return event

    def passed(self, fence: object) -> bool:
        """Whether all work before `fence` is complete. After True, do not call it again with this fence."""
        status = self._library.cuEventQuery(fence)
        if status == _NOT_READY:
            return False
        self._use("cuEventDestroy_v2", fence)
        self._check("cuEventQuery", status)
        return True

    def _use(self, name: str, *arguments: object) -> None:
        """Calls the driver with this object's context current, then restores the thread's context."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            raise DriverError(f"{name}: {_error_name(self._library, status)}")


@cache
def _library() -> Any:
    return ctypes.CDLL(_LIBRARY)


def unavailable_reason() -> str | None:
    """Returns None when a driver and a device are present, otherwise the reason. Does not create a context."""
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
        return f"cuda cannot use the NVIDIA driver ({_error_name(library, status)}); use shm, or read the output of nvidia-smi"
    if not count.value:
        return "cuda sees no GPU (is CUDA_VISIBLE_DEVICES empty?); use shm"
    return None


def _error_name(library: Any, status: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(status, ctypes.byref(text))
    return (text.value or b"").decode("ascii", "replace") or f"error {status}"
