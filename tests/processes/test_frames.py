"""Frames and descriptors on the connection between the launcher and the fork server."""

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from flowrt.processes.frames import MAX_FRAME_BYTES, Exited, ForkRequest, FrameReader, Loaded, Report, encode, send_blocking

REQUESTS: msgspec.msgpack.Decoder[ForkRequest] = msgspec.msgpack.Decoder(ForkRequest)
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def fork(host: str, num_fds: int) -> ForkRequest:
    return ForkRequest(number=1, host=host, workers=(host,), worker="module:function", threads=1, log_level="info", num_fds=num_fds)


def test_descriptors_belong_to_the_frame_that_announced_them(ends: tuple[socket.socket, socket.socket]) -> None:
    pipes = [os.pipe() for _ in range(3)]
    for number, (read_end, write_end) in enumerate(pipes):
        os.write(write_end, b"%d" % number)
        send_blocking(ends[0], fork(f"w{number}", 2), [read_end, write_end])
        send_blocking(ends[0], fork("none", 0))
    for pipe in pipes:
        for fd in pipe:
            os.close(fd)
    ends[0].close()
    reader = FrameReader(ends[1], REQUESTS)
    received = []
    while reader.feed():
        for request in reader.frames():
            received.append(request)
            if request.num_fds:
                fds = reader.take_fds(request.num_fds)
                assert os.read(fds[0], 10).decode() == request.host[1:]
                assert not any(os.get_inheritable(fd) for fd in fds)
                for fd in fds:
                    os.close(fd)
    assert received == [frame for number in range(3) for frame in (fork(f"w{number}", 2), fork("none", 0))]


def test_frames_split_anywhere(ends: tuple[socket.socket, socket.socket]) -> None:
    reports = [Loaded(num_threads=1), Exited(number=5, status=-9)]
    reader = FrameReader(ends[1], REPORTS)
    received = []
    for byte in b"".join(encode(report) for report in reports):
        ends[0].send(bytes([byte]))
        assert reader.feed()
        received += reader.frames()
    assert received == reports


def test_a_frame_too_large_is_refused_before_it_is_read(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].send((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    reader = FrameReader(ends[1], REQUESTS)
    reader.feed()
    with pytest.raises(ValueError, match="at most"):
        list(reader.frames())


def test_untaken_descriptors_are_closed(ends: tuple[socket.socket, socket.socket]) -> None:
    read_end, write_end = os.pipe()
    send_blocking(ends[0], fork("w", 1), [write_end])
    os.close(write_end)
    reader = FrameReader(ends[1], REQUESTS)
    reader.feed()
    reader.close()
    assert os.read(read_end, 1) == b""  # end of file: no writer is left
    os.close(read_end)
