"""Request routing: which worker gets a request, what waits at the gateway, and the estimate of what prefix caches have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from gateway.test_gateway import LIMITS, new_gateway, on_ended, place, token_of
from gateway.test_stages import prefill, pulled, sent_in

from flowrt.actors.control import Ended
from flowrt.errors import GraphError
from flowrt.gateway import routing
from flowrt.gateway.gateway import Gateway
from flowrt.gateway.prefix_index import PIECE_TOKENS, PrefixIndex, digests_of
from flowrt.gateway.routing import RoutingPolicy, WaitingRequest, WorkerStatus, cache_aware, find_policy, round_robin
from flowrt.graph.file import load_graph
from flowrt.graph.settings import ROUTING_POLICIES, LongPrompts

TWO_ACTORS = Path(__file__).resolve().parents[2] / "examples" / "two_actors" / "graph.yaml"
IDLE = WorkerStatus("", max_num_seqs=4, max_num_batched_tokens=100, max_kv_tokens=1000)
PROMPT = WaitingRequest("all", num_prompt_tokens=60, num_choices=1, num_expected_tokens=20)


def workers(**more: Sequence[int]) -> list[WorkerStatus]:
    """Workers a, b, .. with these counts."""
    num_workers = len(next(iter(more.values())))
    return [replace(IDLE, name="abc"[at], **{key: values[at] for key, values in more.items()}) for at in range(num_workers)]


def test_round_robin_gives_each_worker_its_turn() -> None:
    assert round_robin(PROMPT, workers(num_placed=(2, 1, 1))) == "b"
    assert round_robin(PROMPT, workers(num_placed=(0, 0, 0), num_uncomputed_tokens=(5, 5, 0))) == "a"


@pytest.mark.parametrize("stage", ["all", "prefill", "decode"])
def test_equal_workers_take_turns_and_keep_what_their_caches_have(stage: str) -> None:
    request = replace(PROMPT, stage=stage)
    assert cache_aware(request, workers(last_placed=(3, 1, 2))) == "b"
    assert cache_aware(request, workers(num_held_tokens=(1000, 930), last_placed=(0, 1))) == "b", "b has room for the prompt beside others"
    assert cache_aware(request, workers(num_held_tokens=(400, 0), last_placed=(0, 1))) == "a", "both have"
    assert round_robin(request, workers(num_placed=(1, 1, 1), last_placed=(2, 1, 3))) == "b"


@pytest.mark.parametrize("stage", ["all", "decode"])
@pytest.mark.parametrize("policy", [cache_aware, round_robin])
def test_a_full_worker_gets_nothing_while_another_has_a_place(stage: str, policy: RoutingPolicy) -> None:
    request = replace(PROMPT, stage=stage)
    assert policy(request, workers(num_sequences=(4, 1), num_expected_tokens=(8, 600), num_placed=(4, 9))) == "b"
    assert policy(request, workers(num_sequences=(4, 4), num_expected_tokens=(8, 600), num_placed=(4, 9))) == "a", "neither has"


@pytest.mark.parametrize("stage", ["all", "prefill"])
def test_a_prompt_goes_where_its_first_token_comes_soonest(stage: str) -> None:
    request = replace(PROMPT, stage=stage)
    assert cache_aware(request, workers(num_uncomputed_tokens=(50, 30, 30))) == "b"
    assert cache_aware(request, workers(num_uncomputed_tokens=(50, 30), num_cached_tokens=(48, 0))) == "a"
    assert cache_aware(request, workers(num_uncomputed_tokens=(90, 30), num_cached_tokens=(48, 0))) == "b"
    assert cache_aware(request, workers(num_sequences=(2, 1))) == "b"


def test_a_prompt_waits_when_every_worker_has_a_whole_step_at_hand() -> None:
    assert cache_aware(PROMPT, workers(num_uncomputed_tokens=(100, 130))) is None
    assert cache_aware(PROMPT, workers(num_uncomputed_tokens=(100, 99))) == "b"
    long = replace(PROMPT, num_prompt_tokens=900)
    assert cache_aware(long, workers(num_uncomputed_tokens=(100, 0), num_cached_tokens=(800, 0))) is None, "it waits for its own pages"
    assert cache_aware(long, workers(num_uncomputed_tokens=(100, 0), num_expected_tokens=(0, 400))) == "b"


def test_output_that_is_expected_counts_where_it_is_computed() -> None:
    counts = {"num_uncomputed_tokens": (0, 10), "num_expected_tokens": (80, 0)}
    assert cache_aware(PROMPT, workers(**counts)) == "b"
    assert cache_aware(replace(PROMPT, stage="prefill"), workers(**counts)) == "a"


def test_decoding_goes_to_the_least_kv_with_room_for_the_output() -> None:
    request = replace(PROMPT, stage="decode")
    assert cache_aware(request, workers(num_kv_tokens=(300, 200), num_expected_tokens=(10, 90))) == "b"
    assert cache_aware(request, workers(num_kv_tokens=(300, 200), num_expected_tokens=(10, 190))) == "a"
    assert cache_aware(request, workers(num_kv_tokens=(300, 200), num_sequences=(1, 4))) == "a", "b has all sequences that it may run"
    assert cache_aware(request, workers(num_kv_tokens=(930, 950), num_sequences=(1, 1))) == "a", "none has room: the least"
    assert cache_aware(request, workers(num_kv_tokens=(300, 200), num_uncomputed_tokens=(0, 500))) == "b"


def test_the_index_knows_the_latest_prompts_of_each_worker() -> None:
    tokens = [number % 7 for number in range(5 * PIECE_TOKENS)]
    long, short = digests_of("", tokens), digests_of("", tokens[: 2 * PIECE_TOKENS + 1])
    assert (len(long), short) == (4, long[:2]), "one token at least is left to compute"
    index = PrefixIndex({"a": 4 * PIECE_TOKENS, "b": 4 * PIECE_TOKENS})
    index.add("a", short)
    assert [index.num_cached_tokens(worker, long) for worker in "ab"] == [2 * PIECE_TOKENS, 0]
    assert index.num_cached_tokens("a", digests_of("salt", tokens)) == 0
    index.add("a", digests_of("", [9, *tokens[: 3 * PIECE_TOKENS]]))
    assert index.num_cached_tokens("a", long) == PIECE_TOKENS, "the end of the oldest prompt is forgotten first"
    index.clear("a")
    assert index.num_cached_tokens("a", long) == 0


def routed(**more: object) -> Gateway:
    limits = LIMITS.replace(max_num_batched_tokens=8, kv_pages=4096, max_tokens=40)
    return new_gateway(text=False, limits=limits, num_positions=4096, **more)


def test_a_prompt_beyond_the_step_at_hand_waits_for_the_first_token_of_another() -> None:
    gateway = routed()
    first, second = (place(gateway, range(12), max_tokens=4) for _ in range(2))
    assert {first.group, second.group} == {"g0", "g1"}
    index = gateway.reserve()
    assert gateway.place(index, (1,)) == []
    (sent,) = sent_in(gateway.on_token("g1", token_of(second, "a")))
    assert (sent.group, sent.request.prompt_token_ids) == ("g1", (1,))


def test_a_prompt_that_begins_as_an_earlier_one_goes_to_its_group() -> None:
    gateway = routed()
    prompt = tuple(number % 5 for number in range(200))
    first = place(gateway, prompt, max_tokens=1)
    gateway.on_token(first.group, token_of(first, "a"))
    for _ in range(3):
        later = place(gateway, (*prompt, 7), max_tokens=1)
        assert later.group == first.group
        gateway.on_token(later.group, token_of(later, "a"))


@pytest.mark.parametrize("concurrency", [1, 2, 3])
@pytest.mark.parametrize("prefill_workers", [(), ("p0", "p1")], ids=["groups", "prefill workers"])
def test_prompts_that_fit_into_all_caches_together_stay_in_them(concurrency: int, prefill_workers: tuple[str, ...]) -> None:
    """Twelve prompts of 1000 tokens in rounds; a cache has room for eight of them."""
    limits = LIMITS.replace(max_num_batched_tokens=2048, kv_pages=512, page_size=16, max_tokens=40)
    gateway = new_gateway(text=False, limits=limits, num_positions=4096, prefill_workers=prefill_workers)
    prompts = [tuple((number * 7 + at) % 11 for at in range(1000)) for number in range(12)]
    workers_of: list[list[str]] = []
    for _ in range(3):
        workers_of.append([])
        for first in range(0, 12, concurrency):
            sent = [place(gateway, prompt, max_tokens=1) for prompt in prompts[first : first + concurrency]]
            workers_of[-1] += [each.group for each in sent]
            for each in sent:
                if prefill_workers:
                    each = prefill(gateway, each)
                    gateway.on_transfer(each.group, pulled(each))
                else:
                    gateway.on_token(each.group, token_of(each, "a"))
                on_ended(gateway, Ended(each.request.id, 0, "length"))
    assert workers_of[0] == workers_of[1] == workers_of[2]
    assert max(workers_of[0].count(worker) for worker in workers_of[0]) <= 8


def test_requests_wait_at_the_gateway_for_the_first_group_with_a_place() -> None:
    gateway = routed()
    room = LIMITS.max_num_seqs + 1  # one is at hand when another ends
    sent = [place(gateway, (number,), max_tokens=2 if number % 3 else 40) for number in range(2 * room)]
    assert [[each.group for each in sent].count(group) for group in ("g0", "g1")] == [room, room]
    index = gateway.reserve()
    assert gateway.place(index, (5,)) == []
    (next_one,) = sent_in(gateway.cancel(next(each.request.index for each in sent if each.group == "g1")))
    assert (next_one.request.index, next_one.group) == (index, "g1")


def test_a_lost_group_has_no_prefixes() -> None:
    gateway = routed()
    prompt = tuple(number % 5 for number in range(200))
    first = place(gateway, prompt, max_tokens=1)
    gateway.on_token(first.group, token_of(first, "a"))
    gateway.cancel(0)
    gateway.lose_group("g0", "was lost")
    gateway.readmit_group("g0")
    other, running = place(gateway, range(3), max_tokens=9), place(gateway, range(3), max_tokens=9)
    assert (other.group, running.group) == ("g1", "g0")
    gateway.cancel(other.request.index)
    assert place(gateway, prompt, max_tokens=1).group == "g1"


def apart(**more: object) -> Gateway:
    return routed(prefill_workers=("p0", "p1", "p2"), long_prompts=LongPrompts(min_tokens=10, workers=2), **more)


def test_long_prompts_have_workers_of_their_own() -> None:
    gateway = apart()
    assert [place(gateway, range(20)).group for _ in range(2)] == ["p1", "p2"]
    assert place(gateway, range(3)).group == "p0"
    waiting = gateway.reserve()
    assert gateway.place(waiting, range(20)) == [], "p0 would have room"
    assert place(gateway, range(9)).group == "p0", "a short prompt passes it"


def test_without_their_workers_long_and_short_prompts_go_to_the_others() -> None:
    for lost, length, used in ((("p1", "p2"), 20, "p0"), (("p0",), 3, "p1")):
        gateway = apart()
        for worker in lost:
            gateway.lose_group(worker, "was lost")
        assert place(gateway, range(length)).group == used
    gateway = routed(groups=("g0", "g1"), long_prompts=LongPrompts(min_tokens=10))
    assert [place(gateway, range(length)).group for length in (3, 20)] == ["g0", "g1"], "without prefill workers: groups"


def test_decode_counts_the_kv_of_every_group() -> None:
    gateway = routed(prefill_workers=("p0", "p1"))
    long = prefill(gateway, place(gateway, range(25), max_tokens=40))
    short = [prefill(gateway, place(gateway, (1, 2), max_tokens=3)) for _ in range(3)]
    assert {each.group for each in short} == {"g1" if long.group == "g0" else "g0"}
    gateway.on_transfer(long.group, pulled(long))
    statuses = gateway.workers
    assert statuses[long.group].num_kv_tokens == 26
    assert sum(statuses[name].num_sequences for name in ("p0", "p1")) == 3, "they hold the KV that is not pulled yet"


def test_a_policy_of_a_package_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("last", f"{__name__}:last_worker", "flowrt.routing_policies")
    monkeypatch.setattr(routing, "entry_points", lambda group, name: (entry,))
    assert place(new_gateway(text=False, routing=find_policy("last"))).group == "g1"


class Unequal:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")


@pytest.mark.parametrize(
    ("faulty", "text"),
    [
        (lambda request, workers: "nowhere", "returned 'nowhere', expected None or one of g0, g1"),
        (lambda request, workers: ["g1"], "returned ['g1'], expected None or one of g0, g1"),
        (lambda request, workers: workers[7].name, "raised IndexError: tuple index out of range (test_routing.py:"),
        (lambda request, workers: Unequal(), "raised RuntimeError: not comparable"),
        (lambda: "g1", "raised TypeError: "),
    ],
    ids=["unknown worker", "list", "error", "error of the result", "wrong signature"],
)
def test_a_policy_that_fails_leaves_requests_to_the_default_one(faulty: Any, text: str, caplog: pytest.LogCaptureFixture) -> None:
    gateway = new_gateway(text=False, routing=faulty)
    assert {place(gateway).group for _ in range(2)} == {"g0", "g1"}
    (record,) = caplog.records
    assert f"the routing policy {text}" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert gateway.num_routing_failures == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("flowrt_without_this:policy", "routing: 'own' cannot be loaded from flowrt_without_this:policy: ModuleNotFoundError: No module"),
        (f"{__name__}:missing", "AttributeError: module "),
        (f"{__name__}:PROMPT", "routing: 'own' is WaitingRequest("),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_one_line(value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "entry_points", lambda group, name: (EntryPoint("own", value, "flowrt.routing_policies"),))
    with pytest.raises(GraphError) as refused:
        find_policy("own")
    assert text in str(refused.value)
    assert "\n" not in str(refused.value)


def last_worker(request: WaitingRequest, workers: Sequence[WorkerStatus]) -> str | None:
    return workers[-1].name


def test_built_in_policies_are_the_known_ones() -> None:
    assert tuple(routing._BUILT_IN) == ROUTING_POLICIES
    with pytest.raises(GraphError, match="there is no routing policy 'best'; known are cache_aware, round_robin"):
        load_graph(TWO_ACTORS, ["routing=best"])
