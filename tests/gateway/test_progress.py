"""Every request ends, in whatever order messages, steps and transfers come: a gateway with the engines of its workers, few pages, no clock.

The real decisions run, without processes and KV: thousands of cases take seconds. When nothing is left to come, every request must have
ended, and no page may be held: a wait without an owner, or a circle of waits, shows at once.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from gateway.gateways import ToyWorker, gateway_of

from flowrt.actors.control import Crashed, Ended, KvLost, KvPulled, Prefilled, Prefilling, RunsAlone
from flowrt.actors.outputs import TokenEvent
from flowrt.engine.engine import Engine
from flowrt.engine.transfers import Pull
from flowrt.gateway.decisions import Decision, SendCancel, SendCompleted, SendRequest
from flowrt.gateway.routing import cache_aware, round_robin
from flowrt.graph.settings import GraphLimits, LongPrompts
from flowrt.sampling_params import SamplingParams

VOCABULARY, STOP = 40, 39


class Worker(ToyWorker):
    def roll_back(self) -> None:
        self.running.clear()
        self.engine.roll_back()
        self.carry_out([])

    def fail(self, micro_batch: int, *, crashed: bool = False) -> None:
        step = self.running[micro_batch]
        self.running.clear()
        self.carry_out(self.engine.fail_steps([(micro_batch, step.step)], "it failed", crashed=crashed))


class ToyGraph:
    """The gateway and its workers. `step` lets one thing happen; False: nothing is left to come."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        page_size = chance.choice((1, 2, 4))
        limits = GraphLimits(
            max_num_seqs=chance.choice((1, 2, 4)),
            kv_pages=-(-30 // page_size) + chance.choice((0, 1, 3)),
            page_size=page_size,
            max_tokens=12,
            max_num_batched_tokens=chance.choice((8, 24)),
            enable_prefix_caching=chance.random() < 0.5,
        )
        others = limits.replace(page_size=chance.choice((2, 3, 4)), kv_pages=12 + chance.choice((0, 1, 3)))
        groups, prefill = (
            [f"g{number}" for number in range(chance.choice((1, 2)))],
            [f"p{number}" for number in range(chance.choice((0, 1, 2, 2)))],
        )
        self.limits_of = {**dict.fromkeys(groups, limits), **dict.fromkeys(prefill, others)}
        self.chunk_tokens = {name: chance.choice((0, 4, 8)) for name in self.limits_of}
        self.streams = chance.random() < 0.7
        self.now = 0
        self.gateway = gateway_of(
            groups,
            limits,
            100,
            VOCABULARY,
            draw_seed=lambda: 0,
            now=lambda: float(self.now),
            lost_group_seconds=chance.choice((30.0, 300.0)),
            prefill_workers=prefill,
            routing=chance.choice((cache_aware, round_robin)),
            limits_of=self.limits_of.__getitem__,
            long_prompts=chance.choice((None, LongPrompts(min_tokens=10, workers=1) if len(prefill) > 1 else None)),
            kv_hold_seconds=chance.choice((40.0, math.inf)),
        )
        self.leaving = chance.choice((0.0, 0.0, 0.02))  # of clients, at each step
        self.lost: list[str] = []
        names = list(self.limits_of)
        self.together = chance.choice(([], [], groups, names, chance.sample(names, max(1, len(names) - 1))))  # in one process
        self.counts = Counter[str]()  # of messages to the gateway, and of rare events
        self.workers = {name: self.new_worker(name, 0) for name in self.limits_of}
        self.num_faults, self.num_to_come = chance.choice((0, 0, 2, 4)), chance.randint(2, 8)
        self.requests: list[int] = []

    def new_worker(self, name: str, incarnation: int) -> Worker:
        engine = Engine(self.limits_of[name], 2, 100, VOCABULARY, chunk_tokens=self.chunk_tokens[name], streams=self.streams)
        return Worker(name, str(incarnation), engine)

    def send(self, decisions: Sequence[Decision]) -> None:
        for each in decisions:
            if isinstance(each, SendRequest | SendCancel | SendCompleted):
                self.workers[each.group].inbox.append(each)

    def arrive(self) -> None:
        self.num_to_come -= 1
        chance = self.chance
        params = SamplingParams(
            max_tokens=chance.choice((1, 4, 12)), n=chance.choice((1, 1, 2, 3)), temperature=1.0, stop_token_ids=(STOP,), ignore_eos=True
        )
        self.requests.append(index := self.gateway.reserve(params, has_text=False))
        prompt = [chance.randrange(3) for _ in range(chance.choice((1, 5, 12, 18, 19)))]
        self.send(self.gateway.place(index, prompt))

    def deliver(self, worker: Worker) -> None:
        gateway, message = self.gateway, worker.outbox.popleft()
        self.counts[type(message).__name__] += 1
        match message:
            case TokenEvent():
                self.send(gateway.on_token(worker.name, message))
                if self.chance.random() < 0.1:  # a stop string
                    self.send(gateway.stop_choice(message.request, message.choice))
            case Ended():
                self.send(gateway.on_ended(worker.name, message))
            case RunsAlone() | Crashed():
                self.send(gateway.on_alone(worker.name, message))
            case Prefilling() | Prefilled() | KvPulled() | KvLost():
                self.send(gateway.on_transfer(worker.name, message))

    def compute(self, worker: Worker, micro_batch: int) -> None:
        samples, chance = worker.running[micro_batch].batch.samples, self.chance
        not_finite = self.num_faults > 0 and chance.random() < 0.05
        self.num_faults -= not_finite
        worker.finish(micro_batch, [-1 if not_finite else chance.choice((*range(19), STOP)) for _ in samples])

    def transfer(self, group: Worker, pull: Pull) -> None:
        """The KV of a complete prompt arrives, or the pull of an offer that has ended is refused."""
        key, worker = (pull.request_id, pull.attempt), self.workers[pull.kv.worker]
        is_there = worker.offers.get(key, (0, ()))[0] == pull.kv.number
        group.carry_out(group.engine.pulled(*key) if is_there else group.engine.pull_failed(*key, "there is no such offer"))

    def is_due(self, pull: Pull) -> bool:
        worker = self.workers[pull.kv.worker]
        if worker.incarnation != pull.kv.incarnation:
            return False  # the gateway has moved the request
        complete = {(each.request_id, each.attempt) for each in worker.engine.offered_prompts() if each.is_complete}
        key = pull.request_id, pull.attempt
        return key in complete or worker.offers.get(key, (0, ()))[0] != pull.kv.number

    def die(self, worker: Worker) -> None:
        """The worker restarts, with all of its process, at once or later; a group or a prefill worker may stay down for long. The process
        may have had experts, whose crash is announced before."""
        chance, together = self.chance, self.together if worker.name in self.together else [worker.name]
        first, *beside = dying = [name for name in together if name not in self.lost]
        for name in dying:
            self.workers[name] = self.new_worker(name, int(self.workers[name].incarnation) + 1)
        may_recur, had_experts = chance.random() < 0.5, chance.random() < 0.3
        if may_recur and had_experts:
            self.counts["server"] += 1
            self.send(self.gateway.lose_server("experts.0", "crashed"))
        blames = may_recur and not had_experts
        self.send(self.gateway.lose_group(first, "died", beside=beside, may_recur=blames, is_restarting=chance.random() < 0.5))
        for name in dying:
            self.workers[name].inbox.clear()
        self.lost += dying

    def return_lost(self) -> None:
        self.send(self.gateway.readmit_group(self.lost.pop(0)))

    def fault(self) -> None:
        self.num_faults -= 1
        worker = self.chance.choice(list(self.workers.values()))
        match self.chance.randrange(3):
            case 0 if worker.name not in self.lost:
                self.die(worker)
            case 1 if worker.running:
                worker.fail(self.chance.choice(list(worker.running)))
            case _:
                worker.roll_back()

    def step(self) -> bool:
        workers = list(self.workers.values())
        due = [partial(worker.receive, worker.inbox[0]) for worker in workers if worker.inbox]
        read = [worker for worker in workers if worker.inbox]
        due += [partial(self.deliver, worker) for worker in workers if worker.outbox]
        due += [partial(self.compute, worker, micro_batch) for worker in workers for micro_batch in worker.running]
        due += [partial(self.transfer, worker, pull) for worker in workers for pull in worker.pulls.values() if self.is_due(pull)]
        due += [self.arrive] * (self.num_to_come > 0)
        if self.lost and (not due or self.chance.random() < 0.02):
            self.return_lost()
            return True
        if not due:
            return False
        self.now += 1
        if self.requests and self.chance.random() < self.leaving:
            self.send(self.gateway.cancel(self.chance.choice(self.requests)))
        if self.gateway.deadline is not None and self.gateway.deadline <= self.now:
            self.counts["deadline"] += 1
            self.send(self.gateway.on_time())
        if self.num_faults and self.chance.random() < 0.03:
            self.fault()
            return True
        chosen = self.chance.randrange(len(due))
        if chosen < len(read):
            read[chosen].inbox.popleft()
        due[chosen]()
        return True

    def open_requests(self) -> list[str]:
        return [f"request-{index}" for index in self.requests if self.gateway.is_open(f"request-{index}")]


def run(seed: int) -> Counter[str]:
    graph = ToyGraph(seed)
    for _ in range(20_000):
        if not graph.step():
            break
    statistics = {name: worker.engine.statistics() for name, worker in graph.workers.items()}
    pages = {name: f"{each.num_free_pages} of {each.num_pages} pages free" for name, each in statistics.items()}
    assert graph.open_requests() == [], f"seed {seed}: {pages}"
    assert all(each.num_free_pages == each.num_pages for each in statistics.values()), f"seed {seed}: {pages}"
    assert all(worker.engine.idle for worker in graph.workers.values()), f"seed {seed}"
    graph.counts["preemption"] += sum(each.num_preemptions for each in statistics.values())
    return graph.counts


def test_every_request_ends_whatever_comes_first() -> None:
    counts = sum(map(run, range(400)), Counter[str]())
    rare = ("KvPulled", "KvLost", "Prefilling", "RunsAlone", "deadline", "preemption", "server")
    assert {name: counts[name] for name in rare if counts[name] < 20} == {}, "hardly any case has these"


def offered_at_once(siblings: Sequence[Any], streams: bool) -> bool:
    """The prompt is offered before it has pages."""
    return siblings[0].prefills


PLANTED: dict[str, tuple[str, Any]] = {
    "a prompt is offered before it has pages": ("flowrt.engine.transfers.is_offered", offered_at_once),
    "no sequence gives way to an older one": ("flowrt.engine.scheduler.Scheduler._youngest_idle", lambda scheduler, than: None),
    "pages that were pulled stay held": ("flowrt.gateway.gateway.Gateway._cancel", lambda gateway, log, but=(): []),
}


@pytest.mark.parametrize("what", PLANTED)
def test_waits_that_do_not_end_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[what])
    with pytest.raises(AssertionError, match="seed"):
        sum(map(run, range(500)), Counter())
