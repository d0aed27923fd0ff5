"""The mutual handshake, fed with whole messages, with pieces, and with wrong bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.transports.contract import PROTOCOL_VERSION, Identity, Limits
from flowrt.transports.errors import HandshakeError
from flowrt.transports.wire import handshake
from flowrt.transports.wire.handshake import MAX_FRAME_BYTES, Handshake, RefusedError

KEY = b"k" * 32
ONE, TWO = Identity("one", "1"), Identity("two", "2")


def pair(key: bytes = KEY, other_key: bytes = KEY, scheme: str = "shm", payload: bytes = b"") -> tuple[Handshake, Handshake]:
    connector = Handshake("connector", key, ONE, Limits(), scheme="shm", payload=lambda limits: payload, nonce=b"1" * 32)
    return connector, Handshake("listener", other_key, TWO, Limits(max_tensors=3), scheme=scheme, nonce=b"2" * 32)


def run(connector: Handshake, listener: Handshake, piece: int = 1 << 20) -> None:
    """Carry bytes between the two, at most `piece` at a time, until nothing is left to carry."""
    to_listener, to_connector = connector.start(), b""
    while to_listener or to_connector:
        if to_listener:
            to_connector += listener.receive(to_listener[:piece])
            to_listener = to_listener[piece:]
        if to_connector:
            to_listener += connector.receive(to_connector[:piece])
            to_connector = to_connector[piece:]


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_both_sides_end_knowing_the_same(piece: int) -> None:
    connector, listener = pair(payload=b"endpoint")
    run(connector, listener, piece)
    assert connector.done
    assert listener.done
    assert (connector.peer, listener.peer) == (TWO, ONE)
    assert connector.limits == listener.limits == Limits(max_tensors=3)
    assert listener.payload == b"endpoint"
    assert connector.session_key("a") == listener.session_key("a") != listener.session_key("b")


def test_session_keys_differ_between_runs() -> None:
    keys = set()
    for _ in range(3):
        connector = Handshake("connector", KEY, ONE, Limits(), scheme="shm")
        run(connector, Handshake("listener", KEY, TWO, Limits(), scheme="shm"))
        keys.add(connector.session_key("a"))
    assert len(keys) == 3


def test_a_wrong_key_is_refused_by_the_connector_before_it_proves_or_allocates() -> None:
    offered = []
    connector = Handshake("connector", KEY, ONE, Limits(), scheme="shm", payload=lambda limits: offered.append(limits) or b"")
    _, listener = pair(other_key=b"x" * 32)
    with pytest.raises(HandshakeError, match="key"):
        connector.receive(listener.receive(connector.start()))
    assert not offered
    assert not connector.done


def test_a_listener_refuses_a_wrong_proof() -> None:
    connector, listener = pair()
    connector.receive(listener.receive(connector.start()))
    stranger = Handshake("connector", b"x" * 32, ONE, Limits(), scheme="shm")
    stranger._peer_hello = listener._hello
    proof = handshake._frame(handshake._PROOF, stranger._mac("connector"))
    with pytest.raises(HandshakeError, match="key"):
        listener.receive(proof)


def test_a_listeners_proof_cannot_be_reflected() -> None:
    connector, listener = pair()
    response = listener.receive(connector.start())
    (hello_bytes,) = struct.unpack_from("<I", response)
    with pytest.raises(HandshakeError):
        listener.receive(response[5 + hello_bytes :])


def test_a_proof_cannot_be_replayed() -> None:
    connector, listener = pair()
    first = connector.start()
    proof = connector.receive(listener.receive(first))
    another = Handshake("listener", KEY, TWO, Limits(max_tensors=3), scheme="shm")
    another.receive(first)
    with pytest.raises(HandshakeError, match="key"):
        another.receive(proof)


@pytest.mark.parametrize("changed", ["name", "limits", "payload"])
def test_the_proof_covers_the_whole_transcript(changed: str) -> None:
    connector, listener = pair(payload=b"endpoint")
    hello = connector.start()
    if changed == "name":
        hello = hello.replace(b"\xa3one", b"\xa3eno")
    elif changed == "limits":
        hello = hello.replace(b"\x10", b"\x0f")
    assert (hello != connector.start()) == (changed != "payload")
    response = listener.receive(hello)
    with pytest.raises(HandshakeError, match="key"):
        listener.receive(connector.receive(response).replace(b"endpoint", b"otherend"))


def test_versions_are_both_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = Handshake("connector", KEY, ONE, Limits(), scheme="shm")
    newer._hello = newer._hello[:6] + struct.pack("<H", PROTOCOL_VERSION + 1) + b"anything at all"
    _, listener = pair()
    with pytest.raises(RefusedError, match=f"version {PROTOCOL_VERSION + 1} .* version {PROTOCOL_VERSION}") as refusal:
        listener.receive(newer.start())
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with pytest.raises(RefusedError, match=f"version {PROTOCOL_VERSION} .* version {PROTOCOL_VERSION + 1}"):
        newer.receive(refusal.value.reply)


def test_another_scheme_is_refused() -> None:
    connector, listener = pair(scheme="zmq")
    with pytest.raises(HandshakeError, match=r"'shm'.*'zmq'"):
        listener.receive(connector.start())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<IB", MAX_FRAME_BYTES + 1, 1),
        struct.pack("<IB", 2, 9) + b"xx",
        struct.pack("<IB", 3, 2) + b"abc",
        handshake._frame(1, b"flowrt"),
        handshake._frame(1, struct.pack("<6sH", b"flowrt", PROTOCOL_VERSION) + b"\xc1"),
        handshake._frame(1, b"\x00" * 100),
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    _, listener = pair()
    with pytest.raises(HandshakeError):
        listener.receive(data)


def test_bytes_after_the_end_are_refused() -> None:
    connector, listener = pair()
    run(connector, listener)
    for side in (connector, listener):
        with pytest.raises(HandshakeError, match="after the end"):
            side.receive(b"x")


@given(st.lists(st.binary(max_size=200), max_size=8))
@settings(max_examples=200)
def test_fuzzed_bytes_only_ever_refuse(pieces: list[bytes]) -> None:
    for side in pair():
        side.start()
        try:
            for piece in pieces:
                side.receive(piece)
        except HandshakeError:
            pass
        assert not side.done
        assert len(side._buffer) <= MAX_FRAME_BYTES + 5 + 200


@given(st.data())
@settings(max_examples=200)
def test_one_changed_byte_is_refused(data: st.DataObject) -> None:
    connector, listener = pair(payload=b"x" * 20)
    messages = [connector.start()]
    where = data.draw(st.sampled_from(["hello", "response", "proof"]))

    def change(sent: bytes) -> bytes:
        place = data.draw(st.integers(0, len(sent) - 1))
        return sent[:place] + bytes([sent[place] ^ data.draw(st.integers(1, 255))]) + sent[place + 1 :]

    try:
        hello = change(messages[0]) if where == "hello" else messages[0]
        response = listener.receive(hello)
        response = change(response) if where == "response" and response else response
        proof = connector.receive(response)
        proof = change(proof) if where == "proof" and proof else proof
        listener.receive(proof)
    except HandshakeError:
        return
    assert not (connector.done and listener.done)


def test_bad_keys_and_names_are_the_callers_mistake() -> None:
    for key, identity in ((b"short", ONE), (KEY, Identity("n" * 300))):
        with pytest.raises(HandshakeError):
            Handshake("listener", key, identity, Limits(), scheme="shm")
