"""The wire format of messages: decoded by this codec and by a second library, and refused when the bytes are invalid."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.transports.channel.flow_control import ReceiveWindow, SendWindow
from flowrt.transports.contract import Limits
from flowrt.transports.errors import InvalidMessageError, LimitError
from flowrt.transports.wire.codec import WireError, decode, decode_envelope, encode, is_repeat, spec_bytes
from flowrt.transports.wire.message import DTYPE_BYTES, Message, Tag, Tensor, TensorSpec

LIMITS = Limits(max_header_bytes=4096, max_tensors=4, max_message_bytes=1 << 16)


class Header(msgspec.Struct):
    rows: list[int]
    name: str


@st.composite
def messages(draw: st.DrawFn) -> Message:
    text = st.text(max_size=40)
    number = st.integers(-(2**63), 2**64 - 1)
    tags = st.builds(Tag, text, number, number, number, number)
    tensors = []
    for dtype in draw(st.lists(st.sampled_from(sorted(DTYPE_BYTES)), max_size=4)):
        spec = TensorSpec(dtype, tuple(draw(st.lists(st.integers(0, 5), max_size=4))))
        tensors.append(Tensor(spec, draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes))))
    header = draw(st.none() | st.binary(max_size=100) | st.builds(Header, st.lists(st.integers(0, 9)), text))
    return Message(draw(text), draw(st.none() | tags), draw(number), header, tuple(tensors))


@given(messages(), st.integers(0, 2**63))
def test_what_is_encoded_is_decoded(message: Message, sequence: int) -> None:
    parts = encode(message, sequence, LIMITS)
    received, received_sequence = decode([bytes(part) for part in parts], LIMITS)
    assert received_sequence == sequence
    assert (received.kind, received.tag, received.edge) == (message.kind, message.tag, message.edge)
    assert [tensor.spec for tensor in received.tensors] == [tensor.spec for tensor in message.tensors]
    assert [bytes(tensor.data) for tensor in received.tensors] == [bytes(tensor.data) for tensor in message.tensors]
    if isinstance(message.header, Header):
        assert received.decode_header(Header) == message.header
    else:
        assert received.header == message.header


def test_recorded_bytes_read_by_a_second_library() -> None:
    spec = TensorSpec("float32", (2, 3))
    message = Message("data", Tag("gate@5f", 1, 2, 3, 4), 7, Header([1, 300], "x"), (Tensor(spec, bytes(24)),))
    envelope, payload = encode(message, 260)
    recorded = b"\x96\xcd\x01\x04\xa4data\x07\x95\xa7gate@5f\x01\x02\x03\x04"
    recorded += b"\xc4\x12\x82\xa4rows\x92\x01\xcd\x01,\xa4name\xa1x\x91\x92\xa7float32\x92\x02\x03"
    assert envelope == recorded
    sequence, kind, edge, tag, header, tensors = msgpack.unpackb(recorded)
    assert (sequence, kind, edge, tag) == (260, "data", 7, ["gate@5f", 1, 2, 3, 4])
    assert msgpack.unpackb(header) == {"rows": [1, 300], "name": "x"}
    assert tensors == [["float32", [2, 3]]]
    assert bytes(payload) == bytes(24)


def test_tensors_are_sent_from_their_own_memory() -> None:
    data = bytearray(range(10))
    parts = encode(Message("data", tensors=(Tensor(TensorSpec("int16", (2,)), memoryview(data)[3:7]),)), 0)
    data[3] = 99
    assert bytes(parts[1]) == bytes([99, 4, 5, 6])


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Message("data", tensors=(Tensor(TensorSpec("float7", (1,)), b"x"),)), InvalidMessageError),
        (Message("data", tensors=(Tensor(TensorSpec("uint8", (2,)), b"x"),)), InvalidMessageError),
        (Message("data", tensors=(Tensor(TensorSpec("uint8", (-1, -1)), b"x"),)), InvalidMessageError),
        (Message("data", tensors=(Tensor(TensorSpec("uint8", (1,) * 9), b"x"),)), InvalidMessageError),
        (Message("data", tensors=(Tensor(TensorSpec("uint8", (2,)), memoryview(bytes(6))[::2]),)), InvalidMessageError),
        (Message("data", tensors=(Tensor(TensorSpec("uint8", (1,)), object()),)), InvalidMessageError),
        (Message("data", edge=2**70), InvalidMessageError),
        (Message("data", tensors=(Tensor(TensorSpec("uint8", (1,)), b"x"),) * 5), LimitError),
        (Message("data", tensors=(Tensor(TensorSpec("uint8", (1 << 15,)), bytes(1 << 15)),) * 3), LimitError),
        (Message("k" * 5000), LimitError),
    ],
)
def test_sender_refuses_invalid_messages(message: Message, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        encode(message, 0, LIMITS)


def envelope(*specs: object, tag: object = None, header: object = None, sequence: object = 0) -> bytes:
    packed: bytes = msgpack.packb([sequence, "data", 0, tag, header, list(specs)])
    return packed


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"\xc1",
        b"\x96\x00",
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
        b"\x91" * 3000,  # nested deeper than any message
        envelope() + b"\x00",
        envelope(["float7", [1]]),
        envelope(["uint8", [-1]]),
        envelope(["uint8", [1] * 9]),
        envelope(["uint8", [1 << 17]]),
        envelope(["uint8", [1 << 16]], ["uint8", [1]]),
        envelope(["float64", [2**62, 2**62, 2**62, 2**62]]),
        envelope(["uint8", [2**32, 2**32]]),
        envelope(*[["uint8", [1]]] * 5),
        envelope(["uint8", [1.5]]),
        envelope(header="text"),
        envelope(tag=["x", "y"]),
        envelope(sequence=None),
        envelope(header=bytes(5000)),
        msgpack.packb({"kind": "data"}),
        msgpack.packb(msgpack.ExtType(5, b"x" * 16)),
    ],
)
def test_bad_envelopes_allocate_nothing(part: bytes) -> None:
    with pytest.raises(WireError):
        decode_envelope(part, LIMITS)


def test_sizes_must_be_those_announced() -> None:
    good = envelope(["uint8", [4]])
    assert bytes(decode([good, b"abcd"], LIMITS)[0].tensors[0].data) == b"abcd"
    for parts in ([good], [good, b"abc"], [good, b"abcd", b""], []):
        with pytest.raises(WireError):
            decode(parts, LIMITS)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_arbitrary_bytes_raise_no_other_error(part: bytes) -> None:
    try:
        decode([part], LIMITS)
    except WireError:
        return


@given(messages(), st.data())
@settings(max_examples=200)
def test_changed_bytes_raise_no_other_error(message: Message, data: st.DataObject) -> None:
    parts = [bytearray(part) for part in encode(message, 3)]
    for _ in range(data.draw(st.integers(1, 4))):
        parts[0][data.draw(st.integers(0, len(parts[0]) - 1))] = data.draw(st.integers(0, 255))
    try:
        received, _ = decode(parts, LIMITS)
    except WireError:
        return
    assert sum(spec_bytes(tensor.spec) for tensor in received.tensors) <= LIMITS.max_message_bytes


def test_repeats_are_dropped_and_gaps_are_not() -> None:
    assert not is_repeat(5, 5)
    assert is_repeat(4, 5)
    for sequence in (6, -1):
        with pytest.raises(WireError, match="missing"):
            is_repeat(sequence, 5)


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=60))
def test_window_never_holds_more_and_never_gets_stuck(steps: list[tuple[int, bool]]) -> None:
    limits = Limits(capacity_messages=4, capacity_bytes=300)
    sender, receiver = SendWindow(limits), ReceiveWindow(limits)
    on_the_way: list[int] = []
    for size, take in steps:
        if take and on_the_way:
            if receiver.took(on_the_way.pop(0)):
                sender.update(*receiver.report())
        elif sender.fits(size):
            sender.add(size)
            receiver.arrived(size)
            on_the_way.append(size)
        assert len(on_the_way) <= 4
        assert sum(on_the_way) <= 300 or len(on_the_way) == 1
    receiver.sender_waits = True
    while on_the_way:
        assert receiver.took(on_the_way.pop(0))
    sender.update(*receiver.report())
    assert sender.fits(400)


def test_window_refuses_a_peer_that_cheats() -> None:
    limits = Limits(capacity_messages=2, capacity_bytes=100)
    receiver = ReceiveWindow(limits)
    receiver.arrived(60)
    with pytest.raises(WireError):
        receiver.arrived(60)
    sender = SendWindow(limits)
    sender.add(10)
    for declared in ((2, 10), (1, 11), (-1, 0)):
        with pytest.raises(WireError):
            sender.update(*declared)
