"""The format of the request log on disk: records in frames, frames in segments. Pure: bytes in, records out, and back.

    segment   frames, the first of which holds a LogHeader alone
    frame     4 bytes FLR2 | number of the frame, 8 bytes | length of the payload, 4 bytes | hash, 8 bytes | payload
    payload   MessagePack: a list of records, each an array that begins with the number of its kind; most are events of clients

Numbers are little-endian. The hash is BLAKE2b of the number, the length and the payload. Frames are numbered over all segments, from a
random number on, so that no client can write a frame of this log into its prompt. What the gateway committed in one decision is in one
frame, so it is there as a whole or not at all. The digit in FLR2 is the version.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from flowrt.actors.front_end_messages import Origin
from flowrt.actors.outputs import ClientEvent, Whole
from flowrt.gateway.request_log import RequestLog
from flowrt.sampling_params import SamplingParams

MAGIC = b"FLR2"
MAX_PAYLOAD = 1 << 28
FRAME_BYTES = 16 << 20  # a larger frame is divided
_HEAD = struct.Struct("<4sQI8s")
_HASHED = struct.Struct("<QI")


class LogHeader(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first record of a segment. `identity`: what the tokens of the log depend on, such as the model, by name."""

    identity: dict[str, str]


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request was admitted with this prompt. `seed` and `max_tokens` are those of `params`, or what the gateway filled in. `has_text`:
    the gateway converts its tokens to text."""

    request: Whole
    prompt_token_ids: tuple[Whole, ...]
    params: SamplingParams
    seed: Whole
    max_tokens: Whole
    has_text: bool
    origin: Origin | None = None


Record = LogHeader | Submitted | ClientEvent

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Record])


class FrameError(Exception):
    """A frame is cut off or damaged, or its records are not those of a request log."""


class VersionError(FrameError):
    """A frame of another version."""


@dataclass(frozen=True)
class FoundFrames:
    """What a segment holds: its frames up to the first that is not whole, which begins at byte `num_valid`. `problem`: of that one; None
    at the end of the segment. `is_torn`: no whole frame follows, as when the writer died. `first`: the number of the first frame."""

    records: list[list[Record]]
    first: int | None
    num_valid: int
    problem: str | None = None
    is_torn: bool = False


def frame_of(number: int, records: Sequence[Record]) -> bytes:
    return framed(number, _encoder.encode(records))


def framed(number: int, payload: bytes) -> bytes:
    return _HEAD.pack(MAGIC, number, len(payload), _hash(number, payload)) + payload


def payloads_of(records: Sequence[Record], bounds: Sequence[int]) -> list[bytes]:
    """The payloads of the frames of these records. More than FRAME_BYTES are divided at `bounds`, which may repeat: the records of one
    decision stay together. Raises OSError for more of these than a frame can have."""
    payload = _encoder.encode(records)
    if len(payload) <= FRAME_BYTES:
        return [payload]
    begins = sorted({at for at in bounds if 0 < at < len(records)})
    if not begins:
        if len(payload) > MAX_PAYLOAD:
            raise OSError(errno.EFBIG, f"one decision takes {len(payload) >> 20} MiB")
        return [payload]
    middle = begins[len(begins) // 2]
    behind = [at - middle for at in begins]
    return payloads_of(records[:middle], begins) + payloads_of(records[middle:], behind)


def submitted_of(log: RequestLog, has_text: bool) -> Submitted:
    return Submitted(log.index, log.prompt_token_ids, log.params, log.seed, log.max_tokens, has_text, log.origin)


def read_frames(data: bytes) -> FoundFrames:
    """The frames of a segment. Raises VersionError for the first one."""
    records: list[list[Record]] = []
    at, first = 0, None
    while at < len(data):
        try:
            number, found, end = _read_frame(data, at)
        except FrameError as error:
            if isinstance(error, VersionError) and not records:
                raise
            later = _later_frames(data, at, None if first is None else first + len(records))
            is_torn = not isinstance(error, VersionError) and not any(later)
            return FoundFrames(records, first, at, str(error), is_torn)
        if first is None:
            first = number
        elif number != first + len(records):
            return FoundFrames(records, first, at, f"frame {number} follows frame {first + len(records) - 1}")
        records.append(found)
        at = end
    return FoundFrames(records, first, at)


def _read_frame(data: bytes, at: int, numbers: Container[int] | None = None) -> tuple[int, list[Record], int]:
    """The number and the records of the frame at this byte, and where it ends. Raises FrameError, also when its number is none of
    `numbers`."""
    if len(data) - at < _HEAD.size:
        raise FrameError("a frame is cut off")
    magic, number, length, digest = _HEAD.unpack_from(data, at)
    if magic[:3] == MAGIC[:3] and magic != MAGIC:
        raise VersionError("it was written by another version of flowrt")
    if magic != MAGIC or length > MAX_PAYLOAD or (numbers is not None and number not in numbers):
        raise FrameError("a frame is damaged")
    begin = at + _HEAD.size
    payload = data[begin : begin + length]
    if len(payload) < length:
        raise FrameError("a frame is cut off")
    if _hash(number, payload) != digest:
        raise FrameError("a frame is damaged")
    try:
        return number, _decoder.decode(payload), begin + length
    except msgspec.MsgspecError as error:
        raise FrameError(f"frame {number} holds no records ({error})") from None


def _later_frames(data: bytes, at: int, number: int | None) -> Iterator[int]:
    """Where whole frames begin behind this byte: what is there was not cut off with a writer's death, but damaged. `number`: of the frame
    there, if it is known. Then only greater ones count: a client can put a frame into its prompt, but does not know the numbers."""
    numbers = None if number is None else range(number + 1, number + 1 + (len(data) - at) // _HEAD.size)
    while (at := data.find(MAGIC, at + 1)) >= 0:
        try:
            _read_frame(data, at, numbers)
        except FrameError:
            continue
        yield at + 1


def _hash(number: int, payload: bytes) -> bytes:
    return blake2b(_HASHED.pack(number, len(payload)) + payload, digest_size=8).digest()
