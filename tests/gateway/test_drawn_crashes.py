"""A gateway with the engines of its workers: one request crashes what computes a certain row of it, and messages and notices take any time.

The simulation has these rules in whole runs; here are thousands of orders of a few messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from gateway.gateways import ToyWorker, gateway_of

from flowrt.actors.control import Crashed, Ended, KvLost, KvPulled, Prefilled, Prefilling, RunsAlone
from flowrt.actors.outputs import TokenEvent
from flowrt.engine.engine import Engine
from flowrt.gateway.decisions import Decision as GatewayDecision
from flowrt.gateway.decisions import ForWorker
from flowrt.graph.settings import GraphLimits
from flowrt.sampling_params import SamplingParams

LIMITS = GraphLimits(max_num_seqs=3, kv_pages=24, page_size=4, max_tokens=8, max_num_batched_tokens=16)
VOCABULARY = 500
MAX_VICTIMS = 4  # as in flowrt/simulation/invariants.py
MAX_ACTIONS = 6000
NUM_RUNS = 100


class Worker(ToyWorker):
    """A group or prefill worker of a run. A step ends when `end_step` is called."""

    def __init__(self, run: DrawnRun, name: str) -> None:
        self.run, self.is_prefill = run, name.startswith("prefill")
        engine = Engine(LIMITS, run.num_micro_batches, 64, VOCABULARY, streams=run.streams and self.is_prefill)
        super().__init__(name, str(id(self)), engine)
        self.is_dead = self.is_crash = False

    def take(self) -> None:
        self.receive(self.inbox.popleft())

    def end_step(self, micro_batch: int) -> None:
        if self.has_poison(micro_batch):
            self.run.num_victims += 1
            self.run.crash(self)
            return
        samples = self.running[micro_batch].batch.samples
        self.finish(micro_batch, [(7 * each.seed + 13 * each.token_index) % VOCABULARY for each in samples])

    def has_poison(self, micro_batch: int) -> bool:
        running = self.engine.snapshot().steps[micro_batch]
        parts = () if running is None else running.parts
        mine = ((sequence.num_computed_tokens, num) for sequence, num in parts if sequence.request.index == self.run.poison)
        return any(first <= self.run.row < first + num_rows for first, num_rows in mine)

    def end_pull(self, key: tuple[str, int]) -> None:
        """Does nothing while the prompt is still computed."""
        kv = self.pulls[key].kv
        worker = self.run.workers[kv.worker]
        number, _ = worker.offers.get(key, (0, ()))
        if worker.is_dead or (worker.incarnation, number) != (kv.incarnation, kv.number):
            del self.pulls[key]
            self.carry_out(self.engine.pull_failed(*key, "lost"))
        elif any((each.request.id, each.request.attempt) == key for each in worker.engine.snapshot().held):
            del self.pulls[key]
            self.carry_out(self.engine.pulled(*key))


class DrawnRun:
    """`row` of the request `poison` crashes its worker, or (`ends_server`) an expert server, with which the policy ends all workers."""

    def __init__(self, random: Random, policy: str) -> None:
        self.random, self.policy = random, policy
        self.num_micro_batches, self.streams = random.randint(1, 2), random.random() < 0.5
        groups = [f"group.{number}" for number in range(random.randint(1, 3))]
        prefill = [f"prefill.{number}" for number in range(random.choice((0, 0, 1, 2)))]
        self.gateway = gateway_of(groups, LIMITS, prefill_workers=prefill, lost_group_seconds=1e9)
        self.workers = {name: Worker(self, name) for name in (*groups, *prefill)}
        self.prompts = [random.choices(range(VOCABULARY), k=random.randint(1, 20)) for _ in range(random.randint(1, 5))]
        self.num_new = [random.randint(1, 8) for _ in self.prompts]
        self.poison = random.randrange(len(self.prompts))
        self.row = random.randrange(len(self.prompts[self.poison]) + self.num_new[self.poison] - 1 or 1)
        self.ends_server = policy == "restart_all" and random.random() < 0.4
        self.num_kills = random.choice((0, 0, 0, 1, 2))
        self.num_victims = self.num_submitted = 0
        self.unnoticed: list[Worker | None] = []  # dead workers of which the launcher has had no sign; None: the server
        self.unannounced: list[Worker | None] = []  # whose loss the launcher knows and has not announced
        self.down: list[Worker] = []

    def play(self) -> None:
        for _ in range(MAX_ACTIONS):
            if not (actions := [*self.actions()]):
                return
            action, *arguments = self.random.choice(actions)
            action(*arguments)
        raise AssertionError("it goes on for ever")

    def actions(self) -> Iterator[tuple[Callable[..., None], *tuple[Any, ...]]]:
        if self.num_submitted < len(self.prompts):
            yield (self.submit,)
        for worker in self.workers.values():
            if worker.outbox:
                yield self.read, worker
            if not worker.is_dead:
                yield from [(worker.take,)] if worker.inbox else []
                yield from ((worker.end_step, micro_batch) for micro_batch in worker.running)
                yield from ((worker.end_pull, key) for key in worker.pulls)
                yield from [(self.kill, worker)] if self.num_kills else []
        yield from ((self.notice, dead) for dead in self.unnoticed)
        read = [dead for dead in self.unannounced if dead is None or not dead.outbox]
        first = [dead for dead in self.unannounced if dead is None or dead.is_crash]  # it died by itself
        yield from ((self.announce, dead) for dead in read if self.policy == "fine" or not first or dead in first)
        if self.policy == "fine" or not (self.unnoticed or self.unannounced):
            yield from ((self.return_, dead) for dead in self.down)

    def submit(self) -> None:
        number = self.num_submitted
        self.num_submitted += 1
        params = SamplingParams(max_tokens=self.num_new[number], ignore_eos=True, seed=number)
        self.send(self.gateway.place(self.gateway.reserve(params), self.prompts[number]))

    def send(self, decisions: Sequence[GatewayDecision]) -> None:
        for each in decisions:
            if isinstance(each, ForWorker) and not self.workers[each.group].is_dead:
                self.workers[each.group].inbox.append(each)

    def read(self, worker: Worker) -> None:
        match worker.outbox.popleft():
            case TokenEvent() as token:
                self.send(self.gateway.on_token(worker.name, token))
            case Ended() as ended:
                self.send(self.gateway.on_ended(worker.name, ended))
            case RunsAlone() | Crashed() as report:
                self.send(self.gateway.on_alone(worker.name, report))
            case Prefilling() | Prefilled() | KvPulled() | KvLost() as of_transfer:
                self.send(self.gateway.on_transfer(worker.name, of_transfer))

    def kill(self, worker: Worker) -> None:
        self.num_kills -= 1
        self.die(worker)
        self.unnoticed.append(worker)

    def die(self, worker: Worker) -> None:
        worker.is_dead = True
        worker.inbox.clear()

    def crash(self, worker: Worker) -> None:
        if self.ends_server:
            worker.running.clear()  # which now wait for the server
            self.unnoticed.append(None)
        else:
            worker.is_crash = True
            self.die(worker)
            self.unnoticed.append(worker)

    def notice(self, dead: Worker | None) -> None:
        """The launcher ends what is restarted with it."""
        self.unnoticed.remove(dead)
        self.unannounced.append(dead)
        for worker in self.workers.values():
            is_role = dead is not None and worker.is_prefill == dead.is_prefill
            if not worker.is_dead and (self.policy == "restart_all" or (self.policy == "restart_role" and is_role)):
                self.die(worker)
                self.unannounced.append(worker)

    def announce(self, dead: Worker | None) -> None:
        self.unannounced.remove(dead)
        if dead is None:
            return self.send(self.gateway.lose_server("the server", "died"))
        self.down.append(dead)
        self.send(self.gateway.lose_group(dead.name, "died", may_recur=dead.is_crash, is_restarting=self.policy != "fine"))

    def return_(self, dead: Worker) -> None:
        self.down.remove(dead)
        self.workers[dead.name] = Worker(self, dead.name)
        self.send(self.gateway.readmit_group(dead.name))


@pytest.mark.parametrize("policy", ["fine", "restart_role", "restart_all"])
def test_poison_ends_few_processes_and_no_other_request(policy: str) -> None:
    victims = set()
    for seed in range(NUM_RUNS):
        run = DrawnRun(Random(seed), policy)
        is_killed = run.num_kills > 0
        run.play()
        ends = [run.gateway.log(number).end for number in range(len(run.prompts))]
        assert None not in ends, f"seed {seed}: a request waits for ever"
        others = [end for number, end in enumerate(ends) if number != run.poison]
        assert {end.finish_reason for end in others if end is not None} <= {"length"}, f"seed {seed}: {others}"
        assert is_killed or run.num_victims <= MAX_VICTIMS, f"seed {seed}: {run.num_victims} victims"
        victims.add(run.num_victims)
    assert 3 in victims
