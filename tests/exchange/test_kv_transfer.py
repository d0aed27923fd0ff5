"""A KV transfer without processes: chunks go from the pages of a prefill worker to those of a group, or the transfer fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import msgspec
import pytest
import torch

from flowrt.actors.control import KvOffer
from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload, by_reference, from_int8_rows, from_reference, with_int8_rows
from flowrt.dataflow.schemas import Spec
from flowrt.engine.offered_prompt import NO_STATE, NO_STEP, OfferedPrompt
from flowrt.exchange import kv_transfer
from flowrt.exchange.kv_headers import ChunkHeader, PullHeader
from flowrt.exchange.kv_transfer import KvPack, KvUnpack
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.kernels.torch.pages import digest_of, scatter_slots
from flowrt.operators.kv_pages import KvPages
from flowrt.transports.wire.message import Tag

LAYERS, TOKENS = 3, 11
RECURRENT = Path(__file__).parents[1] / "simulation/graphs/model-recurrent"
Change = Callable[[Payload], Payload]


INT8_PULL = 7  # id of an edge


def pages_of(page_size: int, dtype: torch.dtype = torch.float32, shared_values: bool = False, int8: bool = False) -> KvPages:
    return KvPages(LAYERS, 16, page_size, 2, 4, dtype, shared_values=shared_values, rope_width=1 if shared_values else 0, int8=int8)


def pages_with_states() -> KvPages:
    """Pages of a model whose layers 0 and 2 are recurrent, and four slots with other states."""
    config = read_model_config(RECURRENT, "float32")
    pages = KvPages.for_model(config, 16, 4, num_slots=4)
    for layer in config.recurrent_layers:
        assert pages.states is not None
        pages.states.block(layer).random_(0, 256)
    return pages


def _parts(pages: KvPages, layer: int, slots: torch.Tensor | slice) -> list[torch.Tensor]:
    return [part[slots] for part in pages.parts(layer)]


class Pair:
    """A prefill worker with TOKENS tokens in pages 5, 3, 4, ..., and a group linked with it. The prompt is complete unless `compute` is
    called first."""

    def __init__(
        self,
        page_sizes: tuple[int, int] = (4, 4),
        dtype: torch.dtype = torch.float32,
        shared_values: bool = False,
        int8: bool = False,
        max_bytes: int = 256,  # 4 tokens of float32 with keys and values
        extras: Mapping[str, Spec] = {},
        states: bool = False,
        kept: bool = False,  # the pages have INT8
    ) -> None:
        self.via = (INT8_PULL,) if int8 else ()
        self.slots = (2, 1) if states else (NO_STATE, NO_STATE)
        self.held, self.own = (pages_with_states() if states else pages_of(size, dtype, shared_values, kept) for size in page_sizes)
        self.held_pages, self.own_pages = ([5, 3, 4, 9, 2, 1][: -(-TOKENS // size)] for size in page_sizes)
        slots = kv_transfer.slots_of(self.held_pages, page_sizes[0], 0, TOKENS)
        for layer in self.held.layers:
            values = [(9 * torch.randn(TOKENS, *part.shape[1:])).to(part.dtype) for part in self.held.parts(layer)]
            scatter_slots(self.held.parts(layer), slots, values)
        self.pack, self.unpack = KvPack(self.held, {INT8_PULL}, max_bytes, extras), KvUnpack(self.own, extras)
        self.emitted: list[dict[str, torch.Tensor]] = []  # extra tensors
        self.pulls: deque[Firing] = deque()  # on their way to the worker
        self.chunks: deque[Firing] = deque()  # and to the group
        self.pack.connect(self._respond)
        self.ends: list[tuple[str, int, str]] = []
        self.unpack.connect(
            "g.kv_unpack@1", {"p": "pull0"}, self._emit, lambda *key: self.ends.append((*key, "")), lambda *end: self.ends.append(end)
        )
        self.offer = KvOffer("p", "i", 1, TOKENS)

    def compute(self, num_committed: int, num_in_step: int = 0, epoch: int = 0, step: int = 0, is_complete: bool = False) -> None:
        """The worker has computed the prompt up to here; a step computes the tokens up to `num_in_step`."""
        running = (epoch, 0, step) if num_in_step else NO_STEP
        pages, end, slot = tuple(self.held_pages), max(num_committed, num_in_step), self.slots[0] if is_complete else NO_STATE
        self.pack.update([OfferedPrompt("a", 0, pages, TOKENS, epoch, num_committed, end, running, is_complete, slot)])

    def complete(self, epoch: int = 0) -> None:
        self.compute(TOKENS, epoch=epoch, is_complete=True)

    def write_layers(self, *layers: int, epoch: int = 0, step: int = 0) -> None:
        """The running step has written the KV of these layers."""
        for layer in layers:
            self.pack.on_written(Firing("p.kv_progress", Tag("p.source@1", epoch, 0, step, layer), {}))

    def _respond(self, firing: Firing, outputs: Mapping[str, Payload]) -> None:
        chunk = with_int8_rows(outputs["chunk"]) if self.via else outputs["chunk"]  # as the edge does
        chunk = from_reference(by_reference(chunk, 0, firing.tag))
        self.chunks.append(Firing("g.kv_unpack", firing.tag, {"chunk": chunk}))

    def _emit(self, tag: Tag, outputs: Mapping[str, Payload]) -> None:
        if "pull0" not in outputs:
            return self.emitted.append({name: payload.tensors[0] for name, payload in outputs.items()})
        self.pulls.append(Firing("p.kv_pack", tag, {"pull": outputs["pull0"]}, self.via))

    def begin(self, linked: str = "i", first_token: int = 0) -> None:
        if not self.pack._offers:
            self.complete()
        self.unpack.on_joined("p", linked)
        self.unpack.begin("a", 0, self.offer, self.own_pages, first_token, self.slots[1])

    def respond(self, change: Change = lambda chunk: chunk) -> None:
        """The oldest message arrives: a chunk if there is one, else a pull."""
        if not self.chunks:
            self.pack.on_pull(self.pulls.popleft())
        if self.chunks:
            firing = self.chunks.popleft()
            chunk = change(firing.inputs["chunk"])
            if self.via:  # as the edge does
                chunk = from_int8_rows(chunk, self.own.keys_GCKD[0].dtype)
            self.unpack.on_chunk(Firing(firing.node, firing.tag, {"chunk": chunk}))

    def finish(self) -> None:
        """All messages arrive, and the transfer has ended well."""
        self.run()
        assert self.ends == [("a", 0, "")]

    def run(self) -> None:
        while self.pulls or self.chunks:
            self.respond()

    def is_equal(self, first: int = 0, layers: int = LAYERS) -> bool:
        slots = [kv_transfer.slots_of(pages, each.page_size, first, TOKENS - first) for pages, each in self._sides()]
        values = [[_parts(each, layer, own) for layer in each.layers[:layers]] for (_, each), own in zip(self._sides(), slots, strict=True)]
        return all(torch.equal(a, b) for one, two in zip(*values, strict=True) for a, b in zip(one, two, strict=True))

    def has_states(self) -> bool:
        assert self.held.states is not None
        assert self.own.states is not None
        pairs = [(self.held.states.block(layer)[self.slots[0]], self.own.states.block(layer)[self.slots[1]]) for layer in (0, 2)]
        return all(torch.equal(*pair) for pair in pairs)

    def _sides(self) -> list[tuple[list[int], KvPages]]:
        return [(self.held_pages, self.held), (self.own_pages, self.own)]


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("page_sizes", [(4, 4), (2, 16), (16, 3)])
@pytest.mark.parametrize(("dtype", "shared_values"), [(torch.float32, False), (torch.bfloat16, True), (torch.float64, True)])
@pytest.mark.parametrize("kept", [False, True])
def test_every_token_arrives_between_pages_of_any_size(
    page_sizes: tuple[int, int], dtype: torch.dtype, shared_values: bool, kept: bool
) -> None:
    pair = Pair(page_sizes, dtype, shared_values, kept=kept)
    assert not pair.is_equal()
    pair.begin()
    pair.run()
    assert pair.is_equal()
    assert pair.ends == [("a", 0, "")]


@pytest.mark.parametrize(("dtype", "shared_values"), [(torch.float32, False), (torch.bfloat16, True)])
def test_what_does_not_depend_on_positions_may_be_int8(dtype: torch.dtype, shared_values: bool) -> None:
    """Each number is within half a step of its row, and a little more where bfloat16 rounds it; keys with positions are exact."""
    pair = Pair(dtype=dtype, shared_values=shared_values, int8=True)
    pair.begin()
    pair.finish()
    for layer in range(LAYERS):
        held, own = (_parts(each, layer, kv_transfer.slots_of(pages, 4, 0, TOKENS)) for pages, each in pair._sides())
        assert torch.equal(held[1], own[1])
        steps = held[0].float().abs().amax(dim=-1, keepdim=True) / 127
        assert 0 < ((held[0].float() - own[0].float()).abs() / steps).max() < (1.1 if dtype is torch.bfloat16 else 0.51)


def test_a_flipped_bit_of_int8_is_found() -> None:
    pair = Pair(int8=True)
    pair.begin()

    def flip(chunk: Payload) -> Payload:
        rows = chunk.tensors[0].clone()
        rows[0, 0, 0] ^= 1
        return Payload((rows, *chunk.tensors[1:]), chunk.header)

    pair.respond(flip)
    assert [why for *_, why in pair.ends] == ["p sent a chunk of layer 0 that does not fit: its bytes do not match their hash"]


@pytest.mark.parametrize("int8", [False, True])
def test_a_copy_that_fails_ends_its_transfer_alone(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise MemoryError("no memory")

    pair = Pair(int8=int8)
    if int8:
        monkeypatch.setattr(kv_transfer, "with_int8_rows", fail)
    else:
        monkeypatch.setattr(pair.pack, "_kernels", SimpleNamespace(gather_slots=fail))
    pair.begin()
    pair.run()
    assert pair.ends == [("a", 0, "p sent no chunk: MemoryError: no memory")]


def test_a_transfer_pulls_as_many_chunks_at_a_time_as_there_are(pair: Pair) -> None:
    pair.begin()
    assert len(pair.pulls) == 1
    pair.respond()
    assert len(pair.pulls) == kv_transfer.WINDOW < LAYERS * 3 - 1
    pair.finish()


@pytest.mark.parametrize(("max_bytes", "num_tokens"), [(256, 4), (255, 3), (64, 1), (1, 1)])
def test_a_chunk_has_as_many_tokens_as_its_bytes_allow(max_bytes: int, num_tokens: int) -> None:
    pair = Pair(max_bytes=max_bytes)
    pair.begin()
    sizes = list[int]()
    while pair.pulls or pair.chunks:
        pair.respond(lambda chunk: sizes.append(len(chunk.tensors[0])) or chunk)  # type: ignore[func-returns-value]
    assert pair.ends == [("a", 0, "")]
    assert max(sizes) == num_tokens
    assert sum(sizes) == LAYERS * TOKENS


@pytest.mark.parametrize("first", [0, 4, 8])
def test_kv_moves_while_the_prompt_is_computed(first: int, pair: Pair) -> None:
    """Layer by layer of a running step, and each layer in the order of its tokens; the last chunk when the prompt is complete."""
    pair.compute(0, 6)
    pair.begin(first_token=first)
    pair.run()
    assert not any(pair.unpack._transfers["a", 0].outstanding for _ in pair.pulls), "the pull waits in the worker"
    for layer in range(LAYERS):
        pair.write_layers(layer)
        pair.run()
        received = [max(6, first) if each <= layer else first for each in range(LAYERS)]
        assert pair.unpack._transfers["a", 0].received == received
    pair.compute(6, TOKENS, step=1)
    pair.write_layers(*range(LAYERS), step=0)  # late, of the step before
    pair.run()
    assert pair.unpack._transfers["a", 0].received == [max(6, first)] * LAYERS
    pair.write_layers(*range(LAYERS), step=1)
    pair.run()
    assert pair.unpack._transfers["a", 0].received[:-1] == [TOKENS] * (LAYERS - 1)
    assert pair.ends == [], "the step may be rolled back"
    pair.complete()
    pair.finish()
    assert pair.is_equal(first)


def test_a_roll_back_makes_the_chunks_of_its_steps_void(pair: Pair) -> None:
    pair.compute(4, TOKENS)
    pair.begin()
    pair.run()
    for layer in range(LAYERS):  # what the step computes is wrong
        scatter_slots(pair.held.parts(layer), kv_transfer.slots_of(pair.held_pages, 4, 8, 3), [torch.full((3, 2, 4), 7.0)] * 2)
    pair.write_layers(0, 1)
    pair.run()
    assert pair.unpack._transfers["a", 0].received == [TOKENS, TOKENS, 4]
    pair.compute(4, TOKENS, epoch=1, step=1)
    pair.write_layers(0, 1, 2, epoch=0)  # late, of the step that was rolled back
    pair.run()
    assert pair.unpack._transfers["a", 0].epoch == 0, "there is nothing to send in the new epoch"
    for layer in range(LAYERS):
        scatter_slots(pair.held.parts(layer), kv_transfer.slots_of(pair.held_pages, 4, 8, 3), [torch.full((3, 2, 4), 5.0)] * 2)
    pair.write_layers(0, 1, 2, epoch=1, step=1)
    pair.complete(epoch=1)
    pair.finish()
    assert pair.is_equal()


@pytest.mark.parametrize("roll_backs", [1, 2])
def test_what_a_roll_back_made_void_is_sent_again_when_more_is_committed_by_then(roll_backs: int, pair: Pair) -> None:
    """The next pull arrives after the tokens were computed again, or after a second roll back."""
    pair.compute(4, 8)
    pair.begin()
    pair.write_layers(0, 1)
    while pair.unpack._transfers["a", 0].received != [8, 8, 4]:
        pair.respond()
    assert pair.pulls
    for epoch in range(1, roll_backs + 1):
        pair.compute(3 + epoch, epoch=epoch)
        pair.compute(4 + epoch, epoch=epoch)
    pair.complete(epoch=roll_backs)
    pair.finish()
    assert pair.is_equal()


def test_a_late_chunk_of_an_older_epoch_ends_the_transfer(pair: Pair) -> None:
    pair.compute(8, epoch=1)
    pair.begin()
    pair.respond()
    pair.respond(lambda chunk: Payload(chunk.tensors, msgspec.structs.replace(chunk.header_as(ChunkHeader), epoch=0)))
    ((_, _, why),) = pair.ends
    assert "it is of epoch 0, which epoch 1 has made void" in why


def test_pulls_that_wait_are_refused_when_the_offer_ends(pair: Pair) -> None:
    """Their credits come back, and the group begins a new attempt."""
    pair.compute(0, TOKENS)
    pair.begin()
    pair.run()
    assert not pair.chunks
    pair.pack.update([])
    pair.run()
    assert pair.ends == [("a", 0, "p sent no chunk: the offer has ended")]


def test_an_offer_whose_pages_have_changed_is_another_one(pair: Pair) -> None:
    pair.compute(4)
    pair.begin()
    pair.run()
    pair.held_pages = pair.held_pages[::-1]
    pair.complete()
    pair.run()
    assert pair.ends == [("a", 0, "p sent no chunk: the offer has ended")]
    assert pair.pack.number_of("a", 0) == 2


def _with(tensors: tuple[torch.Tensor, ...]) -> Change:
    return lambda chunk: Payload(tensors, chunk.header)


def _header(**changes: object) -> Change:
    return lambda chunk: Payload(chunk.tensors, msgspec.structs.replace(chunk.header_as(ChunkHeader), **changes))


def _flipped(chunk: Payload) -> Payload:
    return Payload((chunk.tensors[0].neg(), *chunk.tensors[1:]), chunk.header)


WRONG: dict[str, tuple[Change, str]] = {
    "a byte": (_flipped, "its bytes do not match their hash"),
    "keys for values": (lambda chunk: Payload(chunk.tensors[::-1], chunk.header), "its bytes do not match"),
    "fewer rows": (_with((torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))), "it has 1 tokens, expected 4"),
    "other heads": (_with((torch.zeros(4, 1, 4), torch.zeros(4, 2, 4))), "its rows have another size"),
    "one tensor": (_with((torch.zeros(4, 2, 4),)), "its rows have another size"),
    "another request": (_header(pull=PullHeader("b", 0, 1)), "not of the offer that was requested"),
    "another attempt": (_header(pull=PullHeader("a", 1, 1)), "not of the offer that was requested"),
    "another offer": (_header(pull=PullHeader("a", 0, 2)), "not of the offer that was requested"),
    "another layer": (_header(layer=LAYERS), "not of the offer that was requested"),
    "later tokens": (_header(first=4), "tokens 4 to 7 do not follow token -1"),
    "no tokens": (_header(num_tokens=0), "tokens 0 to -1 do not follow"),
    "more tokens": (_header(num_tokens=5), "it has 4 tokens, expected 5"),
    "the last too soon": (_header(is_last=True), "it is the last one"),
    "no header": (lambda chunk: Payload(chunk.tensors, b"\xc1"), "its header cannot be read"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_chunk_ends_the_transfer(wrong: str) -> None:
    change, text = WRONG[wrong]
    pair = Pair()
    pair.begin()
    pair.respond(change)
    ((request_id, attempt, why),) = pair.ends
    assert (request_id, attempt) == ("a", 0)
    assert why.startswith("p sent a chunk")
    assert text in why
    pair.run()  # late chunks
    assert len(pair.ends) == 1


def test_a_late_chunk_of_a_dropped_transfer_writes_nothing(pair: Pair) -> None:
    pair.begin()
    pair.respond()
    before = [[tensor.clone() for tensor in pair.own.blocks(layer)] for layer in range(LAYERS)]
    assert pair.unpack.is_waiting_for("p")
    pair.unpack.drop_ended(lambda request_id, attempt: False)
    assert not pair.unpack.is_waiting_for("p"), "its worker may stand still: the link to it is not probed"
    pair.run()
    assert pair.ends == []
    after = [pair.own.blocks(layer) for layer in range(LAYERS)]
    assert all(torch.equal(a, b) for one, two in zip(before, after, strict=True) for a, b in zip(one, two, strict=True))


def test_an_attempt_that_waits_keeps_its_transfer(pair: Pair) -> None:
    pair.begin()
    pair.unpack.drop_ended(lambda request_id, attempt: (request_id, attempt) == ("a", 0))
    pair.finish()


def test_a_transfer_waits_until_the_group_is_linked_with_the_incarnation(pair: Pair) -> None:
    pair.begin(linked="older")
    assert not pair.pulls
    pair.unpack.on_lost("p")
    pair.unpack.on_joined("another", "i")
    assert not pair.pulls
    pair.unpack.on_joined("p", "i")
    pair.finish()


def test_an_error_in_place_of_a_chunk_ends_the_transfer(pair: Pair) -> None:
    pair.begin()
    tag = pair.pulls.popleft().tag
    assert not pair.unpack.on_error(Tag("g.source@1", 0, 0, 0, 0), "of a step")
    assert pair.unpack.on_error(tag, "out of memory")
    assert pair.ends == [("a", 0, "p could not send a chunk: out of memory")]


@pytest.mark.parametrize(
    ("pull", "source", "refusal"),
    [
        (PullHeader("a", 0, 2), "g", "there is no such offer"),
        (PullHeader("a", 1, 1), "g", "there is no such offer"),
        (PullHeader("a", 0, 1, -1), "g", "token -1 is not among the 11 of the offer"),
        (PullHeader("a", 0, 1, TOKENS), "g", "token 11 is not among the 11 of the offer"),
        (PullHeader("a", 0, 1, 4), "g", "g.kv_unpack@1 pulls the offer from token 0 on"),
        (PullHeader("a", 0, 1), "h", "g.kv_unpack@1 pulls the offer from token 0 on"),
    ],
)
def test_a_pull_that_fits_no_offer_is_refused(pull: PullHeader, source: str, refusal: str, pair: Pair) -> None:
    pair.begin()
    pair.respond()
    pair.chunks.clear()
    pair.pack.on_pull(Firing("p.kv_pack", Tag(f"{source}.kv_unpack@1", 0, 0, 0, 0), {"pull": Payload((), pull)}))
    (firing,) = pair.chunks
    header = firing.inputs["chunk"].header_as(ChunkHeader)
    assert refusal in header.refusal
    assert header.pull == pull
    assert [len(tensor) for tensor in firing.inputs["chunk"].tensors] == [0, 0]


def test_an_offer_ends_with_its_attempt(pair: Pair) -> None:
    pair.complete()
    pair.pack.update([])
    pair.unpack.on_joined("p", "i")
    pair.unpack.begin("a", 0, pair.offer, pair.own_pages)
    pair.respond()
    ((_, _, why),) = pair.ends
    assert "there is no such offer" in why


def test_the_hash_is_of_all_bytes() -> None:
    one, two = torch.arange(6.0).view(1, 2, 3), torch.zeros(1, 2, 3)
    assert digest_of((one, two)) != digest_of((two, one))
    assert digest_of((one.to(torch.bfloat16),)) == digest_of((one.to(torch.bfloat16).clone(),))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("first_token", [0, 4])
def test_the_states_of_recurrent_layers_arrive_whole(int8: bool, first_token: int) -> None:
    """In several chunks, whatever the first token is that the group lacks; other slots keep their states."""
    pair = Pair(int8=int8, states=True)
    assert pair.own.states is not None
    others = [pair.own.states.block(layer)[[0, 2, 3]].clone() for layer in (0, 2)]
    pair.begin(first_token=first_token)
    pair.finish()
    assert pair.has_states()
    assert int8 or pair.is_equal(first_token)
    assert all(torch.equal(pair.own.states.block(layer)[[0, 2, 3]], other) for layer, other in zip((0, 2), others, strict=True))


def test_no_state_moves_before_the_prompt_is_committed() -> None:
    """A rollback of the prefill worker makes tokens void, and no state."""
    pair = Pair(states=True)
    pair.compute(4, 8)
    pair.write_layers(0, 1, 2)
    pair.begin()
    pair.run()
    assert pair.ends == []
    assert not pair.has_states()
    pair.compute(4, 11, epoch=1)
    pair.write_layers(0, 1, epoch=1)
    pair.run()
    assert not pair.has_states()
    pair.complete(epoch=1)
    pair.finish()
    assert pair.has_states()
    assert pair.is_equal()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state[1:], "bytes of a state, expected"),
        (lambda state: state ^ 1, "do not match their hash"),
    ],
)
def test_a_state_that_does_not_fit_ends_its_transfer(change: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    pair = Pair(states=True)

    def changed(chunk: Payload) -> Payload:
        *rows, state = chunk.tensors
        return Payload((*rows, change(state)), chunk.header) if len(state) else chunk

    pair.begin()
    while pair.pulls or pair.chunks:
        pair.respond(changed)
    ((*_, why),) = pair.ends
    assert text in why
