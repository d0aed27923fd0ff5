"""Wraps ucxx, UCX's Python library: one worker and one endpoint between two processes. Only this module imports ucxx.

The endpoints are made from worker addresses, because only those let UCX choose shared memory. Within a host, `TLS=posix,cma`: small frames
go through a ring in shared memory, large ones are read straight out of the sender's memory; nothing listens on a network.
`POSIX_ERROR_HANDLING` and `CMA_MEMORY_INVALIDATE` let both be used with UCX's error handling, without which an endpoint whose peer is dead
or stopped cannot be closed. The second needs UCX's registration cache, without which (UCX_MEM_EVENTS=n in the environment) UCX 1.21
crashes when it cancels: `RCACHE_ENABLE=y` makes that an error at the start. `KEEPALIVE_INTERVAL=inf`: the socket of the rendezvous reports
the death of a peer, not UCX.

Between hosts, `TLS=tcp,ib`: RDMA where this build of UCX and the devices have it, else TCP. UCX uses the devices of one network only.

ucxx 0.40 to 0.52 keep a closed endpoint whose requests were cancelled alive (the requests refer to it, and it to them) until
`Endpoint::getCancelingSize` is called, which its Python classes never do; `UCXLink.close` calls it in the C++ library.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections import Counter
from functools import cache
from typing import Any

from flowrt.transports.errors import UnavailableError
from flowrt.transports.wire.codec import WireError

Settings = tuple[tuple[str, str], ...]
_ALWAYS = (("RCACHE_ENABLE", "y"), ("KEEPALIVE_INTERVAL", "inf"), ("RNDV_THRESH", "8192"))
WITHIN_HOST: Settings = (("TLS", "posix,cma"), ("POSIX_ERROR_HANDLING", "y"), ("CMA_MEMORY_INVALIDATE", "y"), *_ALWAYS)
# UCX logs to standard output, and logs a dead peer as an error. Its Python package sets a variable that causes a warning of UCX.
_ENVIRONMENT = {"UCX_LOG_LEVEL": "fatal", "UCXX_LOG_LEVEL": "fatal", "UCX_WARN_UNUSED_ENV_VARS": "n"}
_PURGE = "_ZNK4ucxx8Endpoint16getCancelingSizeEv"
_CLOSING_TURNS = 16
IN_PROGRESS = 1  # value of a request's `status`


def between_hosts(devices: str, ports: str) -> Settings:
    """`devices`: UCX's names of those of one network. `ports`: FROM-TO, at which UCX may listen; "": any."""
    return (("TLS", "tcp,ib"), ("NET_DEVICES", devices), ("TCP_PORT_RANGE", ports or "0"), *_ALWAYS)


class _Library:
    """The parts of ucxx in use, and UCX's contexts: one per process and settings, alive while any UCXLink uses it."""

    def __init__(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import libucxx  # type: ignore[import-untyped, unused-ignore]
        from ucxx._lib import libucxx as api
        from ucxx._lib.arr import Array

        self.api: Any = api
        self.array: Any = Array
        self.full_mask: Any = api.UCXXTagMaskFull
        self._contexts: dict[Settings, Any] = {}
        self._users = Counter[Settings]()
        self._process = 0
        shared = ctypes.CDLL(os.path.join(os.path.dirname(libucxx.__file__), "lib64", "libucxx.so"))
        self.purge: Any = getattr(shared, _PURGE)
        self.purge.restype = ctypes.c_size_t
        self.purge.argtypes = [ctypes.c_void_p]

    def open_worker(self, settings: Settings) -> Any:
        if self._process != os.getpid():  # a forked child must not use its parent's contexts
            self._contexts, self._users, self._process = {}, Counter(), os.getpid()
        if settings not in self._contexts:
            self._contexts[settings] = self.api.UCXContext(dict(settings), (self.api.Feature.TAG, self.api.Feature.WAKEUP))
        worker = self.api.UCXWorker(self._contexts[settings])
        self._users[settings] += 1
        worker.init_blocking_progress_mode()
        return worker

    def worker_closed(self, settings: Settings) -> None:
        self._users[settings] -= 1
        if not self._users[settings]:
            self._contexts.pop(settings, None)


@cache
def _library() -> _Library:
    return _Library()


@cache
def unavailable_reason() -> str | None:
    """Returns None when UCX works on this machine, otherwise the reason. The first call opens a worker to find out."""
    if sys.platform != "linux":
        return "ucx needs Linux; use zmq here"
    try:
        library = _library()
    except (ImportError, OSError, AttributeError) as error:
        return f"ucx needs the package ucxx ({_one_line(error)}); install it with: pip install 'ucxx-cu13>=0.46' (Linux, x86-64 or ARM)"
    try:
        UCXLink().close()
    except UnavailableError as error:
        return str(error)
    return None if library else ""


def _likely_cause() -> str:
    """What most often keeps UCX from opening a worker: it makes a temporary file in /tmp, whatever TMPDIR says."""
    try:
        with tempfile.TemporaryFile(dir="/tmp"):
            pass
    except OSError as error:
        return f"/tmp takes no files ({error.strerror})"
    names = sorted(name for name in os.environ if name.startswith(("UCX_", "UCXX_")) and name not in _ENVIRONMENT)
    return f"{', '.join(names)} in the environment may be the cause" if names else "flowrt doctor shows whether it works here"


class UCXLink:
    """A worker and, after `connect`, its endpoint to the peer's worker.

    `progress()` runs UCX's pending work. `arm()` returns True when no work is left; `descriptor` then becomes readable with new work.
    `send(array, tag)` starts to send memory, which must not change until the request completes. `receive(array, tag)` starts to receive
    the next message of `tag`. `receive_probed(array, probed)` starts to receive the message found by `probe` into an array of its length.
    The `status` of a request is IN_PROGRESS, 0 for success, and any other value for a failure (longer than the array, cancelled, peer
    ended).
    """

    def __init__(self, settings: Settings = WITHIN_HOST) -> None:
        self._library, self._settings = _library(), settings
        try:
            self._worker = self._library.open_worker(settings)
        except Exception as error:
            raise UnavailableError(f"ucx cannot open a worker: {_one_line(error)}; {_likely_cause()}") from error
        self._endpoint: Any = None
        self.descriptor = int(self._worker.epoll_file_descriptor)
        self.array: Any = self._library.array  # the buffer type of UCX; it keeps its memory alive
        self.progress: Any = self._worker.progress
        self.arm: Any = self._worker.arm
        self.send: Any = None
        self.receive: Any = self._worker.tag_recv
        self.receive_probed: Any = self._worker.tag_recv_with_handle

    def address(self) -> bytes:
        """Returns the address with which the peer connects to this worker."""
        return bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> None:
        """Makes the endpoint to the worker at `address`. Raises WireError when UCX cannot reach it."""
        try:
            peer = self._library.api.UCXAddress.create_from_buffer(address)
            self._endpoint = self._library.api.UCXEndpoint.create_from_worker_address(self._worker, peer, True)
        except Exception as error:
            raise WireError(f"UCX cannot reach the peer: {_one_line(error)}") from error
        self.send = self._endpoint.tag_send

    @property
    def is_connected(self) -> bool:
        """False once UCX has noticed that the peer has ended: nothing more arrives from it. False before `connect`."""
        return self._endpoint is not None and bool(self._endpoint.alive)

    def tag(self, number: int) -> Any:
        """Returns the 64-bit `number` as a tag object of the library."""
        return self._library.api.UCXXTag(number)

    def probe(self, tag: Any) -> Any:
        """Probes for an arrived message of `tag`. The result has `matched` and `length`; when matched, `receive_probed` must follow."""
        return self._worker.tag_probe(tag, self._library.full_mask, True)

    def close(self) -> None:
        """Closes the link in any state of the peer. On return all requests are complete, and UCX accesses no memory of this link."""
        worker, endpoint = self._worker, self._endpoint
        self._worker = self._endpoint = self.progress = self.arm = self.send = self.receive = self.receive_probed = None
        if endpoint is not None:
            endpoint.close_blocking()
            for _ in range(_CLOSING_TURNS):
                worker.progress()
            self._library.purge(endpoint.ucxx_ptr)
        del endpoint, worker
        self._library.worker_closed(self._settings)


class LostError(WireError):
    """The peer ended; it did not send invalid data."""


def check_status(status: int) -> None:
    """Raises LostError when the `status` of a completed request is a failure."""
    if status:
        raise LostError(f"UCX could not finish (status {int(status)}): the peer died or cut the connection")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
