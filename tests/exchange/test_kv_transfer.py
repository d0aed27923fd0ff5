"""A KV transfer without processes: chunks go from the pages of a prefill worker to those of a group, or the transfer fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import pytest
import torch

from flowrt.actors.control import KvOffer
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.exchange import kv_transfer
from flowrt.exchange.kv_transfer import ChunkHeader, KvPack, KvUnpack, PullHeader, digest_of
from flowrt.operators.kv_pages import KvPages
from flowrt.transports.wire.message import Tag

LAYERS, TOKENS = 3, 11
Change = Callable[[Payload], Payload]


def pages_of(page_size: int, dtype: torch.dtype = torch.float32, shared_values: bool = False) -> KvPages:
    return KvPages(LAYERS, 16, page_size, 2, 4, dtype, shared_values=shared_values)


class Pair:
    """A prefill worker that holds TOKENS tokens in pages 5, 3, ..., and a group linked with it."""

    def __init__(self, page_sizes: tuple[int, int] = (4, 4), dtype: torch.dtype = torch.float32, shared_values: bool = False) -> None:
        self.held, self.own = (pages_of(size, dtype, shared_values) for size in page_sizes)
        self.held_pages, self.own_pages = ([5, 3, 9, 2, 12, 1][: -(-TOKENS // size)] for size in page_sizes)
        slots = kv_transfer.slots_of(self.held_pages, page_sizes[0], 0, TOKENS)
        for layer in range(LAYERS):
            values = [torch.randn(TOKENS, 2, 4).to(dtype) for _ in self.held.blocks(layer)]
            self.held.write(layer, slots, *values)
        self.pack, self.unpack = KvPack(self.held), KvUnpack(self.own)
        self.pulls: deque[tuple[Tag, Payload]] = deque()
        self.ends: list[tuple[str, int, str]] = []
        self.unpack.connect(
            "g.kv_unpack@1", {"p": "pull0"}, self._emit, lambda *key: self.ends.append((*key, "")), lambda *end: self.ends.append(end)
        )
        self.number = self.pack.offer("a", 0, self.held_pages, TOKENS)
        self.offer = KvOffer("p", "i", self.number, TOKENS)

    def _emit(self, tag: Tag, outputs: Mapping[str, Payload]) -> None:
        self.pulls.append((tag, outputs["pull0"]))

    def begin(self, linked: str = "i") -> None:
        self.unpack.on_joined("p", linked)
        self.unpack.begin("a", 0, self.offer, self.own_pages)

    def respond(self, change: Change = lambda chunk: chunk) -> None:
        """The prefill worker responds to the oldest pull."""
        tag, pull = self.pulls.popleft()
        (outputs,) = self.pack([Firing("p.kv_pack", tag, {"pull": pull})])
        self.unpack.on_chunk(Firing("g.kv_unpack", tag, {"chunk": change(outputs["chunk"])}))

    def run(self) -> None:
        while self.pulls:
            self.respond()

    def is_equal(self) -> bool:
        slots = [kv_transfer.slots_of(pages, each.page_size, 0, TOKENS) for pages, each in self._sides()]
        values = [[each.copy(layer, own) for layer in range(LAYERS)] for (_, each), own in zip(self._sides(), slots, strict=True)]
        return all(torch.equal(a, b) for one, two in zip(*values, strict=True) for a, b in zip(one, two, strict=True))

    def _sides(self) -> list[tuple[list[int], KvPages]]:
        return [(self.held_pages, self.held), (self.own_pages, self.own)]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "CHUNK_BYTES", 256)  # 4 tokens of float32 with keys and values


@pytest.mark.parametrize("page_sizes", [(4, 4), (2, 16), (16, 3)])
@pytest.mark.parametrize(("dtype", "shared_values"), [(torch.float32, False), (torch.bfloat16, True), (torch.float64, True)])
def test_every_token_arrives_between_pages_of_any_size(page_sizes: tuple[int, int], dtype: torch.dtype, shared_values: bool) -> None:
    pair = Pair(page_sizes, dtype, shared_values)
    assert not pair.is_equal()
    pair.begin()
    pair.run()
    assert pair.is_equal()
    assert pair.ends == [("a", 0, "")]


def test_a_transfer_waits_for_few_chunks_at_a_time() -> None:
    pair = Pair()
    pair.begin()
    assert len(pair.pulls) == kv_transfer.WINDOW < LAYERS * 3
    pair.respond()
    assert len(pair.pulls) == kv_transfer.WINDOW
    pair.run()
    assert pair.ends == [("a", 0, "")]


def _with(header: ChunkHeader | None = None, tensors: tuple[torch.Tensor, ...] | None = None) -> Change:
    return lambda chunk: Payload(chunk.tensors if tensors is None else tensors, chunk.header_as(ChunkHeader) if header is None else header)


def _flipped(chunk: Payload) -> Payload:
    return Payload((chunk.tensors[0].neg(), *chunk.tensors[1:]), chunk.header)


WRONG: dict[str, tuple[Change, str]] = {
    "a byte": (_flipped, "its bytes do not match their hash"),
    "keys for values": (lambda chunk: Payload(chunk.tensors[::-1], chunk.header), "its bytes do not match"),
    "fewer tokens": (_with(tensors=(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))), "it has 1 tokens, expected 4"),
    "other heads": (_with(tensors=(torch.zeros(4, 1, 4), torch.zeros(4, 2, 4))), "its rows have another size"),
    "one tensor": (_with(tensors=(torch.zeros(4, 2, 4),)), "its rows have another size"),
    "another request": (_with(ChunkHeader(PullHeader("b", 0, 1, 0, 4))), "not the one that was requested"),
    "another attempt": (_with(ChunkHeader(PullHeader("a", 1, 1, 0, 4))), "not the one that was requested"),
    "another offer": (_with(ChunkHeader(PullHeader("a", 0, 2, 0, 4))), "not the one that was requested"),
    "other tokens": (_with(ChunkHeader(PullHeader("a", 0, 1, 4, 4))), "not the one that was requested"),
    "no header": (lambda chunk: Payload(chunk.tensors, b"\xc1"), "its header cannot be read"),
    "a refusal": (_with(ChunkHeader(PullHeader("a", 0, 1, 0, 4), refusal="the offer has ended")), "the offer has ended"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_chunk_ends_the_transfer(wrong: str) -> None:
    change, text = WRONG[wrong]
    pair = Pair()
    pair.begin()
    pair.respond(change)
    ((request_id, attempt, why),) = pair.ends
    assert (request_id, attempt) == ("a", 0)
    assert why.startswith("p sent a chunk of layer 0 that does not fit: ")
    assert text in why
    pair.run()  # late chunks
    assert len(pair.ends) == 1


def test_a_late_chunk_of_a_dropped_transfer_writes_nothing() -> None:
    pair = Pair()
    pair.begin()
    pair.respond()
    before = [[tensor.clone() for tensor in pair.own.blocks(layer)] for layer in range(LAYERS)]
    pair.unpack.drop_ended(lambda request_id, attempt: False)
    pair.run()
    assert pair.ends == []
    after = [pair.own.blocks(layer) for layer in range(LAYERS)]
    assert all(torch.equal(a, b) for one, two in zip(before, after, strict=True) for a, b in zip(one, two, strict=True))


def test_an_attempt_that_waits_keeps_its_transfer() -> None:
    pair = Pair()
    pair.begin()
    pair.unpack.drop_ended(lambda request_id, attempt: (request_id, attempt) == ("a", 0))
    pair.run()
    assert pair.ends == [("a", 0, "")]


def test_a_transfer_waits_until_the_group_is_linked_with_the_incarnation() -> None:
    pair = Pair()
    pair.begin(linked="older")
    assert not pair.pulls
    pair.unpack.on_lost("p")
    pair.unpack.on_joined("another", "i")
    assert not pair.pulls
    pair.unpack.on_joined("p", "i")
    pair.run()
    assert pair.ends == [("a", 0, "")]


def test_an_error_in_place_of_a_chunk_ends_the_transfer() -> None:
    pair = Pair()
    pair.begin()
    tag, _ = pair.pulls.popleft()
    assert not pair.unpack.on_error(Tag("g.source@1", 0, 0, 0, 0), "of a step")
    assert pair.unpack.on_error(tag, "out of memory")
    assert pair.ends == [("a", 0, "p could not send a chunk of layer 0: out of memory")]


@pytest.mark.parametrize(
    ("pull", "layer", "refusal"),
    [
        (PullHeader("a", 0, 2, 0, 4), 0, "there is no such offer"),
        (PullHeader("a", 1, 1, 0, 4), 0, "there is no such offer"),
        (PullHeader("a", 0, 1, 8, 4), 0, "tokens 8 to 11 are not among the 11 of the offer"),
        (PullHeader("a", 0, 1, -1, 4), 0, "tokens -1 to 2 are not among the 11 of the offer"),
        (PullHeader("a", 0, 1, 0, 0), 0, "tokens 0 to -1 are not among the 11 of the offer"),
        (PullHeader("a", 0, 1, 0, 1 << 62), 0, "are not among the 11 of the offer"),
        (PullHeader("a", 0, 1, 0, 4), LAYERS, "there is no layer 3"),
        (PullHeader("a", 0, 1, 0, 4), -1, "there is no layer -1"),
    ],
)
def test_a_pull_that_fits_no_offer_is_refused(pull: PullHeader, layer: int, refusal: str) -> None:
    pair = Pair()
    (outputs,) = pair.pack([Firing("p.kv_pack", Tag("g.kv_unpack@1", 0, 0, 0, layer), {"pull": Payload((), pull)})])
    header = outputs["chunk"].header_as(ChunkHeader)
    assert refusal in header.refusal
    assert header.pull == pull
    assert [len(tensor) for tensor in outputs["chunk"].tensors] == [0, 0]


def test_an_offer_ends_with_its_attempt() -> None:
    pair = Pair()
    pair.pack.drop("a", 0)
    pair.pack.drop("a", 0)
    pair.begin()
    pair.respond()
    ((_, _, why),) = pair.ends
    assert "there is no such offer" in why
    assert pair.pack.offer("a", 0, [1], 1) != pair.number


def test_the_hash_is_of_all_bytes() -> None:
    one, two = torch.arange(6.0).view(1, 2, 3), torch.zeros(1, 2, 3)
    assert digest_of((one, two)) != digest_of((two, one))
    assert digest_of((one.to(torch.bfloat16),)) == digest_of((one.to(torch.bfloat16).clone(),))
