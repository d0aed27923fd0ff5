"""The cuda transport: its host side with a simulated driver, and the whole transport where there is a GPU."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.transports.conformance import channel_checks as checks
from flowrt.transports.conformance.connection_checks import CONNECTION_CHECKS, HERE, THERE, pair_maker
from flowrt.transports.conformance.kit import (
    Check,
    Header,
    carry_one,
    check_numbered,
    numbered,
    opened,
    pattern,
    until,
    until_waiting,
    within,
)
from flowrt.transports.conformance.process_checks import PROCESS_CHECKS, other_process
from flowrt.transports.contract import Limits
from flowrt.transports.cuda import driver as cuda_driver
from flowrt.transports.cuda.driver import HANDLE_BYTES, Driver, DriverError
from flowrt.transports.cuda.memory import ALIGNMENT, Ranges, device_pointer
from flowrt.transports.cuda.transport import _AREA_KIND, _FRAME, _GIVEN_BACK_KIND, _START, CUDAChannel, _DeviceHeader
from flowrt.transports.errors import BrokenChannelError, InvalidMessageError, LimitError
from flowrt.transports.registry import get_transport, unavailable_reason
from flowrt.transports.wire.message import Message, Tag, Tensor, TensorSpec

LIMITS = Limits(max_message_bytes=1 << 20, capacity_messages=8, capacity_bytes=1 << 18)


class HostDriver(Driver):
    """A device whose memory is the host's. Work is done at once, but passes a fence only while `passing`."""

    def __init__(self) -> None:
        self.memory: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.opened: list[int] = []
        self.fences: set[object] = set()
        self.passing = True
        self.can_open = True

    def allocate(self, nbytes: int) -> int:
        if nbytes > 1 << 30:
            raise DriverError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")
        memory = ctypes.create_string_buffer(nbytes + ALIGNMENT)
        pointer = ctypes.addressof(memory) + -ctypes.addressof(memory) % ALIGNMENT
        self.memory[pointer] = memory
        return pointer

    def free(self, pointer: int) -> None:
        del self.memory[pointer]

    def export(self, pointer: int) -> bytes:
        assert pointer in self.memory
        return pointer.to_bytes(HANDLE_BYTES, "little")

    def open(self, handle: bytes) -> int:
        if not self.can_open:
            raise DriverError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
        self.opened.append(int.from_bytes(handle, "little"))
        return self.opened[-1]

    def close(self, pointer: int) -> None:
        self.opened.remove(pointer)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def read(self, target: bytearray, source: int) -> None:
        target[:] = ctypes.string_at(source, len(target))

    def write(self, target: int, source: memoryview) -> None:
        ctypes.memmove(target, bytes(source), source.nbytes)

    def wait(self) -> None:
        pass

    def fence(self) -> object:
        mark = object()
        self.fences.add(mark)
        return mark

    def passed(self, fence: object) -> bool:
        if self.passing:
            self.fences.remove(fence)
        return self.passing


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDriver]:
    """Stands in for the GPU; at the end all that was taken of it must be given back."""
    made = HostDriver()
    monkeypatch.setattr(cuda_driver, "Driver", lambda: made)
    monkeypatch.setattr(cuda_driver, "unavailable_reason", lambda: None)
    yield made
    gc.collect()
    assert (made.memory, made.opened, made.fences) == ({}, [], set())


class OnDevice:
    """A buffer of the user's on the device."""

    def __init__(self, driver: HostDriver, data: bytes, **more: Any) -> None:
        self._memory = ctypes.create_string_buffer(data, len(data))
        interface = {"shape": (len(data),), "typestr": "|u1", "data": (ctypes.addressof(self._memory), False), "version": 3}
        self.__cuda_array_interface__ = interface | more


def on_device(driver: HostDriver, number: int, *sizes: int, host_bytes: int = 0) -> Message:
    tensors = [Tensor(TensorSpec("uint8", (size,)), OnDevice(driver, pattern(size, number))) for size in sizes]
    if host_bytes:
        tensors.insert(1, Tensor(TensorSpec("int8", (host_bytes,)), pattern(host_bytes, number + 1)))
    return Message("data", Tag("source@1", step=number), 3, Header(number, ["x"]), tuple(tensors))


def contents(tensor: Tensor) -> bytes:
    interface = getattr(tensor.data, "__cuda_array_interface__", None)
    if interface is None:
        host: Any = tensor.data
        return bytes(host)
    return ctypes.string_at(interface["data"][0], tensor.spec.nbytes) if tensor.spec.nbytes else b""


def check(message: Message, number: int, *sizes: int, host_bytes: int = 0) -> None:
    assert message.tag is not None
    assert (message.kind, message.tag.step, message.edge, message.decode_header(Header)) == ("data", number, 3, Header(number, ["x"]))
    expected = [pattern(size, number) for size in sizes]
    if host_bytes:
        expected.insert(1, pattern(host_bytes, number + 1))
    assert [contents(tensor) for tensor in message.tensors] == expected
    on = [hasattr(tensor.data, "__cuda_array_interface__") for tensor in message.tensors]
    assert on == [index != 1 or not host_bytes for index in range(len(on))]


@asynccontextmanager
async def settled(limits: Limits = LIMITS) -> AsyncIterator[tuple[CUDAChannel, CUDAChannel]]:
    """Both ends once each has opened the other's area."""
    async with opened(pair_maker("cuda"), limits) as (one, two):
        assert isinstance(one, CUDAChannel)
        assert isinstance(two, CUDAChannel)
        for sender, receiver in ((one, two), (two, one)):
            await sender.send(Message("hello"))
            await within(receiver.recv(), "hello")
        yield one, two


async def all_given_back(channel: CUDAChannel) -> None:
    await until(lambda: not channel._ranges._taken, "a range that was let go of is given back")


def test_without_a_gpu_the_reason_names_what_is_missing() -> None:
    reason = unavailable_reason("cuda")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert reason is not None
        assert "NVIDIA GPU and its driver" in reason
        assert "\n" not in reason


@pytest.mark.parametrize("check", checks.CHANNEL_CHECKS, ids=lambda check: check.__name__)
async def test_channel_with_tensors_on_the_host(check: Check, driver: HostDriver) -> None:
    await check(pair_maker("cuda"))


async def test_tensors_on_the_device_arrive_on_the_device(driver: HostDriver, loop_kind: str) -> None:
    async with settled() as (one, two):
        for number, sizes in enumerate([(1,), (0,), (5, 0, 257), (100_000,), (3,) * 10, (1 << 18,)]):
            for sender, receiver in ((one, two), (two, one)):
                await sender.send(on_device(driver, number, *sizes, host_bytes=77))
                message = await within(receiver.recv(), "recv")
                check(message, number, *sizes, host_bytes=77)
                pointers = [device_pointer(tensor) or 0 for tensor in message.tensors]
                assert all(pointer % ALIGNMENT == 0 for pointer in pointers)
            del message
        assert one.host_copies == two.host_copies == 0
        assert one.statistics().bytes_sent == two.statistics().bytes_received == sum((1, 0, 262, 100_000, 30, 1 << 18)) + 6 * 77


async def test_forwarding_what_was_received(driver: HostDriver) -> None:
    async with settled() as (one, two):
        await one.send(on_device(driver, 4, 1000, 20, host_bytes=5))
        await two.send(await within(two.recv(), "recv"))
        check(await within(one.recv(), "recv"), 4, 1000, 20, host_bytes=5)


async def test_a_received_tensor_stays_until_it_is_let_go_of(driver: HostDriver, loop_kind: str) -> None:
    async with settled() as (one, two):
        kept = []
        for number in range(3):
            await one.send(on_device(driver, number, 10_000, 30))
            kept.append(await within(two.recv(), "recv"))
        for number in range(3, 60):
            await one.send(on_device(driver, number, 50_000))
            check(await within(two.recv(), "recv"), number, 50_000)
        assert one.host_copies == 0
        parts = [kept.pop(1).tensors[1]]
        await until(lambda: two.statistics().held_buffers == 3, "only what is referred to is held")
        await one.aclose()
        await two.aclose()
        check(kept[0], 0, 10_000, 30)
        check(kept[1], 2, 10_000, 30)
        assert contents(parts[0]) == pattern(30, 1)
        kept.clear()
        parts.clear()
        assert two.statistics().held_buffers == 0


async def test_receiver_that_holds_everything_blocks_no_sender(driver: HostDriver) -> None:
    async with settled() as (one, two), asyncio.TaskGroup() as group:

        async def send() -> None:
            for number in range(40):
                await one.send(on_device(driver, number, 30_000))

        group.create_task(send())
        kept = [await within(two.recv(), f"message {number}") for number in range(40)]
        assert len(driver.memory) > 10  # most have memory of their own
        for number, message in enumerate(kept):
            check(message, number, 30_000)


async def test_a_range_comes_back_only_when_the_device_is_done(driver: HostDriver, loop_kind: str) -> None:
    async with settled() as (one, two):
        driver.passing = False
        await one.send(on_device(driver, 0, 1000))
        await within(two.recv(), "recv")
        for _ in range(3):
            await carry_one(two, one)
        assert len(one._ranges._taken) == 1
        driver.passing = True
        await all_given_back(one)
        assert not two._polls_device


async def test_letting_go_on_another_thread(driver: HostDriver) -> None:
    async with settled() as (one, two):
        await one.send(on_device(driver, 0, 1000))
        held = [await within(two.recv(), "recv")]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        await all_given_back(one)


async def test_bytes_on_the_device_take_room_in_the_channel(driver: HostDriver) -> None:
    async with settled() as (one, two):
        sent = 0
        while one.send_nowait(on_device(driver, sent, 60_000)):
            sent += 1
        assert sent == 4
        waiting = asyncio.ensure_future(one.send(on_device(driver, sent, 60_000)))
        await until_waiting(one, 1)
        await carry_one(two, one)
        assert not waiting.done()
        for number in range(sent + 1):
            check(await within(two.recv(), "recv"), number, 60_000)
        await within(waiting, "send")


async def test_over_the_host_when_the_area_cannot_be_opened(driver: HostDriver, loop_kind: str) -> None:
    driver.can_open = False
    async with settled() as (one, two):
        for number in range(20):
            await one.send(on_device(driver, number, 50_000, 3, host_bytes=9))
            check(await within(two.recv(), "recv"), number, 50_000, 3, host_bytes=9)
        assert one.host_copies == 20


async def test_a_message_larger_than_the_area_goes_over_the_host(driver: HostDriver) -> None:
    async with settled() as (one, two), asyncio.TaskGroup() as group:
        group.create_task(one.send(on_device(driver, 0, 1 << 20)))
        check(await within(two.recv(), "recv"), 0, 1 << 20)


async def test_what_cannot_be_sent_is_refused_and_takes_nothing(driver: HostDriver) -> None:
    async with settled() as (one, two):
        refused: list[tuple[type[Exception], Message]] = [
            (LimitError, on_device(driver, 0, (1 << 20) + 1)),
            (LimitError, on_device(driver, 0, *[1] * 17)),
            (LimitError, msgspec.structs.replace(on_device(driver, 0, 5), header=bytes(1 << 17))),
            (InvalidMessageError, msgspec.structs.replace(on_device(driver, 0, 5), kind="@data")),
            (InvalidMessageError, Message("x", tensors=(Tensor(TensorSpec("float32", (5,)), OnDevice(driver, bytes(5))),))),
            (InvalidMessageError, Message("x", tensors=(Tensor(TensorSpec("float7", (5,)), OnDevice(driver, bytes(5))),))),
            (InvalidMessageError, Message("x", tensors=(Tensor(TensorSpec("uint8", (4,)), OnDevice(driver, bytes(4), strides=(2,))),))),
            (InvalidMessageError, Message("x", tensors=(Tensor(TensorSpec("uint8", (4,)), OnDevice(driver, bytes(4), mask=1)),))),
        ]
        for kind, message in refused:
            with pytest.raises(kind):
                await one.send(message)
        assert not one._ranges._taken
        await one.send(on_device(driver, 7, 5))
        check(await within(two.recv(), "recv"), 7, 5)


async def test_closing_with_unreceived_messages(driver: HostDriver, loop_kind: str) -> None:
    async with settled() as (one, two):
        for number in range(4):
            await one.send(on_device(driver, number, 20_000))
        await carry_one(two, one)
        await two.aclose()


@pytest.mark.parametrize(
    "frame",
    [
        _FRAME.pack(_GIVEN_BACK_KIND, 8) + _START.pack(0),
        _FRAME.pack(_GIVEN_BACK_KIND, 9) + bytes(9),
        _FRAME.pack(_AREA_KIND, 72) + bytes(72),
        _FRAME.pack(_AREA_KIND, 5) + bytes(5),
        _FRAME.pack(130, 0),
    ],
    ids=["nothing given", "size", "second area", "area's size", "kind"],
)
async def test_invalid_frames_break_the_channel(frame: bytes, driver: HostDriver) -> None:
    async with settled() as (one, two):
        one._write([frame])
        with pytest.raises(BrokenChannelError):
            await within(two.recv(), "recv")
        assert two.statistics().nonsense == 1


FIVE = TensorSpec("uint8", (5,))


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"\xc1",
        _DeviceHeader(None, (FIVE,), (), 0, 256),
        _DeviceHeader(None, (FIVE,), (False,), 0, 0),
        _DeviceHeader(None, (FIVE,), (True,), 0, 0),
        _DeviceHeader(None, (FIVE,), (True,), -1, 256),
        _DeviceHeader(None, (FIVE,), (True,), 1 << 30, 256),
        _DeviceHeader(None, (FIVE,), (True,), (1 << 19) - 255, 256),
        _DeviceHeader(None, (FIVE,) * 17, (True,) * 17, 0, 17 * 256),
        _DeviceHeader(None, (TensorSpec("uint8", (1 << 21,)),), (True,), 0, 1 << 21),
        _DeviceHeader(None, (TensorSpec("uint8", (-5,)),), (True,), 0, 256),
        _DeviceHeader(None, (TensorSpec("float7", (5,)),), (True,), 0, 256),
    ],
    ids=str,
)
async def test_invalid_descriptions_break_the_channel(header: _DeviceHeader | bytes | None, driver: HostDriver) -> None:
    async with settled() as (one, two):
        before = len(driver.memory)
        super(CUDAChannel, one)._transmit(Message("@data", header=header))
        with pytest.raises(BrokenChannelError):
            await within(two.recv(), "recv")
        assert two.statistics().nonsense == 1
        assert len(driver.memory) <= before


async def test_too_little_device_memory_is_reported_to_the_connector(driver: HostDriver) -> None:
    async with await get_transport("cuda").listen("cuda://", Limits(capacity_bytes=1 << 31), bytes(32), HERE) as listener:
        with pytest.raises(Exception, match=r"lower the limits|closed the connection"):
            await get_transport("cuda").connect(listener.address, Limits(capacity_bytes=1 << 31), bytes(32), THERE)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_ranges_never_overlap_and_come_back_whole(steps: list[tuple[bool, int]]) -> None:
    ranges = Ranges(128)
    taken: dict[int, int] = {}
    for give_back, number in steps:
        if give_back and taken:
            start = sorted(taken)[number % len(taken)]
            del taken[start]
            assert ranges.give_back(start)
            assert not ranges.give_back(start)
            continue
        found = ranges.take(number)
        used = {byte for start, size in taken.items() for byte in range(start, start + size)}
        if found is None:
            free = "".join("x" if byte in used else "." for byte in range(128))
            assert max(map(len, free.split("x"))) < number
        else:
            assert 0 <= found <= 128 - number
            assert used.isdisjoint(range(found, found + number))
            taken[found] = number
    for start in taken:
        assert ranges.give_back(start)
    assert ranges.take(128) == 0


# From here on: a real GPU.


class OurTensor:
    """The bytes of a torch tensor on the tests' device, as torch would show those of one on a GPU."""

    def __init__(self, flat: Any) -> None:
        self._flat = flat
        interface = {"shape": tuple(flat.shape), "typestr": "|u1", "data": (flat.data_ptr(), False), "strides": None, "version": 2}
        self.__cuda_array_interface__ = interface


def as_torch_would(data: Any) -> Any:
    import torch

    interface = data.__cuda_array_interface__
    memory = (ctypes.c_char * interface["shape"][0]).from_address(interface["data"][0])
    memory.kept = data  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


async def test_payloads_on_a_device_stay_there(driver: HostDriver, monkeypatch: pytest.MonkeyPatch, loop_kind: str) -> None:
    """From the edge that knows of the transport's device memory to the tensors of the receiving node; other tensors go as ever."""
    import torch

    from flowrt.dataflow import payload as coding
    from flowrt.dataflow.outbound_edges import OutboundEdges
    from flowrt.dataflow.payload import Payload, from_message
    from flowrt.dataflow.subgraph import RoutedOutput
    from flowrt.graph.model import Edge, Graph, Node, PortSpec

    first, host, last = torch.arange(12.0).view(3, 4).t(), torch.arange(5), torch.randn(7, 100).bfloat16()
    tensors = (first, host, last, torch.empty(0, 3), torch.tensor(2.5))
    on_gpu = {id(tensor) for tensor in tensors if tensor is not host}
    monkeypatch.setattr(coding, "is_on_device", lambda tensor: id(tensor) in on_gpu)
    monkeypatch.setattr(coding, "device_buffer", OurTensor)
    monkeypatch.setattr(coding, "from_device_buffer", as_torch_would)
    edges = [Edge("a", "x", "b", "x", scheme, transport=scheme, credits=1) for scheme in ("cuda", "shm")]
    posted: list[Message] = []
    graph = Graph.of([Node("a", "ops:a", "p", outputs={"x": PortSpec("x")}), Node("b", "ops:b", "q")], edges)
    outbound_edges = OutboundEdges(
        graph, "p", lambda edge, message: posted.append(message), pytest.fail, pytest.fail, on_device={edges[0].id}
    )
    for edge in edges:
        outbound_edges.take(RoutedOutput(edge, Tag("s"), Payload(tensors)))
    on = [[hasattr(tensor.data, "__cuda_array_interface__") for tensor in message.tensors] for message in posted]
    assert on == [[True, False, True, False, True], [False] * 5]
    async with settled() as (one, two):
        await one.send(posted[0])
        received = from_message(await within(two.recv(), "recv")).tensors
        assert [(got.dtype, got.shape) for got in received] == [(sent.dtype, sent.shape) for sent in tensors]
        assert all(torch.equal(got, sent) for got, sent in zip(received, tensors, strict=True))
        inside = [any(start <= got.data_ptr() < start + len(driver.memory[start]) for start in driver.memory) for got in received]
        assert inside == [True, False, True, False, True]  # aliased, not copied
        del received
        await all_given_back(one)


def torch_message(torch: Any, number: int, tensors: list[Any]) -> Message:
    specs = [TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors]
    return Message("data", Tag("s", step=number), 0, None, tuple(map(Tensor, specs, [each.view(torch.uint8) for each in tensors])))


@pytest.mark.gpu
async def test_a_gpu_echo_through_another_process(loop_kind: str) -> None:
    import torch

    async with other_process("cuda", "echo") as (channel, _):
        for number in range(50):
            tensors = [torch.randn(100, 7, device="cuda"), torch.randn(number * 300, device="cuda").bfloat16()]
            await channel.send(torch_message(torch, number, tensors))
            message = await within(channel.recv(), "echo")
            for sent, got in zip(tensors, message.tensors, strict=True):
                if sent.numel():
                    received = torch.as_tensor(got.data, device="cuda").view(sent.dtype).reshape(sent.shape)
                    assert torch.equal(received, sent)
        assert isinstance(channel, CUDAChannel)
        assert channel.host_copies <= 1  # but the first, if the peer's area was not open yet


@pytest.mark.gpu
async def test_payloads_on_a_gpu_never_pass_the_host() -> None:
    import torch

    from flowrt.dataflow.payload import Payload, from_message, to_device_message

    device = torch.device("cuda")
    async with settled(Limits(capacity_bytes=1 << 22)) as (one, two):
        tensors = (
            torch.randn(100, 7, device=device).t(),
            torch.randn(3, 5).bfloat16(),
            torch.randn(9, device=device).bfloat16(),
            torch.tensor(7, device=device),
        )
        await one.send(to_device_message(Payload(tensors), 0, Tag("s")))
        message = await within(two.recv(), "recv")
        assert [hasattr(tensor.data, "__cuda_array_interface__") for tensor in message.tensors] == [True, False, True, True]
        received = from_message(message, device).tensors
        assert all(tensor.is_cuda for tensor in received)
        assert all(torch.equal(got, sent.to(device)) for got, sent in zip(received, tensors, strict=True))
        assert not any(tensor.is_cuda for tensor in from_message(message).tensors)
        assert one.host_copies == 0
        del message, received
        await all_given_back(one)


@pytest.mark.gpu
async def test_a_tensor_of_a_peer_that_was_killed_stays_readable() -> None:
    import torch

    async with other_process("cuda", "echo") as (channel, peer):
        sent = torch.randn(5000, device="cuda")
        await channel.send(torch_message(torch, 0, [sent]))
        message = await within(channel.recv(), "echo")
        peer.send_signal(signal.SIGKILL)
        with pytest.raises(BrokenChannelError):
            await within(channel.recv(), "recv")
    assert torch.equal(torch.as_tensor(message.tensors[0].data, device="cuda").view(torch.float32), sent)


@pytest.mark.gpu
@pytest.mark.parametrize("transport_check", [*CONNECTION_CHECKS, *PROCESS_CHECKS], ids=lambda found: found.__name__)
async def test_transport_on_a_gpu(transport_check: Check, loop_kind: str) -> None:
    await transport_check("cuda")


@pytest.mark.gpu
async def test_no_memory_of_the_device_is_left() -> None:
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(20):
        async with opened(pair_maker("cuda"), Limits(capacity_bytes=1 << 25)) as (one, two):
            await one.send(numbered(0, 100))
            check_numbered(await within(two.recv(), "recv"), 0, 100)
    assert torch.cuda.mem_get_info()[0] >= free - (1 << 25)
