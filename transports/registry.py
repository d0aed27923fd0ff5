"""Finds the transport of a scheme: built-in ones, and those of the entry point group `flowrt.transports`.

An entry point has the scheme as its name and a subclass of Transport as its object. A scheme's module, and the library it needs, is
imported at the first use of that scheme.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from flowrt.transports.contract import Transport
from flowrt.transports.errors import AddressError, UnavailableError

ENTRY_POINT_GROUP = "flowrt.transports"

_BUILT_IN = {
    "inproc": "flowrt.transports.inproc:InprocTransport",
    "shm": "flowrt.transports.shared_memory.transport:SharedMemoryTransport",
    "zmq": "flowrt.transports.zeromq.transport:ZeroMQTransport",
    "ucx": "flowrt.transports.ucx.transport:UCXTransport",
    "cuda": "flowrt.transports.cuda.transport:CUDATransport",
}
_FAULTY = "faulty+"  # before any scheme: the same with injected faults, by the plan behind its "?"


def base_scheme(scheme: str) -> str:
    """The scheme that carries the messages: `shm` for `faulty+shm?drop@100`."""
    return scheme.removeprefix(_FAULTY).partition("?")[0] if scheme.startswith(_FAULTY) else scheme


def known_schemes() -> tuple[str, ...]:
    """Every known scheme, whether or not it works here: built-in ones first, then registered ones by name."""
    registered = sorted(entry_points(group=ENTRY_POINT_GROUP).names - set(_BUILT_IN))
    return (*_BUILT_IN, *registered)


def module_of(scheme: str) -> str:
    """The module of a built-in scheme."""
    return _BUILT_IN[scheme].partition(":")[0]


def transport_class(scheme: str) -> type[Transport]:
    """The class behind `scheme`, available or not. Raises AddressError listing the known ones, UnavailableError if it cannot load."""
    if scheme.startswith(_FAULTY):
        faulty: type[Transport] = import_module("flowrt.transports.fault_injection.transport").from_scheme(scheme, transport_class)
        return faulty
    if scheme in _BUILT_IN:
        module, name = _BUILT_IN[scheme].split(":")
        loaded = getattr(import_module(module), name)
    else:
        loaded = _load(scheme, _registered(scheme))
    if not (isinstance(loaded, type) and issubclass(loaded, Transport)):
        raise UnavailableError(
            f"transport {scheme!r}: its entry point is {loaded!r}, not a subclass of flowrt.transports.contract.Transport"
        )
    return loaded


def unavailable_reason(scheme: str) -> str | None:
    """None when `scheme` works here, else the reason as a sentence. Raises AddressError for an unknown scheme."""
    try:
        return transport_class(scheme).unavailable_reason()
    except UnavailableError as error:
        return str(error)


def get_transport(scheme: str) -> Transport:
    """A new transport of `scheme`; keep one per event loop. Raises AddressError (unknown scheme), UnavailableError."""
    found = transport_class(scheme)
    reason = found.unavailable_reason()
    if reason is not None:
        raise UnavailableError(reason)
    return found()


def _registered(scheme: str) -> EntryPoint:
    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=scheme))
    if not found:
        raise AddressError(f"unknown transport {scheme[:64]!r}; known: {', '.join(known_schemes())}")
    return found[0]


def _load(scheme: str, entry_point: EntryPoint) -> object:
    try:
        return entry_point.load()
    except Exception as error:
        raise UnavailableError(f"transport {scheme!r} cannot be loaded from {entry_point.value}: {error}") from error
