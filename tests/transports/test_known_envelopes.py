"""Envelopes of known forms: the C code writes the bytes of codec.py and reads its messages, and leaves it all others."""

from __future__ import annotations

import asyncio
import random
import secrets

import msgspec
import pytest

from flowrt.transports.contract import Identity, Limits
from flowrt.transports.errors import InvalidMessageError, LimitError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.wire.codec import encode_envelope, header_bytes, learn
from flowrt.transports.wire.message import Message, Tag, Tensor, TensorSpec

pytestmark = pytest.mark.skipif(unavailable_reason("shm") is not None, reason="the C module was not built")

LIMITS = Limits(max_message_bytes=1 << 16, max_header_bytes=1 << 10)
NUMBERS = (0, 1, 127, 128, 255, 256, 65535, 65536, (1 << 32) - 1, 1 << 32, (1 << 63) - 1)


class Frozen(msgspec.Struct, frozen=True, array_like=True):
    count: int


class Loose(msgspec.Struct):
    count: int


def new_known():
    from flowrt.transports.native._words import KnownEnvelopes

    return KnownEnvelopes(Message, Tag, Tensor)


def drawn_message(chance: random.Random) -> Message:
    """One of few forms, mostly."""
    tag = Tag(chance.choice(("src@1", "source" * 40)), *(chance.choice(NUMBERS) for _ in range(4)))
    if chance.random() < 0.02:
        tag = Tag("src@1", -1, 0, chance.choice((1 << 63, 5)), 0)
    shape = chance.choice(((8,), (2, 4), (), (0,), (8192,)))
    spec = TensorSpec("uint8", shape)
    tensors = tuple(Tensor(spec, chance.randbytes(spec.nbytes)) for _ in range(chance.choice((0, 1, 1, 1, 2))))
    header = chance.choice((None, None, None, b"\x01", Frozen(chance.randrange(3)), Loose(1), b"", Frozen(1 << 40)))
    return Message(chance.choice(("data", "credit")), chance.choice((tag, tag, None)), chance.choice((0, 5, 1 << 60, -1)), header, tensors)


@pytest.mark.parametrize("seed", range(20))
def test_known_forms_have_the_bytes_of_the_codec(seed: int) -> None:
    chance, known, num_known = random.Random(seed), new_known(), 0
    drawn = [drawn_message(chance) for _ in range(12)]
    for _ in range(500):
        like, sequence = chance.choice(drawn), chance.choice(NUMBERS)
        tag = like.tag and Tag(like.tag.source, *(chance.choice(NUMBERS) for _ in range(4)))
        message = Message(like.kind, tag, like.edge, like.header, like.tensors)
        envelope, _, total = encode_envelope(message, sequence)
        found = known.encode(message, sequence)
        num_known += found is not None
        assert found in (None, (envelope, total))
        learn(known, message, header_bytes(message), envelope, sequence, total)
    assert num_known > 20


def test_a_header_that_may_change_has_no_form() -> None:
    known, header = new_known(), Loose(1)
    message = Message("credit", None, 0, header)
    learn(known, message, header_bytes(message), encode_envelope(message, 0)[0], 0, 0)
    header.count = 2
    assert known.encode(message, 0) is None


def test_an_envelope_that_is_written_otherwise_has_no_form() -> None:
    known, message = new_known(), Message("data", Tag("src@1"), 3)
    envelope = encode_envelope(message, 7)[0]
    learn(known, message, None, envelope.replace(b"\x07", b"\xcc\x07", 1), 7, 0)
    assert known.encode(message, 7) is None
    learn(known, message, None, envelope, 7, 0)
    assert known.encode(message, 7) == (envelope, 0)


async def test_drawn_messages_arrive_as_they_were_sent() -> None:
    chance, key = random.Random(1), secrets.token_bytes(32)
    async with await get_transport("shm").listen("shm://", LIMITS, key, Identity("one")) as listener:
        connecting = get_transport("shm").connect(listener.address, LIMITS, key, Identity("other"))
        one, other = await asyncio.gather(listener.accept(), connecting)
        async with one, other:
            drawn = [drawn_message(chance) for _ in range(12)]
            for _ in range(3000):
                message = drawn_message(chance) if chance.random() < 0.2 else chance.choice(drawn)
                try:
                    encode_envelope(message, 0, LIMITS)
                except (LimitError, InvalidMessageError) as error:
                    with pytest.raises(type(error)):
                        one.send_nowait(message)
                    continue
                await one.send(message)
                found = await other.recv()
                assert (found.kind, found.tag, found.edge, found.header) == (message.kind, message.tag, message.edge, header_bytes(message))
                assert [each.spec for each in found.tensors] == [each.spec for each in message.tensors]
                assert [bytes(each.data) for each in found.tensors] == [each.data for each in message.tensors]
            assert one.statistics().messages_sent == other.statistics().messages_received > 2000
            assert one.statistics().bytes_sent == other.statistics().bytes_received
            known = Message("data", Tag("src@1"), 0, None, (Tensor(TensorSpec("uint8", (8,)), b"12345678"),))
            await one.send(known)
            for data in (b"1234567", "text", None, memoryview(bytearray(16))[::3]):
                with pytest.raises(InvalidMessageError):
                    one.send_nowait(Message("data", known.tag, 0, None, (Tensor(known.tensors[0].spec, data),)))
            await one.send(Message("data", known.tag, 0, None, (Tensor(known.tensors[0].spec, memoryview(bytearray(range(16)))[::2]),)))
            assert bytes((await other.recv()).tensors[0].data) == b"12345678"
            assert bytes((await other.recv()).tensors[0].data) == bytes(range(0, 16, 2))
