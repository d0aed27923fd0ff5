"""Trampolines and servers that die together: whatever the order of messages, notices and causes, no part is lost, and the step that has
crashed a server is known before its part goes to the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from random import Random
from typing import Any

from exchange.test_trampoline import SERVERS, Run

from flowrt.actors.control import DeathCause
from flowrt.transports.wire.message import Message, Tag

NUM_RUNS = 120


class DrawnRun(Run):
    """Some servers die while one or two steps run. With a `poison`, a tag, the first of them crashes over its part, and the run ends the
    others with it."""

    def __init__(self, random: Random) -> None:
        super().__init__(random.random() < 0.5)
        self.random = random
        self.steps = tuple(range(random.randint(1, 2)))
        self.dying = random.sample([*SERVERS], random.choice((1, 2, 4)))
        self.first = self.dying[0]
        self.poison = Tag("source@1", step=random.choice(self.steps)) if random.random() < 0.6 else None
        self.has_crashed = False
        self.failed: set[int] = set()
        self.notices: dict[str, deque[tuple[str, DeathCause | None]]] = {name: deque() for name in self.sent}
        self.down: list[int] = []
        self.unexplained: list[int] = []  # of them, those whose cause of death is not known yet

    def fail_steps(self, tags: Collection[Tag], error: str, *, crashed: bool = False, left: Collection[Tag] = ()) -> None:
        if any(tag.epoch == self.epoch for tag in tags):  # then all steps are rolled back
            self.failed |= {*self.steps}
        super().fail_steps(tags, error, crashed=crashed, left=left)

    def play(self) -> None:
        for step in self.steps:
            self.begin(step)
        while actions := [*self.actions()]:
            action, *arguments = self.random.choice(actions)
            action(*arguments)

    def actions(self) -> Iterator[tuple[Callable[..., None], *tuple[Any, ...]]]:
        yield from ((self.take_message, name) for name in self.runners if self.sent[name])
        yield from ((self.take_notice, name) for name in self.runners if self.notices[name])
        yield from (
            (self.explain, server) for server in self.unexplained[: 1 if self.has_crashed and self.first in self.unexplained else 4]
        )
        expected = {lost for name in self.runners for lost, _ in self.notices[name]}
        ready = [server for server in self.down if server not in self.unexplained and f"experts.{server}" not in expected]
        if not self.has_crashed or len(ready) == len(self.down):  # those of one failure unit start when all have ended
            yield from ((self.rejoin, server) for server in ready)
        if self.poison is None and self.dying:
            yield self.die, self.dying[0]

    def take_message(self, process: str) -> None:
        """Deliver the first message of any sender."""
        peer = self.random.choice([peer for peer, _ in self.sent[process]])
        place = next(place for place, (sender, _) in enumerate(self.sent[process]) if sender == peer)
        _, message = self.sent[process][place]
        if process == f"experts.{self.first}" and self.crashes(message):
            self.has_crashed = True
            for server in [*self.dying]:
                self.die(server)
            return
        del self.sent[process][place]
        self.runners[process].accept(peer, message)
        self.runners[process].settle()

    def crashes(self, message: Message) -> bool:
        is_request = message.kind == "data" and self.node_of(message) == f"experts.{self.first}"
        return is_request and message.tag == self.poison and not self.has_crashed

    def die(self, server: int) -> None:
        lost = f"experts.{server}"
        self.dying.remove(server)
        self.down.append(server)
        self.unexplained.append(server)
        del self.runners[lost]
        self.failovers.pop(lost, None)
        self.sent[lost].clear()
        self.notices[lost].clear()
        for process in self.runners:
            self.notices[process].append((lost, None))

    def explain(self, server: int) -> None:
        self.unexplained.remove(server)
        is_crash, is_on_purpose = (server == self.first, server != self.first) if self.has_crashed else (False, False)
        for process in self.runners:
            self.notices[process].append((lost := f"experts.{server}", DeathCause(lost, "1", "died", is_crash, is_on_purpose)))

    def take_notice(self, process: str) -> None:
        lost, cause = self.notices[process].popleft()
        if cause is None:
            self.lose_at(process, lost)
        elif process in self.failovers:
            self.failovers[process].settle(lost, cause)
        self.runners[process].settle()

    def rejoin(self, server: int) -> None:
        self.down.remove(server)
        self.sent[f"experts.{server}"].clear()
        self.join(server)
        for other in self.down:
            self.lose_at(f"experts.{server}", f"experts.{other}")


def test_deaths_lose_no_part_and_hide_no_crash() -> None:
    num_crashes = 0
    for seed in range(NUM_RUNS):
        run = DrawnRun(Random(seed))
        run.play()
        if run.has_crashed:
            assert run.poison in run.crashed, f"seed {seed}: no crash was noticed"
            num_crashes += 1
        ended = {tag.step for tag, _ in run.ends}
        assert ended | run.failed >= {*run.steps}, f"seed {seed}: a part was lost"
        for step in run.failed - ended:
            run.begin(step, epoch=run.epoch)
        run.deliver_all()
        run.check(run.steps)
    assert num_crashes > NUM_RUNS // 10
