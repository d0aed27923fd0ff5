"""Received payloads: which values may alias memory that the peer can still write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from flowrt.dataflow.parts import FailedHeader
from flowrt.dataflow.payload import INDEX_TYPES, Payload, by_reference, from_message, from_reference, to_message
from flowrt.transports.conformance.connection_checks import pair_maker
from flowrt.transports.contract import Limits
from flowrt.transports.registry import unavailable_reason
from flowrt.transports.wire.message import Message, Tag, Tensor, TensorSpec

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


async def overwritten(scheme: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of ones as received over `scheme`, and after every byte of the transport's memory was written over."""
    one, two = await pair_maker(scheme)(Limits())
    async with one, two:
        await one.send(to_message(Payload((torch.ones(64 << 10, dtype=dtype),)), 0, Tag("source@1")))
        message = await two.recv()
        (received,) = from_message(message).tensors
        before = received.clone()
        shared = memoryview(message.tensors[0].data).cast("B")
        shared[:] = b"\x00" * len(shared)
        return before, received.clone()


@pytest.mark.parametrize(
    ("scheme", "dtype"), [*product(["shm"], INTEGERS + FLOATS), *product(["zmq"], INTEGERS)], ids=lambda value: str(value)
)
async def test_received_index_in_shared_memory_is_copied_and_nothing_else(scheme: str, dtype: torch.dtype) -> None:
    """A peer cannot change it. Floats are large, and nothing computes an address from them; other transports have private memory."""
    if (reason := unavailable_reason(scheme)) is not None:
        pytest.skip(reason)
    before, after = await overwritten(scheme, dtype)
    assert torch.equal(before.double(), torch.ones(64 << 10).double())
    assert torch.equal(after.double(), before.double()) if scheme == "shm" and dtype in INTEGERS else not after.double().any()


def test_integers_that_are_no_indices_are_not_copied() -> None:
    memory = memoryview(bytearray(8))
    message = Message("data", tensors=tuple(Tensor(TensorSpec(dtype, (8,)), memory) for dtype in ("int8", "uint8")))
    rows, indices = from_message(message, index_types=INDEX_TYPES - {"int8"}).tensors
    memory[0] = 1
    assert (int(rows[0]), int(indices[0])) == (1, 0)


@pytest.mark.parametrize("num_tensors", [1, 2])
def test_tensors_pass_by_reference_unless_they_are_lent(num_tensors: int) -> None:
    tensors = tuple(torch.ones(2) for _ in range(num_tensors))

    def copy_into(targets: Sequence[torch.Tensor]) -> FailedHeader:
        for copy, tensor in zip(targets, tensors, strict=True):
            copy.copy_(tensor)
        return FailedHeader("made by the copy")

    for is_lent in (False, True):
        payload = Payload(tensors, copy_into=copy_into if is_lent else None)
        passed = from_reference(by_reference(payload, 0, Tag("source@1")))
        assert (passed.header == FailedHeader("made by the copy")) == is_lent
        assert all((one is other) != is_lent for one, other in zip(passed.tensors, tensors, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(passed.tensors, tensors, strict=True))
