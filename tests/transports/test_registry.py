"""Looking up a transport by its scheme, including schemes of other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from flowrt.transports import registry
from flowrt.transports.errors import AddressError, UnavailableError
from flowrt.transports.inproc import InprocTransport
from flowrt.transports.shared_memory import transport as shared_memory
from flowrt.transports.wire.address import expect_scheme, parse_address
from flowrt.transports.zeromq import transport as zeromq


class BorrowedTransport(InprocTransport):
    """Stands for one from another package."""

    scheme = "borrowed"


def _register(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = EntryPoints(EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in values.items())
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))


def test_own_schemes_are_known_and_new_each_time() -> None:
    assert registry.known_schemes()[:3] == ("inproc", "shm", "zmq")
    assert registry.get_transport("inproc") is not registry.get_transport("inproc")


def test_unknown_scheme_lists_the_known() -> None:
    with pytest.raises(AddressError, match=r"'carrier-pigeon'.*inproc, shm, zmq"):
        registry.get_transport("carrier-pigeon")


def test_third_party_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, borrowed=f"{__name__}:BorrowedTransport", gone="no_such_module:X", wrong="math:pi", inproc="math:pi")
    monkeypatch.setattr(EntryPoint, "load", lambda point: BorrowedTransport if point.name == "borrowed" else _load(point))
    assert registry.known_schemes() == (*registry._BUILT_IN, "borrowed", "gone", "wrong")
    assert type(registry.get_transport("borrowed")) is BorrowedTransport
    assert type(registry.get_transport("inproc")) is InprocTransport
    with pytest.raises(UnavailableError, match="no_such_module"):
        registry.get_transport("gone")
    with pytest.raises(UnavailableError, match="not a subclass"):
        registry.get_transport("wrong")
    assert "no_such_module" in (registry.unavailable_reason("gone") or "")


def _load(point: EntryPoint) -> object:
    if point.name == "gone":
        raise ImportError("no_such_module")
    return 3.14


def test_the_error_of_a_missing_library_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_missing", "No module named 'flowrt.transports.native._words'")
    monkeypatch.setattr(zeromq, "_missing", "No module named 'zmq'")
    assert "C compiler" in (registry.unavailable_reason("shm") or "")
    with pytest.raises(UnavailableError, match="pip install pyzmq"):
        registry.get_transport("zmq")


def test_asking_for_a_scheme_loads_no_library_of_another_and_no_torch() -> None:
    code = "import sys; from flowrt.transports.registry import unavailable_reason as r; r('zmq'); r('shm'); r('cuda')"
    code += "; sys.exit(bool({'ucxx', 'torch'}.intersection(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def test_addresses() -> None:
    assert parse_address("shm://a/b:1?x") == ("shm", "a/b:1?x")
    assert str(parse_address("zmq://")) == "zmq://"
    assert expect_scheme("zmq://127.0.0.1:5", "zmq") == "127.0.0.1:5"
    for bad in ("", "shm", "shm:/x", "SHM://x", "://x", "shm://a\nb", "shm://" + "x" * 600):
        with pytest.raises(AddressError):
            parse_address(bad)
    with pytest.raises(AddressError, match="shm://"):
        expect_scheme("zmq://x", "shm")
