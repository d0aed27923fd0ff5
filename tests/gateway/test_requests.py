"""Requests of a running graph: nothing is left when a client disconnects while its request is being sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from random import Random

import pytest
from gateway.gateways import gateway_of
from group_tokens import group_tokens

from flowrt.actors.control import Cancel, Control, Ended, KvOffer, Prefilled, Submit, Tokens, as_message
from flowrt.actors.outputs import EndEvent
from flowrt.errors import UserError
from flowrt.gateway.request_metrics import RequestMetrics
from flowrt.gateway.requests import MAX_UNREAD, Requests
from flowrt.reliability.health import RequestProgress
from flowrt.sampling_params import SamplingParams
from flowrt.seams import RealClock
from flowrt.transports.contract import Identity, Limits
from flowrt.transports.errors import EndOfChannel
from flowrt.transports.inproc import InprocChannel


async def three_tokens() -> list[int]:
    return [1, 2, 3]


async def empty() -> list[int]:
    return []


def two_tokens_after(finish: asyncio.Event) -> Callable[[], Awaitable[list[int]]]:
    async def tokenize() -> list[int]:
        await finish.wait()
        return [1, 2]

    return tokenize


class SetClock(RealClock):
    """A clock that its test sets."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


async def send_nothing(group: str, control: Control) -> None:
    pass


def new_requests(max_requests: int = 2) -> Requests:
    gateway = gateway_of(max_requests=max_requests)
    return Requests(gateway, send_nothing, RequestProgress(), RealClock())


async def test_a_place_is_reserved_before_the_prompt_is_tokenized() -> None:
    requests, finish = new_requests(max_requests=1), asyncio.Event()

    first = asyncio.create_task(requests.submit(SamplingParams(), two_tokens_after(finish)))
    await asyncio.sleep(0)
    assert requests.gateway.admission.overload
    refused = await requests.submit(SamplingParams(), two_tokens_after(finish))
    assert [event.error async for event in requests.follow(refused)] == ["too many active requests (1, limit 1)"]
    finish.set()
    assert requests.gateway.log(await first).prompt_token_ids == (1, 2)


async def test_what_cannot_be_tokenized_ends_with_the_reason() -> None:
    requests = new_requests()

    async def fail() -> list[int]:
        raise UserError("the text is too long")

    index = await requests.submit(SamplingParams(n=2), fail)
    assert [event async for event in requests.follow(index)] == [EndEvent(index, "error", "", "the text is too long")]
    assert requests.gateway.num_unfinished == 0


async def test_a_request_that_a_prefill_worker_passes_on_has_not_moved() -> None:
    gateway = gateway_of(prefill_workers=["p"])
    metrics = RequestMetrics()
    requests = Requests(gateway, send_nothing, RequestProgress(), RealClock(), metrics=metrics)
    requests.place(requests.open(SamplingParams(max_tokens=4), 2, lambda: None), (1, 2))
    requests.on_control("p", Tokens((group_tokens("request-0", 0, 0, (5,)),)))
    requests.on_control("p", Prefilled("request-0", 0, KvOffer("p", "i", 1, 2)))
    assert (gateway.groups_of(0), metrics.num_moved) == (["p", "g"], 0)
    requests.lose_group("g", "was killed")
    assert (gateway.groups_of(0), metrics.num_moved) == (["p"], 1)
    await requests.aclose()


async def test_thousands_of_requests_without_a_reader_keep_a_bounded_number_of_logs() -> None:
    """Each ends in its own way: cancelled by its group's fence, ended by the group, or refused."""
    sent: list[Submit] = []

    async def send(group: str, control: Control) -> None:
        if isinstance(control, Submit):
            sent.append(control)

    clock = SetClock()
    gateway = gateway_of(max_requests=8, now=clock.now, lost_group_seconds=1e-9)
    requests = Requests(gateway, send, RequestProgress(), clock)
    requests.begin()
    most = 0
    for number in range(2_500):  # the last one is refused
        index = await requests.submit(SamplingParams(max_tokens=4), empty if number % 5 == 4 else three_tokens)
        if number % 5 < 2:
            await asyncio.sleep(0)  # until it is sent
            requests.on_control("g", Ended(sent[-1].request.id, 0, "length"))
        if gateway.admission.overload:
            assert gateway.has_ended(await requests.submit(SamplingParams(), three_tokens)), "refused: too many are active"
            requests.lose_group("g", "stopped")
            clock.seconds += 1.0
            requests._on_time()
            requests.readmit_group("g")
        most = max(most, gateway.num_logs)
    assert MAX_UNREAD <= most <= MAX_UNREAD + 8
    assert gateway.num_logs == len(requests._on_change)
    with pytest.raises(UserError, match="there is no request 0 to follow"):
        await anext(requests.follow(0))
    with pytest.raises(UserError, match="there is no request 0 to follow"):
        requests.prompt_token_ids(0)
    assert [type(event) for event in [event async for event in requests.follow(index)]] == [EndEvent]
    await requests.aclose()


async def test_no_log_is_dropped_while_its_request_is_submitted() -> None:
    """The run is closed while one request is tokenized and the logs of many others are kept."""
    requests, finish = new_requests(), asyncio.Event()

    submitting = asyncio.create_task(requests.submit(SamplingParams(), two_tokens_after(finish)))
    await asyncio.sleep(0)
    requests.end_all()
    for _ in range(MAX_UNREAD + 1):
        await requests.submit(SamplingParams(), empty)
    finish.set()
    assert [type(event) async for event in requests.follow(await submitting)] == [EndEvent]


@pytest.mark.parametrize("closed", [False, True])
async def test_a_request_that_is_given_up_while_it_is_tokenized_leaves_nothing(closed: bool) -> None:
    requests = new_requests()
    finish = asyncio.Event()

    submitting = asyncio.create_task(requests.submit(SamplingParams(), two_tokens_after(finish)))
    await asyncio.sleep(0)
    if closed:
        requests.end_all()
        finish.set()
        assert [event.finish_reason async for event in requests.follow(await submitting)] == ["abort"]
    else:
        submitting.cancel()
        with suppress(asyncio.CancelledError):
            await submitting
    assert requests.gateway.num_unfinished == 0
    assert {worker.num_sequences for worker in requests.gateway.workers.values()} == {0}


async def test_client_that_disconnects_while_the_connection_is_full_leaves_nothing_open() -> None:
    sent: list[Control] = []
    is_full, room = asyncio.Event(), asyncio.Event()

    async def send(group: str, control: Control) -> None:
        is_full.set()
        await room.wait()
        sent.append(control)

    gateway, progress = gateway_of(), RequestProgress()
    requests = Requests(gateway, send, progress, RealClock())
    requests.begin()
    client = asyncio.ensure_future(anext(requests.follow(await requests.submit(SamplingParams(max_tokens=4), three_tokens))))
    await is_full.wait()
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    assert progress.num_open == 0
    assert not gateway.num_unfinished
    room.set()
    for _ in range(10):
        await asyncio.sleep(0)
    index = await requests.submit(SamplingParams(max_tokens=4), three_tokens)
    assert progress.num_open == 1
    assert gateway.num_unfinished == 1
    requests.end_all()
    assert [event.finish_reason async for event in requests.follow(index)] == ["abort"]
    assert [type(each) for each in sent if not isinstance(each, Cancel)] == [Submit]
    await requests.aclose()


async def test_a_request_that_waits_for_room_at_a_lost_group_goes_to_another() -> None:
    sending, sent = asyncio.Event(), asyncio.Queue[Control]()

    async def send(group: str, control: Control) -> None:
        if group == "stopped":
            sending.set()
            await asyncio.Event().wait()
        sent.put_nowait(control)

    progress = RequestProgress()
    requests = Requests(gateway_of(["stopped", "g"]), send, progress, RealClock())
    requests.begin()
    async with asyncio.timeout(20):
        index = await requests.submit(SamplingParams(max_tokens=4), three_tokens)
        await sending.wait()
        requests.lose_group("stopped", "was killed")
        submit = await sent.get()
        assert isinstance(submit, Submit)
        assert submit.request.attempt == 1
        requests.on_control("g", Ended(submit.request.id, 1, "length"))
        (end,) = [event async for event in requests.follow(index)]
    assert end == EndEvent(index, "length")
    assert progress.num_open == 0
    await requests.aclose()


async def test_messages_for_a_lost_incarnation_do_not_reach_the_next_one() -> None:
    sent: list[Control] = []

    async def send(group: str, control: Control) -> None:
        sent.append(control)

    requests = Requests(gateway_of(), send, RequestProgress(), RealClock())
    await requests.submit(SamplingParams(max_tokens=4), three_tokens)
    requests.lose_group("g", "was killed")
    requests.readmit_group("g")
    requests.begin()
    for _ in range(10):
        await asyncio.sleep(0)
    assert [each.request.attempt for each in sent if isinstance(each, Submit)] == [1]
    await requests.aclose()


async def test_drain_waits_for_admitted_requests() -> None:
    requests = new_requests()
    index = await requests.submit(SamplingParams(max_tokens=4), three_tokens)
    draining, second = (asyncio.create_task(requests.drain()) for _ in range(2))
    await asyncio.sleep(0)
    refused = await requests.submit(SamplingParams(), three_tokens)
    assert [event.error async for event in requests.follow(refused)] == [
        "the graph is draining and takes no new requests; send them to another one"
    ]
    assert not draining.done()
    requests.on_control("g", Ended(requests.gateway.log(index).id, 0, "length"))
    async with asyncio.timeout(20):
        await asyncio.gather(draining, second)


async def test_drain_ends_with_the_failure_of_the_run() -> None:
    """Whether the run fails before the drain or during it."""
    for is_early in (True, False):
        requests = new_requests()
        await requests.submit(SamplingParams(max_tokens=4), three_tokens)
        if is_early:
            requests.fail(UserError("the run has failed"))
        draining = asyncio.create_task(requests.drain())
        await asyncio.sleep(0)
        if not is_early:
            requests.fail(UserError("the run has failed"))
        async with asyncio.timeout(20):
            with pytest.raises(UserError, match="the run has failed"):
                await draining


async def test_close_ends_a_cancel_whose_send_raises_in_place_of_cancelled_error() -> None:
    sending = asyncio.Event()

    async def send(group: str, control: Control) -> None:
        if isinstance(control, Cancel):
            sending.set()
            try:
                await asyncio.Event().wait()
            finally:
                raise ValueError("not the error that the sender was cancelled with")

    requests = Requests(gateway_of(), send, RequestProgress(), RealClock())
    requests.begin()
    events = requests.follow(await requests.submit(SamplingParams(max_tokens=4), three_tokens))
    client = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    client.cancel()
    await sending.wait()
    async with asyncio.timeout(20):
        await requests.aclose()


async def test_requests_close_among_two_thousand_cancels_at_random_moments() -> None:
    """Clients leave while they submit or follow; the control connection has room for two messages; `aclose` comes among them."""

    num_cancelled = 0
    for seed in range(40):
        async with asyncio.timeout(30):
            num_cancelled += await cancel_at_random(Random(seed), num_clients=50)
    assert num_cancelled == 2_000


async def cancel_at_random(random: Random, num_clients: int) -> int:
    """How many of `num_clients` clients end cancelled. Cancels and `aclose` come after a random number of turns of the loop."""
    ours, theirs = InprocChannel.pair(Limits(capacity_messages=2), Identity("gateway"), Identity("g"))
    gateway = gateway_of()

    async def turns(most: int) -> None:
        for _ in range(random.randrange(most)):
            await asyncio.sleep(0)

    async def send(group: str, control: Control) -> None:
        await ours.send(as_message(control))

    async def read() -> None:
        with suppress(EndOfChannel):
            while await theirs.recv():
                await turns(4)

    async def follow() -> None:
        async with aclosing(requests.follow(await requests.submit(SamplingParams(max_tokens=4), three_tokens))) as events:
            async for _ in events:
                pass

    async def cancel(task: asyncio.Task[None]) -> None:
        await turns(40)
        task.cancel()

    requests = Requests(gateway, send, RequestProgress(), RealClock())
    requests.begin()
    clients = [asyncio.create_task(follow()) for _ in range(num_clients)]
    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        cancels = [group.create_task(cancel(client)) for client in clients]
        await turns(60)
        await requests.aclose()
        await asyncio.wait(cancels)
        await asyncio.wait(clients)
        await ours.aclose()
    await theirs.aclose()
    assert gateway.num_unfinished == 0
    return sum(client.cancelled() for client in clients)
