"""Makes gateways without a graph file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flowrt.actors.control import KvOffer, Prefilled, Prefilling
from flowrt.engine.engine import Engine, StartStep, reports_of
from flowrt.engine.transfers import Hold, Pull
from flowrt.gateway.decisions import Decision, SendCancel, SendCompleted, SendRequest
from flowrt.gateway.gateway import Gateway, ServedModel
from flowrt.gateway.stages import Stages
from flowrt.graph.settings import GraphLimits

OF_STAGES = ("routing", "long_prompts", "lost_group_seconds", "kv_hold_seconds")


def gateway_of(
    groups: Iterable[str] = ("g",),
    limits: GraphLimits = GraphLimits(),
    max_model_len: int = 64,
    vocab_size: int = 512,
    *,
    prefill_workers: Iterable[str] = (),
    limits_of: Callable[[str], GraphLimits] | None = None,
    now: Callable[[], float] = lambda: 0.0,
    draw_seed: Callable[[], int] = lambda: 1,
    **more: Any,
) -> Gateway:
    """`more`: further arguments of Stages and ServedModel."""
    of_stages = {name: more.pop(name) for name in OF_STAGES if name in more}
    stages = Stages(groups, prefill_workers, limits_of or (lambda worker: limits), now, **of_stages)
    return Gateway(stages, ServedModel(max_model_len, vocab_size, **more), limits, draw_seed)


class ToyWorker:
    """One incarnation of a worker. What it has sent and not yet received is in `inbox` and `outbox`, in order."""

    def __init__(self, name: str, incarnation: str, engine: Engine) -> None:
        self.name, self.incarnation, self.engine = name, incarnation, engine
        self.inbox, self.outbox = deque[Decision](), deque[Any]()
        self.running: dict[int, StartStep] = {}  # by micro-batch
        self.alone: Any = None
        self.pulls: dict[tuple[str, int], Pull] = {}
        self.offers: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}  # number and pages
        self.num_offers = 0

    def receive(self, message: Decision) -> None:
        match message:
            case SendRequest(request=request):
                self.carry_out(self.engine.submit(request))
            case SendCancel(cancel=cancel):
                self.carry_out(self.engine.cancel(cancel.request_id, cancel.attempt, cancel.choice))
            case SendCompleted(completed=completed):
                self.carry_out(self.engine.complete_kv(completed))

    def finish(self, micro_batch: int, tokens: Sequence[int]) -> None:
        step = self.running.pop(micro_batch)
        self.carry_out(self.engine.step_done(micro_batch, step.step, tokens))

    def carry_out(self, decisions: Sequence[Any]) -> None:
        """As a group."""
        self.update_offers()
        for each in decisions:
            if isinstance(each, Hold):
                number, _ = self.offers[each.request_id, each.attempt]
                each = Prefilled(each.request_id, each.attempt, self.offer(number, each.num_tokens))
            self.outbox.append(each)
        for step in self.engine.next_steps():
            self.running[step.micro_batch] = step
            self.outbox += reports_of(self.alone, step.alone)
            self.alone = step.alone
        self.update_offers()
        self.pulls |= {(pull.request_id, pull.attempt): pull for pull in self.engine.new_pulls()}
        self.pulls = {key: pull for key, pull in self.pulls.items() if self.engine.is_pulling(*key)}

    def update_offers(self) -> None:
        prompts = {(prompt.request_id, prompt.attempt): prompt for prompt in self.engine.offered_prompts()}
        self.offers = {key: offer for key, offer in self.offers.items() if key in prompts and prompts[key].pages == offer[1]}
        for key, prompt in prompts.items():
            if key not in self.offers:
                self.num_offers += 1
                self.offers[key] = self.num_offers, prompt.pages
                if not prompt.is_complete:
                    self.outbox.append(Prefilling(*key, self.offer(self.num_offers, prompt.num_tokens, is_complete=False)))

    def offer(self, number: int, num_tokens: int, is_complete: bool = True) -> KvOffer:
        return KvOffer(self.name, self.incarnation, number, num_tokens, is_complete=is_complete)
