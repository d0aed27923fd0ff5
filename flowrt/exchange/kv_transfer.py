"""KV transfer: moves the KV of a prompt from the prefill worker that computes it into the pages of a group (xDeepServe section 5.1).

`KvPack` is the sink of a `kv_pack` node, in the prefill worker: it keeps the offers and responds to pulls. `KvUnpack` is the sink of
a `kv_unpack` node, in the group: it emits the pulls, a tag each, and writes the chunks that arrive into the group's pages.
docs/kv-transfer.md has the steps, and says who owns a page at each moment.

The group decides when it pulls, so no process writes into another's pages. A pull requests the next chunk of an offer, some tokens of one
layer. The worker chooses it among those that are computed, and keeps the pull while there is none: so KV moves while the worker still
computes the prompt, layer by layer and step by step. Each layer's tokens move in their order.

Fail closed:
- A chunk names the offer, its layer and tokens, and has a hash of its bytes. The group computes the hash again from its own pages.
- A chunk of a step that runs may be void, as the step may be rolled back. A chunk names the worker's epoch and the tokens that were
  committed when it began. At the first chunk of a newer epoch, the group forgets the tokens behind them; the worker sends them again.
- Of a recurrent layer the state behind the prompt moves, as bytes, when the prompt is complete and committed.
- The last chunk is sent when the prompt is complete and committed. Until it has arrived and all tokens of all layers with it, no step
  reads the pages. Anything else ends the transfer: the prompt is computed again.
- The last chunk also has the extra tensors of the prompt (extra_tensors.py) and their hash. The group emits them once all of it is checked.

Legend: T = tokens of a chunk, K = KV heads, D = their width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch
from torch import Tensor

from flowrt.actors.control import KvOffer
from flowrt.actors.link_plan import KV_CHUNK_BYTES
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload, from_int8_rows, with_int8_rows
from flowrt.dataflow.schemas import Spec
from flowrt.engine.offered_prompt import NO_STATE, OfferedPrompt
from flowrt.errors import error_text
from flowrt.exchange.extra_tensors import SentExtras, received
from flowrt.exchange.kv_headers import ChunkHeader, PullHeader
from flowrt.operators.kernels.choice import page_kernels_for
from flowrt.operators.kernels.torch.pages import digest_of
from flowrt.operators.kv_pages import KvPages
from flowrt.transports.wire.message import Tag

WINDOW = 4  # pulls that a transfer has in flight at most; one while the prefill worker has no chunk


def slots_of(pages: Sequence[int], page_size: int, first: int, num_tokens: int) -> Tensor | slice:
    """The slots of these tokens of a sequence with these pages: a slice where the pages follow each other, else int64[T]."""
    begin, end = first // page_size, -(-(first + num_tokens) // page_size)
    if list(pages[begin:end]) == list(range(pages[begin], pages[begin] + end - begin)):
        slot = pages[begin] * page_size + first % page_size
        return slice(slot, slot + num_tokens)
    tokens_T = torch.arange(first, first + num_tokens)
    return torch.tensor(pages)[tokens_T // page_size] * page_size + tokens_T % page_size


class _Units:
    """The units in which a transfer counts what it moves of a layer: tokens of a paged layer, bytes of the state of a recurrent one."""

    def __init__(self, pages: KvPages, max_bytes: int = KV_CHUNK_BYTES) -> None:
        states = pages.states
        self.num_layers, self._max_bytes = pages.num_layers, max_bytes
        self._state_bytes = {} if states is None else dict.fromkeys(states.layers, states.num_bytes)
        self._chunk_tokens = max(1, max_bytes // sum(tensor.shape[2:].numel() * tensor.itemsize for tensor in pages.blocks(0)))

    def is_state(self, layer: int) -> bool:
        return layer in self._state_bytes

    def total(self, layer: int, num_tokens: int) -> int:
        return self._state_bytes.get(layer, num_tokens)

    def totals(self, num_tokens: int) -> list[int]:
        return [self.total(layer, num_tokens) for layer in range(self.num_layers)]

    def of_chunk(self, layer: int) -> int:
        """The most units of a chunk; at least 1."""
        return self._max_bytes if self.is_state(layer) else self._chunk_tokens

    def beginning(self, first: int) -> list[int]:
        """Where a transfer of the tokens from `first` on begins, by layer."""
        return [0 if self.is_state(layer) else first for layer in range(self.num_layers)]

    def rolled_back(self, moved: Sequence[int], first: int, num_committed: int) -> list[int]:
        """What is valid of the `moved` units after a rollback. A state is moved behind a prompt that is committed."""
        return [each if self.is_state(layer) else max(first, min(each, num_committed)) for layer, each in enumerate(moved)]


@dataclass(eq=False, slots=True)
class _PromptOffer:
    """`num_written`: layers of the running step whose KV is in the pages. `sent`: by layer, the first unit that is not sent; none before
    the first pull, whose tokens begin at `first` and have the source `puller`. `num_valid`: the lowest number of committed tokens at the
    roll backs since the last chunk of an earlier epoch; `is_epoch_known`: a chunk of this epoch was sent. `waiting`: pulls without a
    response."""

    number: int
    prompt: OfferedPrompt
    units: _Units
    num_written: int = 0
    first: int = 0
    puller: str = ""
    sent: list[int] = field(default_factory=list)
    num_valid: int = 0
    is_epoch_known: bool = True
    waiting: deque[tuple[Firing, PullHeader]] = field(default_factory=deque)

    def advance(self, prompt: OfferedPrompt) -> None:
        """The prompt is computed up to here. A new epoch makes what was sent of uncommitted steps void."""
        if prompt.epoch != self.prompt.epoch:
            self.sent = self.units.rolled_back(self.sent, self.first, prompt.num_committed)
            self.num_valid = prompt.num_committed if self.is_epoch_known else min(self.num_valid, prompt.num_committed)
            self.is_epoch_known = False
        if prompt.step != self.prompt.step:
            self.num_written = 0
        self.prompt = prompt

    def next_chunk(self, has_extras: bool) -> tuple[int, int, int, bool] | None:
        """Layer, first unit and number of units of a chunk that can be sent, and whether it is the last; None: none can be. The last one
        waits until the prompt is committed and has its extra tensors."""
        layers = [layer for layer, sent in enumerate(self.sent) if sent < self._num_computed(layer)]
        if not layers:
            return None
        layer = min(layers, key=self.sent.__getitem__)
        first = self.sent[layer]
        end = min(first + self.units.of_chunk(layer), self._num_computed(layer))
        num_left = sum(self.units.totals(self.prompt.num_tokens)) - sum(self.sent)
        is_last = num_left == end - first
        return None if is_last and not (self.prompt.is_complete and has_extras) else (layer, first, end - first, is_last)

    def num_ready(self) -> int:
        size = self.units.of_chunk
        return sum(-(-max(0, self._num_computed(layer) - sent) // size(layer)) for layer, sent in enumerate(self.sent))

    def _num_computed(self, layer: int) -> int:
        if self.units.is_state(layer):
            return 0 if self.prompt.slot == NO_STATE else self.units.total(layer, self.prompt.num_tokens)
        return self.prompt.num_in_step if layer < self.num_written else self.prompt.num_committed


class KvPack:
    """Offers the KV of prompts in `pages`. Port in: `pull`. Out: `chunk`, the copies of the tokens' KV, [T,K,D] each: what does not depend
    on positions first, as INT8 in response to the pulls of the edges `int8_pulls`. `extras`: specs of the extra tensors, which the last
    chunk of a prompt has behind these. `connect` it before its first use.

    All methods run on the loop of the worker: so no page is given to another sequence while it is read.
    """

    def __init__(
        self, pages: KvPages, int8_pulls: Collection[int] = (), max_bytes: int = KV_CHUNK_BYTES, extras: Mapping[str, Spec] = {}
    ) -> None:
        self._pages, self._int8_pulls, self.extras = pages, frozenset(int8_pulls), SentExtras(extras)
        self._units = _Units(pages, max_bytes)
        self._kernels = page_kernels_for(pages.parts(0)[0].device)
        self._no_rows = tuple(torch.empty(0, *part.shape[1:], dtype=part.dtype) for part in pages.parts(0))
        self._no_state = () if pages.states is None else (torch.empty(0, dtype=torch.uint8),)
        self._offers: dict[tuple[str, int], _PromptOffer] = {}  # by request and attempt
        self._num_offers = 0

    def connect(self, respond: Callable[[Firing, Mapping[str, Payload]], None]) -> None:
        """`respond` sends the outputs of the firing of a pull."""
        self._respond = respond

    def update(self, prompts: Sequence[OfferedPrompt]) -> list[tuple[OfferedPrompt, int]]:
        """Offer these prompts, and end the offers of others: their pages are, or will be, those of other sequences. Returns the prompts
        that are new, with the numbers of their offers."""
        by_key = {(prompt.request_id, prompt.attempt): prompt for prompt in prompts}
        for key, offer in list(self._offers.items()):
            if key not in by_key or by_key[key].pages != offer.prompt.pages:
                del self._offers[key]
                self._refuse_waiting(offer, "the offer has ended")
        new = []
        for key, prompt in by_key.items():
            if key not in self._offers:
                self._num_offers += 1
                self._offers[key] = _PromptOffer(self._num_offers, prompt, self._units)
                new.append((prompt, self._num_offers))
            else:
                self._offers[key].advance(prompt)
                self._serve(self._offers[key])
        return new

    def number_of(self, request_id: str, attempt: int) -> int:
        """The number of this offer."""
        return self._offers[request_id, attempt].number

    def offers(self) -> dict[tuple[str, int], int]:
        """The numbers of all offers, by request and attempt."""
        return {key: offer.number for key, offer in self._offers.items()}

    def leftovers(self) -> list[str]:
        """What is left when all requests have ended."""
        return [f"offer of {key[0]}, attempt {key[1]}" for key in self._offers] + self.extras.leftovers()

    def on_written(self, firing: Firing) -> None:
        """The step of this tag has written the KV of its layer, and of those before it."""
        tag = firing.tag
        for offer in self._offers.values():
            if offer.prompt.step == _step_of(tag):
                offer.num_written = max(offer.num_written, tag.layer + 1)
                self._serve(offer)

    def on_extra(self, name: str, firing: Firing) -> None:
        """The rows of an extra tensor of a step have arrived."""
        self._serve_each(self.extras.add(name, _step_of(firing.tag), firing.inputs["rows"]))

    def on_failed(self, tag: Tag, why: str) -> None:
        """A firing of a step has failed, so its extra tensors may be missing."""
        self._serve_each(self.extras.fail(_step_of(tag), why))

    def _serve_each(self, keys: Sequence[tuple[str, int]]) -> None:
        for offer in [self._offers[key] for key in keys if key in self._offers]:
            self._serve(offer)

    def on_pull(self, firing: Firing) -> None:
        """Respond to a pull, now or when there is a chunk for it."""
        pull = firing.inputs["pull"].header_as(PullHeader)
        offer = self._offers.get((pull.request_id, pull.attempt))
        if offer is None or offer.number != pull.number:
            self._refuse(firing, pull, "there is no such offer")
        elif not 0 <= pull.first < offer.prompt.num_tokens:
            self._refuse(firing, pull, f"token {pull.first} is not among the {offer.prompt.num_tokens} of the offer")
        elif offer.sent and (offer.puller, offer.first) != (firing.tag.source, pull.first):
            self._refuse(firing, pull, f"{offer.puller} pulls the offer from token {offer.first} on")
        else:
            if not offer.sent:
                offer.puller, offer.first = firing.tag.source, pull.first
                offer.sent = self._units.beginning(pull.first)
            offer.waiting.append((firing, pull))
            self._serve(offer)

    def _serve(self, offer: _PromptOffer) -> None:
        key = (offer.prompt.request_id, offer.prompt.attempt)
        extras = self.extras.of(key)
        if offer.prompt.is_complete and (fault := self.extras.fault_of(key, offer.prompt.epoch)):  # else the step may be computed again
            self._refuse_waiting(offer, fault)
        while offer.waiting and (chunk := offer.next_chunk(extras is not None)) is not None:
            (firing, pull), (layer, first, num_tokens, is_last) = offer.waiting.popleft(), chunk
            offer.sent[layer] += num_tokens
            offer.is_epoch_known = True
            prompt, num_ready = offer.prompt, offer.num_ready()
            header = ChunkHeader(pull, layer, first, num_tokens, prompt.epoch, offer.num_valid, num_ready, is_last)
            sent = extras if is_last and extras else ()
            if self._units.is_state(layer):
                payload = self._state_chunk(header, prompt.slot, sent)
            else:
                rows = self._pages.parts(layer), slots_of(prompt.pages, self._pages.page_size, first, num_tokens)
                is_int8 = not self._int8_pulls.isdisjoint(firing.via)
                payload = self._int8_chunk(header, *rows) if is_int8 else self._lent_chunk(header, *rows, sent)
            self._respond(firing, {"chunk": payload})
            if is_last:
                self._refuse_waiting(offer, "the offer has no more chunks")

    def _lent_chunk(self, header: ChunkHeader, parts: Sequence[Tensor], slots_T: Tensor | slice, extras: Sequence[Tensor]) -> Payload:
        like_these = (*[part[: header.num_tokens] for part in parts], *self._no_state, *extras)
        return Payload(like_these, copy_into=partial(self._copy_into, header, parts, slots_T, extras))

    def _copy_into(
        self, header: ChunkHeader, parts: Sequence[Tensor], slots_T: Tensor | slice, extras: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> ChunkHeader:
        try:
            for extra, target in zip(extras, targets[len(parts) + len(self._no_state) :], strict=True):
                target.copy_(extra)
            digest = self._kernels.gather_slots(parts, slots_T, targets[: len(parts)])
            return msgspec.structs.replace(header, digest=digest, extras_digest=digest_of(extras) if extras else 0)
        except Exception as error:  # it ends this transfer, not the worker
            return ChunkHeader(header.pull, refusal=error_text(error))

    def _int8_chunk(self, header: ChunkHeader, parts: Sequence[Tensor], slots_T: Tensor | slice) -> Payload:
        try:
            rows = tuple(torch.empty(header.num_tokens, *part.shape[1:], dtype=part.dtype) for part in parts)
            self._kernels.gather_slots(parts, slots_T, rows)
            payload = with_int8_rows(Payload((*rows, *self._no_state)))
            digest = digest_of(from_int8_rows(payload, parts[0].dtype).tensors[: len(parts)])  # of what the group will have
            return Payload(payload.tensors, msgspec.structs.replace(header, digest=digest))
        except Exception as error:  # it ends this transfer, not the worker
            return self._refusal(header.pull, error_text(error))

    def _state_chunk(self, header: ChunkHeader, slot: int, extras: Sequence[Tensor]) -> Payload:
        """Bytes of the state of a layer, in place of rows."""
        states = self._pages.states
        assert states is not None, header
        state = states.block(header.layer)[slot, header.first : header.first + header.num_tokens].clone()
        header = msgspec.structs.replace(header, digest=digest_of([state]), extras_digest=digest_of(extras) if extras else 0)
        return Payload((*self._no_rows, state, *extras), header)

    def _refuse_waiting(self, offer: _PromptOffer, why: str) -> None:
        while offer.waiting:
            self._refuse(*offer.waiting.popleft(), why)

    def _refuse(self, firing: Firing, pull: PullHeader, why: str) -> None:
        self._respond(firing, {"chunk": self._refusal(pull, why)})

    def _refusal(self, pull: PullHeader, why: str) -> Payload:
        return Payload((*self._no_rows, *self._no_state), ChunkHeader(pull, refusal=why))


def _step_of(tag: Tag) -> tuple[int, int, int]:
    return tag.epoch, tag.micro_batch, tag.step


@dataclass(eq=False, slots=True)
class _Transfer:
    """`received`: by layer, the first unit that has not arrived. `epoch`: that of the latest chunk. `slot`: for the states."""

    key: tuple[str, int]  # request and attempt
    kv: KvOffer
    pages: tuple[int, ...]
    first: int
    slot: int
    units: _Units
    received: list[int]
    epoch: int = -1
    num_ready: int = 1  # chunks that the prefill worker can send now, as far as is known; it sends none that it has not
    outstanding: set[int] = field(default_factory=set)  # steps of its pulls

    @property
    def has_all(self) -> bool:
        return self.received == self.units.totals(self.kv.num_tokens)

    def begin_epoch(self, epoch: int, num_valid: int) -> None:
        """The prefill worker has rolled back: it sends the tokens behind the valid ones again."""
        self.epoch = epoch
        self.received = self.units.rolled_back(self.received, self.first, num_valid)


class KvUnpack:
    """Pulls KV into `pages`. Port in: `chunk`. Out: the pulls, and the extra tensors of a prompt that has arrived. `extras`: their specs.
    `connect` it before its first use.

    All methods run on the loop of the worker, between the steps that its engine decides. So when a transfer is dropped, nothing is written
    to its pages any more.
    """

    def __init__(self, pages: KvPages, extras: Mapping[str, Spec] = {}) -> None:
        self._pages, self._extras, self._kernels = pages, extras, page_kernels_for(pages.parts(0)[0].device)
        self._units = _Units(pages)
        self._transfers: dict[tuple[str, int], _Transfer] = {}  # by request and attempt
        self._by_step: dict[int, tuple[_Transfer, PullHeader]] = {}  # outstanding pulls
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

    def leftovers(self) -> list[str]:
        """What is left when all requests have ended."""
        return [f"transfer of {key[0]}, attempt {key[1]}" for key in self._transfers] + [f"pull {step}" for step in self._by_step]

    def on_joined(self, worker: str, incarnation: str) -> None:
        """The group is linked with this incarnation of a worker. Transfers from it begin."""
        if worker in self._ports:
            self._linked[worker] = incarnation
            for transfer in list(self._transfers.values()):
                self._request(transfer)

    def on_lost(self, worker: str) -> None:
        """The link to the worker has ended. The transfers from it wait for `drop`, as the gateway moves their requests."""
        self._linked.pop(worker, None)

    def is_waiting_for(self, worker: str) -> bool:
        """Whether a pull from this worker has no response yet, and was not cancelled."""
        pulls = (transfer for transfer, _ in self._by_step.values() if transfer.kv.worker == worker)
        return any(self._transfers.get(transfer.key) is transfer for transfer in pulls)

    def begin(self, request_id: str, attempt: int, kv: KvOffer, pages: Sequence[int], first_token: int = 0, slot: int = NO_STATE) -> None:
        """Pull the KV of a prompt from `first_token` on into these pages, and its recurrent states into `slot`. It waits for a worker that
        is not linked yet."""
        key, received = (request_id, attempt), self._units.beginning(first_token)
        transfer = self._transfers[key] = _Transfer(key, kv, tuple(pages), first_token, slot, self._units, received)
        self._request(transfer)

    def drop_ended(self, is_pulling: Callable[[str, int], bool]) -> None:
        """Drop the transfers of attempts for which `is_pulling` is false: their pages are, or will be, those of others."""
        for key in [key for key in self._transfers if not is_pulling(*key)]:
            self._drop(key)

    def on_chunk(self, firing: Firing) -> None:
        """Handle the response to a pull."""
        transfer, pull = self._by_step.pop(firing.tag.step, (None, None))
        if transfer is None or pull is None:
            return  # dropped
        transfer.outstanding.discard(firing.tag.step)
        worker, payload = transfer.kv.worker, firing.inputs["chunk"]
        try:
            header = payload.header_as(ChunkHeader)
        except msgspec.DecodeError as error:
            return self._fail(transfer, f"{worker} sent a chunk that does not fit: its header cannot be read: {error}")
        if header.refusal:
            return self._fail(transfer, f"{worker} sent no chunk: {header.refusal}")
        num_parts = len(self._pages.parts(0)) + (self._pages.states is not None)
        kv, extras = payload.tensors[:num_parts], payload.tensors[num_parts:]
        own, fault = received(self._extras if header.is_last else {}, extras, header.extras_digest)
        if fault := fault or self._write(transfer, pull, header, kv):
            return self._fail(transfer, f"{worker} sent a chunk of layer {header.layer} that does not fit: {fault}")
        if header.is_last:
            self._drop(transfer.key)
            if own:
                device = self._pages.keys_GCKD[0].device
                self._emit(firing.tag, {name: Payload((tensor.to(device),)) for name, tensor in own.items()})
            return self._on_pulled(*transfer.key)
        transfer.num_ready = max(1, header.num_ready)
        self._request(transfer)

    def on_error(self, tag: Tag, error: str) -> bool:
        """Handle an error in place of a chunk. False: the tag is not that of a pull. It ends nothing if the chunk has arrived: then an
        operator has failed that takes an extra tensor."""
        if tag.source != self._source:
            return False
        transfer, _ = self._by_step.pop(tag.step, (None, None))
        if transfer is not None:
            transfer.outstanding.discard(tag.step)
            self._fail(transfer, f"{transfer.kv.worker} could not send a chunk: {error}")
        return True

    def _fail(self, transfer: _Transfer, why: str) -> None:
        self._drop(transfer.key)
        self._on_failed(*transfer.key, why)

    def _write(self, transfer: _Transfer, pull: PullHeader, header: ChunkHeader, tensors: Sequence[Tensor]) -> str:
        """Write a chunk into the pages. Returns what is wrong with it; then what was written is never read."""
        layer, first, num_tokens = header.layer, header.first, header.num_tokens
        if header.pull != pull or not 0 <= layer < len(transfer.received):
            return "it is not of the offer that was requested"
        if header.epoch < transfer.epoch:
            return f"it is of epoch {header.epoch}, which epoch {transfer.epoch} has made void"
        if header.epoch > transfer.epoch:
            transfer.begin_epoch(header.epoch, header.num_valid)
        is_state, total = self._units.is_state(layer), self._units.total(layer, transfer.kv.num_tokens)
        if first != transfer.received[layer] or not 1 <= num_tokens <= total - first:
            what = "byte" if is_state else "token"
            return f"{what}s {first} to {first + num_tokens - 1} do not follow {what} {transfer.received[layer] - 1}"
        write = self._write_state if is_state else self._write_rows
        if fault := write(transfer, header, tensors):
            return fault
        transfer.received[layer] += num_tokens
        return "" if header.is_last == transfer.has_all else f"it is {'' if header.is_last else 'not '}the last one"

    def _write_rows(self, transfer: _Transfer, header: ChunkHeader, tensors: Sequence[Tensor]) -> str:
        parts, num_tokens = self._pages.parts(header.layer), header.num_tokens
        tensors = tensors[: len(parts)]
        if [tensor.shape[1:] for tensor in tensors] != [part.shape[1:] for part in parts]:
            return "its rows have another size"
        if any(len(tensor) != num_tokens for tensor in tensors):
            return f"it has {len(tensors[0])} tokens, expected {num_tokens}"
        slots_T = slots_of(transfer.pages, self._pages.page_size, header.first, num_tokens)
        # The sender can still write into the message, but not into the pages, whose hash this is.
        return "" if self._kernels.scatter_slots(parts, slots_T, tensors) == header.digest else "its bytes do not match their hash"

    def _write_state(self, transfer: _Transfer, header: ChunkHeader, tensors: Sequence[Tensor]) -> str:
        states = self._pages.states
        assert states is not None, header
        own, state = states.block(header.layer)[transfer.slot, header.first :][: header.num_tokens], tensors[-1]
        if len(state) != len(own):
            return f"it has {len(state)} bytes of a state, expected {len(own)}"
        return "" if digest_of([own.copy_(state)]) == header.digest else "its bytes do not match their hash"

    def _request(self, transfer: _Transfer) -> None:
        """Emit the next pulls of a transfer whose worker is linked."""
        kv = transfer.kv
        while self._linked.get(kv.worker) == kv.incarnation and len(transfer.outstanding) < min(WINDOW, transfer.num_ready):
            step = self._num_pulls
            self._num_pulls += 1
            header = PullHeader(*transfer.key, kv.number, transfer.first)
            self._by_step[step] = (transfer, header)
            transfer.outstanding.add(step)
            self._emit(Tag(self._source, 0, 0, step, 0), {self._ports[kv.worker]: Payload((), header)})

    def _drop(self, key: tuple[str, int]) -> None:
        for step in self._transfers.pop(key).outstanding:
            del self._by_step[step]


TransferEnd = KvPack | KvUnpack
