"""KV transfer: moves the KV of a prompt from the prefill worker that computed it into the pages of a group (xDeepServe section 5.1).

`KvPack` is the function of a `kv_pack` node, in the prefill worker: it keeps the offers and responds to pulls. `KvUnpack` is the sink of
a `kv_unpack` node, in the group: it emits the pulls, a tag each, and writes the chunks that arrive into the group's pages.
docs/kv-transfer.md has the steps, and says who owns a page at each moment.

The group decides when and what it pulls, so no process writes into another's pages. A chunk is some tokens of one layer. It names
the offer and the tokens that it is of, and has a hash of its bytes, which the group computes again from its own pages after it has
written them. Until every chunk has arrived and fits, no step reads these pages. Anything else ends the transfer: the prompt is computed
again.

Legend: T = tokens of a chunk, K = KV heads, D = their width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import xxhash
from torch import Tensor

from flowrt.actors.control import KvOffer
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.operators.kv_pages import KvPages
from flowrt.transports.wire.message import Tag

Outputs = dict[str, Payload]
CHUNK_BYTES = 1 << 20
WINDOW = 8  # chunks that a transfer waits for at a time


class PullHeader(msgspec.Struct, frozen=True, array_like=True):
    """Requests tokens `first` .. `first + num_tokens - 1` of the layer of the tag, of offer `number`."""

    request_id: str
    attempt: int
    number: int
    first: int
    num_tokens: int


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """The response to a pull, which it repeats. `digest`: xxh3_64 of the tensors' bytes. `refusal`: why there is none, and no row."""

    pull: PullHeader
    digest: int = 0
    refusal: str = ""


def digest_of(tensors: Sequence[Tensor]) -> int:
    """A hash of the bytes of these tensors, in their order."""
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
    return found.intdigest()


def slots_of(pages: Sequence[int], page_size: int, first: int, num_tokens: int) -> Tensor:
    """The slots of these tokens of a sequence with these pages, int64[T]."""
    tokens_T = torch.arange(first, first + num_tokens)
    return torch.tensor(pages)[tokens_T // page_size] * page_size + tokens_T % page_size


@dataclass(frozen=True, slots=True)
class _HeldPrompt:
    number: int
    pages: tuple[int, ...]
    num_tokens: int


class KvPack:
    """Offers the KV of prompts in `pages`. Port in: `pull`. Out: `chunk`, the copies of the tokens' KV, [T,K,D] each."""

    def __init__(self, pages: KvPages) -> None:
        self._pages = pages
        self._offers: dict[tuple[str, int], _HeldPrompt] = {}  # by request and attempt
        self._num_offers = 0

    def offer(self, request_id: str, attempt: int, pages: Sequence[int], num_tokens: int) -> int:
        """Respond to pulls of this KV until `drop`. Returns the number of the offer."""
        self._num_offers += 1
        self._offers[request_id, attempt] = _HeldPrompt(self._num_offers, tuple(pages), num_tokens)
        return self._num_offers

    def drop(self, request_id: str, attempt: int) -> None:
        """The pages are about to be free. No-op without an offer."""
        self._offers.pop((request_id, attempt), None)

    def __call__(self, firings: Sequence[Firing]) -> list[Outputs]:
        return [{"chunk": self._chunk(firing.tag.layer, firing.inputs["pull"].header_as(PullHeader))} for firing in firings]

    def _chunk(self, layer: int, pull: PullHeader) -> Payload:
        key = (pull.request_id, pull.attempt)
        offer = self._offers.get(key)
        refusal = self._refusal(offer, layer, pull)
        if offer is not None and not refusal:
            slots_T = slots_of(offer.pages, self._pages.page_size, pull.first, pull.num_tokens)
            tensors = tuple(tensor.cpu() for tensor in self._pages.copy(layer, slots_T))
            if self._offers.get(key) is offer:  # this may run beside the loop, which drops offers
                return Payload(tensors, ChunkHeader(pull, digest_of(tensors)))
        nothing = tuple(tensor.cpu() for tensor in self._pages.copy(0, torch.empty(0, dtype=torch.int64)))
        return Payload(nothing, ChunkHeader(pull, refusal=refusal or "the offer has ended"))

    def _refusal(self, offer: _HeldPrompt | None, layer: int, pull: PullHeader) -> str:
        if offer is None or offer.number != pull.number:
            return "there is no such offer"
        if not 0 <= layer < self._pages.num_layers:
            return f"there is no layer {layer}"
        if pull.first < 0 or pull.num_tokens < 1 or pull.first + pull.num_tokens > offer.num_tokens:
            return f"tokens {pull.first} to {pull.first + pull.num_tokens - 1} are not among the {offer.num_tokens} of the offer"
        return ""


@dataclass(eq=False, slots=True)
class _Transfer:
    """`waiting`: the chunks that are not requested yet, (layer, first token, number of tokens) each."""

    key: tuple[str, int]  # request and attempt
    kv: KvOffer
    pages: tuple[int, ...]
    waiting: deque[tuple[int, int, int]]
    outstanding: set[int] = field(default_factory=set)  # steps of its pulls


class KvUnpack:
    """Pulls KV into `pages`. `connect` it before its first use.

    All methods run on the loop of the worker, between the steps that its engine decides. So when a transfer is dropped, nothing is written
    to its pages any more.
    """

    def __init__(self, pages: KvPages) -> None:
        self._pages = pages
        self._chunk_tokens = max(1, CHUNK_BYTES // sum(tensor[0, 0].nbytes for tensor in pages.blocks(0)))
        self._transfers: dict[tuple[str, int], _Transfer] = {}  # by request and attempt
        self._by_step: dict[int, tuple[_Transfer, int, PullHeader]] = {}  # outstanding pulls, with their layers
        self._num_pulls = 0
        self._linked: dict[str, str] = {}  # prefill worker -> the incarnation that this group is linked with

    def connect(
        self,
        source: str,
        ports: Mapping[str, str],
        emit: Callable[[Tag, Mapping[str, Payload]], None],
        on_pulled: Callable[[str, int], None],
        on_failed: Callable[[str, int, str], None],
    ) -> None:
        """`source`: that of the tags. `ports`: prefill worker -> output port. `on_pulled` and `on_failed` take the request and the attempt
        of a transfer that has ended, and why it failed; one that is dropped ends without a call."""
        self._source, self._ports, self._emit, self._on_pulled, self._on_failed = source, ports, emit, on_pulled, on_failed

    def on_joined(self, worker: str, incarnation: str) -> None:
        """The group is linked with this incarnation of a worker. Transfers from it begin."""
        if worker in self._ports:
            self._linked[worker] = incarnation
            for transfer in list(self._transfers.values()):
                self._request(transfer)

    def on_lost(self, worker: str) -> None:
        """The link to the worker has ended. The transfers from it wait for `drop`, as the gateway moves their requests."""
        self._linked.pop(worker, None)

    def begin(self, request_id: str, attempt: int, kv: KvOffer, pages: Sequence[int], first_token: int = 0) -> None:
        """Pull the KV of a prompt from `first_token` on into these pages. It waits for a worker that is not linked yet."""
        key, num_tokens, size = (request_id, attempt), kv.num_tokens, self._chunk_tokens
        starts = range(first_token, num_tokens, size)
        chunks = deque((layer, first, min(size, num_tokens - first)) for layer in range(self._pages.num_layers) for first in starts)
        transfer = self._transfers[key] = _Transfer(key, kv, tuple(pages), chunks)
        self._request(transfer)

    def drop_ended(self, is_pulling: Callable[[str, int], bool]) -> None:
        """Drop the transfers of attempts for which `is_pulling` is false: their pages are, or will be, those of others."""
        for key in [key for key in self._transfers if not is_pulling(*key)]:
            self._drop(key)

    def on_chunk(self, firing: Firing) -> None:
        """Handle the response to a pull."""
        transfer, layer, pull = self._by_step.pop(firing.tag.step, (None, 0, None))
        if transfer is None or pull is None:
            return  # dropped
        transfer.outstanding.discard(firing.tag.step)
        if fault := self._write(transfer, layer, pull, firing):
            self._fail(transfer, f"{transfer.kv.worker} sent a chunk of layer {layer} that does not fit: {fault}")
        elif transfer.waiting or transfer.outstanding:
            self._request(transfer)
        else:
            self._drop(transfer.key)
            self._on_pulled(*transfer.key)

    def on_error(self, tag: Tag, error: str) -> bool:
        """Handle an error in place of a chunk. False: the tag is not that of a pull."""
        if tag.source != self._source:
            return False
        transfer, layer, _ = self._by_step.pop(tag.step, (None, 0, None))
        if transfer is not None:
            transfer.outstanding.discard(tag.step)
            self._fail(transfer, f"{transfer.kv.worker} could not send a chunk of layer {layer}: {error}")
        return True

    def _fail(self, transfer: _Transfer, why: str) -> None:
        self._drop(transfer.key)
        self._on_failed(*transfer.key, why)

    def _write(self, transfer: _Transfer, layer: int, pull: PullHeader, firing: Firing) -> str:
        """Write a chunk into the pages. Returns what is wrong with it; then what was written is never read."""
        payload: Payload = firing.inputs["chunk"]
        try:
            header = payload.header_as(ChunkHeader)
        except msgspec.DecodeError as error:
            return f"its header cannot be read: {error}"
        if header.refusal:
            return header.refusal
        if header.pull != pull or firing.tag.layer != layer:
            return "it is not the one that was requested"
        if [tensor.shape[1:] for tensor in payload.tensors] != [tensor.shape[2:] for tensor in self._pages.blocks(layer)]:
            return "its rows have another size"
        if any(len(tensor) != pull.num_tokens for tensor in payload.tensors):
            return f"it has {len(payload.tensors[0])} tokens, expected {pull.num_tokens}"
        slots_T = slots_of(transfer.pages, self._pages.page_size, pull.first, pull.num_tokens)
        self._pages.write(layer, slots_T, *payload.tensors)
        # The sender can still write into the message, but not into the pages.
        return "" if digest_of(self._pages.copy(layer, slots_T)) == header.digest else "its bytes do not match their hash"

    def _request(self, transfer: _Transfer) -> None:
        """Emit the next pulls of a transfer whose worker is linked."""
        kv = transfer.kv
        while self._linked.get(kv.worker) == kv.incarnation and transfer.waiting and len(transfer.outstanding) < WINDOW:
            layer, first, num_tokens = transfer.waiting.popleft()
            step = self._num_pulls
            self._num_pulls += 1
            header = PullHeader(*transfer.key, kv.number, first, num_tokens)
            self._by_step[step] = (transfer, layer, header)
            transfer.outstanding.add(step)
            self._emit(Tag(self._source, 0, 0, step, layer), {self._ports[kv.worker]: Payload((), header)})

    def _drop(self, key: tuple[str, int]) -> None:
        for step in self._transfers.pop(key).outstanding:
            del self._by_step[step]
