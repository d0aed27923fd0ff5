"""Front ends, their connections and the gateway under seeds: messages wait for any time, clients leave, front ends and groups die.

The real GatewayClient, FrontEnds, Requests and Gateway run; the test plays the connections, the groups and the clients. Each request that
nothing has ended from outside gets all its tokens in order and exactly one end, and nothing is left of any.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from gateway.gateways import gateway_of
from group_tokens import group_tokens
from serving.served_app import over_the_wire

from flowrt.actors.control import Cancel, Control, Ended, Request, Submit, Tokens
from flowrt.actors.front_end_messages import RequestOutput, StateQuery, StateReport
from flowrt.actors.outputs import TokenEvent
from flowrt.gateway.front_ends import FrontEnds
from flowrt.gateway.requests import Requests
from flowrt.graph.settings import GraphLimits
from flowrt.reliability.health import RequestProgress
from flowrt.sampling_params import SamplingParams
from flowrt.seams import RealClock
from flowrt.serving.api_errors import ApiError
from flowrt.serving.gateway_client import GatewayClient, Inbox, OpenRequest

SEEDS = range(60)
STEPS = 120
NAMES, GROUPS = ("front_end.0", "front_end.1"), ("attention.0", "attention.1")
MAX_REQUESTS, MAX_PROMPT_TOKENS = 5, 60


def token_of(prompt: tuple[int, ...], choice: int, index: int) -> int:
    return (sum(prompt) * 7 + choice * 31 + index * 13) % 500


class SeedClient:
    """What one client has got. `is_over`: it has left, or its front end has died."""

    def __init__(self, name: str, prompt: tuple[int, ...], params: SamplingParams, inbox: Inbox) -> None:
        self.name, self.prompt, self.params, self.inbox = name, prompt, params, inbox
        self.request: OpenRequest | None = None
        self.tokens: dict[int, list[int]] = {choice: [] for choice in range(params.n)}
        self.ends: list[RequestOutput] = []
        self.refusal: str | None = None
        self.stopped: set[int] = set()
        self.is_over = False

    def read(self) -> None:
        for _, output in self.inbox._outputs:
            assert not self.ends, "an output after the end"
            for event in output.events:
                if isinstance(event, TokenEvent):
                    self.tokens[event.choice] += event.token_ids
            if output.end is not None:
                self.ends.append(output)
        self.inbox._outputs.clear()
        for choice, tokens in self.tokens.items():
            assert tokens == [token_of(self.prompt, choice, index) for index in range(len(tokens))]

    def check(self) -> None:
        self.read()
        if self.is_over or self.refusal is not None:
            return
        (end,) = self.ends
        assert end.end is not None
        assert end.end.finish_reason in ("length", "stop"), end
        for choice, tokens in self.tokens.items():
            assert len(tokens) == self.params.max_tokens or choice in self.stopped


class Seed:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.gateway = gateway_of(
            GROUPS,
            GraphLimits(max_tokens=16, max_num_seqs=2),
            512,
            500,
            draw_seed=lambda: 1,
            max_requests=MAX_REQUESTS,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
        )
        self.progress = RequestProgress()
        self.requests = Requests(self.gateway, self.submit, self.progress, RealClock())
        self.front_ends = FrontEnds(NAMES, self.requests, self.send, self.post, self.report_state)
        self.up: dict[str, deque[Control]] = {}  # messages in flight, by front end
        self.down: dict[str, deque[Control]] = {}
        self.clients: dict[str, GatewayClient] = {}
        self.running: dict[tuple[str, str], tuple[Request, dict[int, int]]] = {}  # by group and id: with tokens by choice
        self.seen: list[SeedClient] = []
        self.tasks: list[asyncio.Task[None]] = []
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        self.up[name], self.down[name] = deque(), deque()
        up = self.up[name]
        self.clients[name] = GatewayClient(lambda control: up.append(over_the_wire(control)), lambda: 0.0)

    # The other ends.

    async def submit(self, group: str, control: Control) -> None:
        if isinstance(control, Submit):
            request = control.request
            done = {choice: len(tokens) for choice, tokens in enumerate(request.committed_token_ids)}
            counts = {choice: done.get(choice, 0) for choice in range(request.params.n) if choice not in request.ended_choices}
            self.running[group, request.id] = request, counts
        elif isinstance(control, Cancel) and (group, control.request_id) in self.running:
            request, counts = self.running[group, control.request_id]
            if request.attempt == control.attempt:
                for choice in [choice for choice in counts if control.choice in (None, choice)]:
                    del counts[choice]
                if not counts:
                    del self.running[group, control.request_id]

    async def send(self, name: str, control: Control) -> None:
        self.post(name, control)
        while len(self.down[name]) > 3:  # noqa: ASYNC110  the connection is full
            await asyncio.sleep(0)

    def post(self, name: str, control: Control) -> None:
        self.down[name].append(over_the_wire(control))

    async def report_state(self, query: StateQuery) -> StateReport:
        return StateReport(query.number, True, "")

    # What happens.

    def open(self) -> None:
        rng, name = self.rng, self.rng.choice(NAMES)
        prompt = tuple(rng.randrange(500) for _ in range(rng.randint(1, 30)))
        client = SeedClient(name, prompt, SamplingParams(max_tokens=rng.randint(1, 8), n=rng.choice((1, 1, 2))), Inbox())
        self.seen.append(client)
        self.tasks.append(asyncio.get_running_loop().create_task(self.reserve(client, self.clients[name])))

    async def reserve(self, client: SeedClient, to: GatewayClient) -> None:
        try:
            client.request = await to.reserve(client.params, len(client.prompt), client.inbox, 0)
        except ApiError as error:
            client.refusal = error.message
            return
        client.request.place(client.prompt)

    def leave(self) -> None:
        if client := self.pick(lambda client: client.request is not None and not client.is_over):
            assert client.request is not None
            client.read()
            client.is_over = True
            client.request.close()

    def stop(self) -> None:
        """A front end finds a stop string."""
        if client := self.pick(lambda client: client.request is not None and not client.is_over and not client.ends):
            assert client.request is not None
            choice = self.rng.randrange(client.params.n)
            client.stopped.add(choice)
            client.request.stop_choice(choice)

    def pick(self, is_fit: Callable[[SeedClient], bool]) -> SeedClient | None:
        fit = [client for client in self.seen if is_fit(client)]
        return self.rng.choice(fit) if fit else None

    def kill_front_end(self) -> None:
        name = self.rng.choice(NAMES)
        for client in self.seen:
            if client.name == name and client.refusal is None and not client.is_over:
                client.is_over = True
        self.clients[name].end("the front end has died")  # its waiting calls end with it
        self.start(name)
        self.front_ends.lose(name)

    def kill_group(self) -> None:
        group = self.rng.choice(GROUPS)
        for key in [key for key in self.running if key[0] == group]:
            del self.running[key]
        self.requests.lose_group(group, "was killed by SIGKILL")
        self.requests.readmit_group(group)

    def deliver(self, most: int = 3) -> None:
        for name in self.rng.sample(NAMES, 2):
            for _ in range(self.rng.randint(0, most)):
                if self.up[name]:
                    self.front_ends.on_control(name, self.up[name].popleft())
                if self.down[name]:
                    self.clients[name].on_control(self.down[name].popleft())

    def compute(self, most: int = 3) -> None:
        for _ in range(self.rng.randint(0, most)):
            if not self.running:
                return
            group, request_id = key = self.rng.choice(list(self.running))
            request, counts = self.running[key]
            choice = self.rng.choice(list(counts))
            if counts[choice] < request.max_tokens:
                token = group_tokens(
                    request_id, request.attempt, counts[choice], (token_of(request.prompt_token_ids, choice, counts[choice]),), choice
                )
                counts[choice] += 1
                self.requests.on_control(group, Tokens((token,)))
            else:
                del counts[choice]
                if not counts:
                    del self.running[key]
                self.requests.on_control(group, Ended(request_id, request.attempt, "length", None, choice))

    async def run(self) -> None:
        self.requests.begin()
        self.front_ends.begin()
        actions = {
            self.open: 12,
            self.deliver: 40,
            self.compute: 40,
            self.leave: 3,
            self.stop: 3,
            self.kill_front_end: 1,
            self.kill_group: 1,
        }
        for _ in range(STEPS):
            self.rng.choices(list(actions), list(actions.values()))[0]()
            for _ in range(self.rng.randrange(3)):
                await asyncio.sleep(0)
        for _ in range(60):
            self.deliver(10)
            await asyncio.sleep(0)
        self.check_cancelled()
        for _ in range(250):
            self.deliver(10)
            self.compute(10)
            await asyncio.sleep(0)
        self.check()
        await self.front_ends.aclose()
        await self.requests.aclose()

    def check_cancelled(self) -> None:
        """All messages have come: only requests that a client waits for are left."""
        for client in self.seen:
            if not client.is_over:
                client.read()
        waiting = [client for client in self.seen if client.refusal is None and not client.is_over and not client.ends]
        assert self.gateway.num_unfinished == len(waiting)

    def check(self) -> None:
        assert all(task.done() for task in self.tasks), "a reservation got no response"
        for client in self.seen:
            client.check()
        assert (self.gateway.num_unfinished, self.gateway.num_logs, self.progress.num_open) == (0, 0, 0)
        assert [client.num_open for client in self.clients.values()] == [0, 0]
        assert not any(queue.requests or queue.changed for queue in self.front_ends.queues.values())
        assert self.running == {}, "a group computes what nothing follows"


def run(seed: int) -> None:
    asyncio.run(Seed(seed).run())


def test_seeds() -> None:
    for seed in SEEDS:
        run(seed)


def _do_nothing(self: Any, name: str) -> None:
    pass


_take_outputs = FrontEnds._take_outputs


def _skip_first(self: Any, front_end: Any) -> Any:
    outputs = _take_outputs(self, front_end)
    return outputs[1:] if len(outputs) > 1 else outputs


def _forget_silently(self: Any, number: int) -> bool:
    return self._requests.pop(number, None) is None


BUGS: dict[str, tuple[type, str, Any]] = {
    "requests of a dead front end go on": (FrontEnds, "lose", _do_nothing),
    "a request that has ended is kept": (FrontEnds, "_close", lambda self, front_end, number: None),
    "the first of several outputs is lost": (FrontEnds, "_take_outputs", _skip_first),
    "a client that leaves cancels nothing": (GatewayClient, "forget", _forget_silently),
}


@pytest.mark.parametrize("bug", BUGS)
def test_seeds_find_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        test_seeds()
