"""Level L2 for traffic: requests come, wait, are computed step by step, and end, in modelled time. Pure.

Each group has its own steps, as in the runtime: decoding sequences first, then chunks of prompts, oldest first. The gateway places requests
by the routing policy of the runtime. The time of a step comes from step.py, for the rows of its group and the mean of the other groups that
compute a step at the time.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flowrt.errors import UserError
from flowrt.gateway.routing import GuardedPolicy, WaitingRequest, WorkerStatus, find_policy
from flowrt.planner.deployment import AttentionGroup, Deployment
from flowrt.planner.step import LEVEL, PredictedStep, StepLoad, call_seconds, step_times, times_of_loads
from flowrt.planner.traffic import BLOCK_TOKENS, RequestArrival, Traffic

TABLE_RANKS, TABLE_LAYERS = 24, 6  # of the steps in a table, which are run for each of its sizes
UNLIMITED_KV = 1 << 40
MAX_RETIMED = 16  # steps that run at a time, whose times are found anew whenever another one begins or ends


@dataclass(slots=True, eq=False)
class PredictedRequest:
    """One request: seconds since the traffic began. `started`: its first step; `first`, `ended`: its first and last token."""

    arrival: RequestArrival
    arrived: float = 0.0
    started: float = math.nan
    first: float = math.nan
    ended: float = math.nan
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)  # between its tokens
    progress: float = 0.0  # of the tokens that steps with drafts give
    num_computed: int = 0  # tokens of the prompt


@dataclass(frozen=True)
class TrafficTimes:
    """What a deployment does with traffic. Arrays have an entry per request, in seconds; `gaps` has one per token behind the first.

    `seconds`: from the first arrival to the last token. `num_inputs`: tokens of each prompt. `queued`: until a request's first step; NaN
    where that is not known. `max_waiting`: the most requests that had no token yet. `mean_rows`: of a step of a group. `step`: of L2, a
    steady state in which every group decodes as many sequences as its steps had on average. `busy`: by rank, the share of the time in
    which it computed. `num_failed`: requests that faults ended; they count in the output only. `events`: seconds, and what happened then.
    `expert_pairs`: of level L1, by layer, the pairs of a row and an expert that each expert computed.
    """

    seconds: float
    num_inputs: NDArray[np.int64]
    first_tokens: NDArray[np.float64]
    latencies: NDArray[np.float64]
    queued: NDArray[np.float64]
    gaps: NDArray[np.float64]
    num_input: int
    num_output: int
    max_waiting: int
    mean_rows: float
    step: PredictedStep | None
    busy: Mapping[str, float]
    level: str = LEVEL
    num_failed: int = 0
    events: tuple[tuple[float, str], ...] = ()
    expert_pairs: Mapping[int, Sequence[float]] = field(default_factory=dict)

    @property
    def output_per_second(self) -> float:
        return self.num_output / self.seconds

    @property
    def requests_per_second(self) -> float:
        return len(self.latencies) / self.seconds


class StepTable:
    """The time of a group's step while others compute theirs, between numbers for which step.py has run."""

    def __init__(self, deployment: Deployment, max_kv_tokens: float, apart: bool, seed: int = 0) -> None:
        """`apart`: as of step_times."""
        self._deployment, self._apart, self._seed = deployment, apart, seed
        self._max_kv_tokens = max(2.0, max_kv_tokens)
        self._max_sampled = deployment.max_num_seqs * deployment.rows_per_sequence  # the other rows of a large step are of prompts
        self._found: dict[tuple[int, int, int, int, float], tuple[float, float, float]] = {}

    def seconds(self, own: float, rows: float, micro_batches: int, others: int, other_rows: float, kv_tokens: float) -> float:
        """Seconds of a step of a group, which computes `own` seconds of `rows` rows in so many micro-batches beside experts. `others`:
        groups that compute a step, of `other_rows` rows on average; `kv_tokens`: of context, the mean of all groups."""
        others = min(others, len(self._deployment.groups) - 1)
        kv_share = min(1.0, kv_tokens / self._max_kv_tokens)
        axes = _powers(1 + others, len(self._deployment.groups)), _powers(rows), _powers(other_rows if others else 1)
        found = [
            (weight, self._run(micro_batches, groups, size, other_size, point))
            for (groups, a), (size, b), (other_size, c), (point, d) in product(*axes, ((0.0, 1 - kv_share), (1.0, kv_share)))
            if (weight := a * b * c * d)
        ]
        step, own_there, busy = (sum(weight * each[at] for weight, each in found) for at in range(3))
        return max(own, step + busy * (own - own_there))

    def _run(self, micro_batches: int, num_groups: int, rows: int, other_rows: int, kv_point: float) -> tuple[float, float, float]:
        """Of a group of so many rows: seconds of a step, what it computes of them, and the share of more to compute by which it grows."""
        if self._deployment.is_colocated and self._deployment.num_ranks > TABLE_RANKS:  # places of servers are those of all groups
            num_groups = len(self._deployment.groups)
        key = micro_batches, num_groups, rows, other_rows, kv_point
        if key not in self._found:
            deployment = replace(self._deployment, groups=self._deployment.groups[:num_groups])
            own, *_ = loads = [self._load(each, kv_point) for each in (rows, *[other_rows] * (num_groups - 1))]
            split = [[each.share(1 / micro_batches)] * micro_batches for each in loads]
            sizes = {"max_ranks": TABLE_RANKS, "max_layers": TABLE_LAYERS}
            step = times_of_loads(deployment, split, seed=self._seed, **sizes, apart=self._apart, brief=True)
            computed = call_seconds(deployment, deployment.groups[0].times, own)
            is_alone = num_groups == micro_batches == 1  # no others' rows delay it: all that it computes makes its step longer
            self._found[key] = float(step.by_group[0]), computed, 1.0 if is_alone else float(step.group_busy[0])
        return self._found[key]

    def _load(self, rows: int, kv_point: float) -> StepLoad:
        return StepLoad(rows, max(rows, kv_point * self._max_kv_tokens), sampled=min(rows, self._max_sampled))


def _powers(number: float, most: float = math.inf) -> tuple[tuple[int, float], ...]:
    """The powers of two around a number of at least 1, of which the higher one is at most `most`, and the share of each in it."""
    low = 1 << (int(number).bit_length() - 1)
    high = int(min(2 * low, most))
    share = (number - low) / (high - low) if high > low else 0.0
    return (low, 1 - share), (high, share)


def traffic_times(
    deployment: Deployment, traffic: Traffic, *, seed: int = 0, on_progress: Callable[[int, int], None] = lambda ended, all: None
) -> TrafficTimes:
    """Serve the traffic. `on_progress`: called with the requests that have ended, and all.

    Raises UserError for a request that no group has room for.
    """
    return _Serving(deployment, traffic, seed, on_progress).run()


@dataclass(slots=True, eq=False)
class _ModelledStep:
    """A step that a group computes now: requests, with their tokens of a prompt. `left`: the share that is still to be computed at `since`,
    where all of it would take `seconds`. `own`: what the group computes of them beside experts."""

    parts: list[tuple[PredictedRequest, int]]
    load: StepLoad
    own: float
    micro_batches: int
    since: float
    left: float = 1.0
    seconds: float = math.inf
    version: int = 0


@dataclass(slots=True, eq=False)
class _PredictedWorker:
    """A group or a prefill worker. `stage`: which part of a request it computes."""

    group: AttentionGroup
    stage: Literal["all", "prefill"]
    waiting: deque[PredictedRequest] = field(default_factory=deque)
    running: list[PredictedRequest] = field(default_factory=list)
    pulling: int = 0
    kv_tokens: int = 0  # reserved by what runs and waits here
    num_output: int = 0  # tokens of output that are still to come
    num_uncomputed: int = 0
    num_placed: int = 0
    last_placed: int = 0
    step: _ModelledStep | None = None
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # of the prefix cache, least recently used first


class _Serving:
    def __init__(self, deployment: Deployment, traffic: Traffic, seed: int, on_progress: Callable[[int, int], None]) -> None:
        self._deployment, self._traffic, self._on_progress, self._seed = deployment, traffic, on_progress, seed
        self._kv_limit = deployment.kv_tokens or UNLIMITED_KV
        most = max((each.num_input + each.num_output for each in traffic.arrivals), default=0)
        if not most:
            raise UserError("the traffic has no request")
        if most > self._kv_limit:
            raise UserError(f"a request has {most} tokens, a group has room for {self._kv_limit}; raise limits.kv_pages")
        self._policy = GuardedPolicy(find_policy(deployment.policy))
        self._decoders = [_PredictedWorker(group, "all") for group in deployment.groups]
        self._prefill = [_PredictedWorker(group, "prefill") for group in deployment.prefill]
        self._by_name = {worker.group.name: worker for worker in (*self._decoders, *self._prefill)}
        self._queues: dict[bool, deque[PredictedRequest]] = {False: deque(), True: deque()}  # by whether a prefill worker takes them
        self._ready: deque[PredictedRequest] = deque()  # whose prompt a prefill worker has computed
        # Requests that come one by one find groups in different layers; in a closed loop they begin together, and stay so.
        self._apart = bool(deployment.prefill) or traffic.concurrency is None
        max_kv = min(self._kv_limit, deployment.max_num_seqs * most)
        self._table = StepTable(deployment, max_kv, self._apart, seed)
        self._events: list[tuple[float, int, Callable[[float, object], None], object]] = []
        self._count, self._num_placed = count(), 0
        self._own = dict[str, float]()  # by worker, what it has computed
        self._stepping = dict[str, _PredictedWorker]()
        self._sum_rows = self._sum_kv = 0.0  # of all running steps
        self._num_ended = self._num_here = self._max_waiting = self._num_steps = 0
        self._step_rows = 0.0
        self._num_decode_steps = self._num_decoding = 0
        self._requests = [PredictedRequest(arrival, arrival.at_seconds) for arrival in traffic.arrivals]
        self._next: Iterator[PredictedRequest] = iter(self._requests)

    def run(self) -> TrafficTimes:
        if self._traffic.concurrency is None:
            for request in self._requests:
                self._at(request.arrived, self._arrive, request)
        else:
            for _ in range(min(self._traffic.concurrency, len(self._requests))):
                self._arrive_next(0.0)
        while self._events:
            now, _, call, argument = heappop(self._events)
            call(now, argument)
        return self._result()

    def _at(self, time: float, call: Callable[..., None], argument: object) -> None:
        heappush(self._events, (time, next(self._count), call, argument))

    def _arrive_next(self, now: float) -> None:
        request = next(self._next, None)
        if request is not None:
            request.arrived = now
            self._arrive(now, request)

    def _arrive(self, now: float, request: PredictedRequest) -> None:
        self._num_here += 1
        self._queues[bool(self._prefill)].append(request)
        self._place(now)

    # --- the gateway -------------------------------------------------------------------------------------------------------

    def _place(self, now: float) -> None:
        """Give requests that wait to workers, oldest first, as long as the policy has one for them."""
        for has_kv, queue, workers in (
            (False, self._queues[True], self._prefill),
            (True, self._ready, self._decoders),
            (False, self._queues[False], self._decoders),
        ):
            while queue and (worker := self._choose(queue[0], workers, has_kv)) is not None:
                request = queue.popleft()
                self._num_placed += 1
                worker.num_placed, worker.last_placed = worker.num_placed + 1, self._num_placed
                arrival = request.arrival
                worker.kv_tokens += arrival.num_input + arrival.num_output
                worker.num_output += arrival.num_output - request.num_tokens
                if has_kv:
                    worker.pulling += 1
                    self._at(now + self._transfer_seconds(arrival), self._pulled, (worker, request))
                    continue
                request.num_computed = self._cached(worker, arrival)
                self._keep_blocks(worker, arrival)
                worker.num_uncomputed += arrival.num_input - request.num_computed
                worker.waiting.append(request)
                self._start_step(now, worker)
        self._max_waiting = max(self._max_waiting, self._num_here)

    def _choose(self, request: PredictedRequest, workers: Sequence[_PredictedWorker], has_kv: bool) -> _PredictedWorker | None:
        deployment, arrival = self._deployment, request.arrival
        room = deployment.max_num_seqs * (2 if len(workers) == 1 else 1) + (max(1, deployment.max_num_seqs // 8) if len(workers) > 1 else 0)
        roomy = [worker for worker in workers if _num_sequences(worker) < room]
        if not roomy:
            return None
        stage: Literal["all", "prefill", "decode"] = "decode" if has_kv else roomy[0].stage
        waiting = WaitingRequest(stage, arrival.num_input, 1, arrival.num_output)
        name = self._policy(waiting, [self._status(worker, arrival) for worker in roomy])
        return None if name is None else self._by_name[name]

    def _status(self, worker: _PredictedWorker, arrival: RequestArrival) -> WorkerStatus:
        deployment = self._deployment
        return WorkerStatus(
            worker.group.name,
            deployment.max_num_seqs,
            deployment.max_batched_tokens,
            self._kv_limit,
            worker.num_placed,
            worker.last_placed,
            _num_sequences(worker),
            worker.num_uncomputed,
            worker.kv_tokens - worker.num_output,
            worker.num_output,
            self._cached(worker, arrival),
            len(worker.blocks) * BLOCK_TOKENS,
        )

    def _cached(self, worker: _PredictedWorker, arrival: RequestArrival) -> int:
        """The tokens of a prompt that the prefix cache of the worker has; never all: the last one gives the first token."""
        num = 0
        for block in arrival.blocks if worker.blocks else ():
            if block not in worker.blocks:
                break
            num += BLOCK_TOKENS
        return min(num, arrival.num_input - 1)

    def _keep_blocks(self, worker: _PredictedWorker, arrival: RequestArrival) -> None:
        for block in arrival.blocks:
            worker.blocks[block] = None
            worker.blocks.move_to_end(block)
        while len(worker.blocks) * BLOCK_TOKENS > self._kv_limit:
            worker.blocks.popitem(last=False)

    def _transfer_seconds(self, arrival: RequestArrival) -> float:
        """Of the KV of a prompt, from its prefill worker to its group."""
        return self._deployment.prefill_link.seconds(arrival.num_input * self._deployment.model.kv_bytes)

    def _pulled(self, now: float, argument: tuple[_PredictedWorker, PredictedRequest]) -> None:
        worker, request = argument
        worker.pulling -= 1
        worker.running.append(request)
        self._start_step(now, worker)

    # --- steps -------------------------------------------------------------------------------------------------------------

    def _start_step(self, now: float, worker: _PredictedWorker) -> None:
        if worker.step is not None:
            return
        deployment = self._deployment
        while worker.waiting and len(worker.running) + worker.pulling < deployment.max_num_seqs and self._has_kv(worker):
            worker.running.append(worker.waiting.popleft())
        left, parts, rows, kv_tokens = deployment.max_batched_tokens, list[tuple[PredictedRequest, int]](), 0, 0
        largest = deployment.rows_per_sequence  # rows of a request
        scores = sampled = 0  # sampled: rows whose logits are computed: none of a prompt that is not whole
        for request in worker.running:
            if not request.num_tokens or left < deployment.rows_per_sequence:
                continue
            parts.append((request, 0))
            rows, left = rows + deployment.rows_per_sequence, left - deployment.rows_per_sequence
            sampled += deployment.rows_per_sequence
            context = request.arrival.num_input + request.num_tokens
            kv_tokens, scores = kv_tokens + context, scores + context
        for request in worker.running:
            missing = request.arrival.num_input - request.num_computed
            if request.num_tokens or not missing or not left:
                continue
            taken = min(missing, left)
            if request.started != request.started:
                request.started = now
            parts.append((request, taken))
            rows, left, largest = rows + taken, left - taken, max(largest, taken)
            sampled += taken == missing
            kv_tokens += request.num_computed + taken
            scores += taken * request.num_computed + taken * (taken + 1) // 2
        if not parts:
            return
        load = StepLoad(rows, kv_tokens, scores, max(1, sampled))  # 0 would mean all
        micro_batches = max(1, min(deployment.micro_batches, rows // largest))  # each request is in one of them
        own = call_seconds(deployment, worker.group.times, load)
        worker.step = _ModelledStep(parts, load, own, micro_batches, now)
        self._stepping[worker.group.name] = worker
        self._sum_rows, self._sum_kv = self._sum_rows + rows, self._sum_kv + kv_tokens
        self._own[worker.group.name] = self._own.get(worker.group.name, 0.0) + own
        self._num_steps, self._step_rows = self._num_steps + 1, self._step_rows + rows
        if (decoding := sum(not taken for _, taken in parts)) > 0:
            self._num_decode_steps, self._num_decoding = self._num_decode_steps + 1, self._num_decoding + decoding
        self._time_steps(now, worker)

    def _time_steps(self, now: float, changed: _PredictedWorker) -> None:
        """Find when running steps end, after one has begun or ended. Where many run, one more or less changes nothing for the others."""
        others = len(self._stepping) - 1
        for worker in self._stepping.values() if len(self._stepping) <= MAX_RETIMED else [changed]:
            if (step := worker.step) is None:
                continue
            other_rows, kv_tokens = (self._sum_rows - step.load.rows) / max(1, others), self._sum_kv / (1 + others)
            seconds = self._table.seconds(step.own, step.load.rows, step.micro_batches, others, other_rows, kv_tokens)
            step.left, step.since = max(0.0, step.left - (now - step.since) / step.seconds), now
            step.seconds, step.version = seconds, step.version + 1
            self._at(now + step.left * seconds, self._end_step, (worker, step, step.version))

    def _has_kv(self, worker: _PredictedWorker) -> bool:
        """Whether the tokens of all sequences that run, and of the next one, have room: each keeps room for its whole output."""
        used = sum(each.arrival.num_input + each.arrival.num_output for each in worker.running)
        following = worker.waiting[0].arrival
        return used + following.num_input + following.num_output <= self._kv_limit

    def _end_step(self, now: float, argument: tuple[_PredictedWorker, _ModelledStep, int]) -> None:
        worker, step, version = argument
        if version != step.version:  # it takes longer or shorter since this was planned
            return
        self._sum_rows -= step.load.rows
        self._sum_kv -= step.load.kv_tokens
        has_changed, num_next = False, 0
        for request, taken in step.parts:
            if taken:
                request.num_computed += taken
                worker.num_uncomputed -= taken
                if request.num_computed < request.arrival.num_input:
                    continue
                has_changed = True
                self._note_tokens(now, worker, request, 1)
                if worker.stage == "prefill" and request.num_tokens < request.arrival.num_output:
                    self._leave(worker, request)
                    self._ready.append(request)
                    continue
            else:
                request.progress += self._deployment.tokens_per_step
                gained = min(int(request.progress), request.arrival.num_output - request.num_tokens)
                request.progress -= int(request.progress)
                self._note_tokens(now, worker, request, gained)
            if request.num_tokens >= request.arrival.num_output:
                has_changed = True
                request.ended = now
                self._leave(worker, request)
                self._num_ended += 1
                self._on_progress(self._num_ended, len(self._requests))
                num_next += self._traffic.concurrency is not None
        worker.step = None
        del self._stepping[worker.group.name]
        self._start_step(now, worker)
        if worker.step is None:
            self._time_steps(now, worker)
        if has_changed:  # gateway and clients hear of a step when the next one has begun
            self._place(now)
        for _ in range(num_next):
            self._arrive_next(now)

    def _note_tokens(self, now: float, worker: _PredictedWorker, request: PredictedRequest, num: int) -> None:
        if not num:
            return
        if not request.num_tokens:
            request.first = request.ended = now
            self._num_here -= 1
        else:
            request.gaps.append(now - request.ended)
            request.gaps += [0.0] * (num - 1)  # tokens of one step come together
            request.ended = now
        request.num_tokens += num
        worker.num_output -= num

    def _leave(self, worker: _PredictedWorker, request: PredictedRequest) -> None:
        worker.running.remove(request)
        worker.num_output -= request.arrival.num_output - request.num_tokens
        worker.kv_tokens -= request.arrival.num_input + request.arrival.num_output

    # --- the result --------------------------------------------------------------------------------------------------------

    def _result(self) -> TrafficTimes:
        requests = self._requests
        begin = min(each.arrived for each in requests)
        mean_rows = self._step_rows / max(1, self._num_steps)
        decoding = max(1.0, self._num_decoding / max(1, self._num_decode_steps))
        num_input, num_output = self._traffic.tokens
        seconds = max(each.ended for each in requests) - begin
        return TrafficTimes(
            seconds,
            np.array([each.arrival.num_input for each in requests]),
            np.array([each.first - each.arrived for each in requests]),
            np.array([each.ended - each.arrived for each in requests]),
            np.array([each.started - each.arrived for each in requests]),
            np.array([gap for each in requests for gap in each.gaps]),
            sum(each.arrival.num_input for each in requests),
            sum(each.num_tokens for each in requests),
            self._max_waiting,
            mean_rows,
            step_times(self._deployment, decoding, num_input + num_output / 2, seed=self._seed, apart=self._apart),
            {name: spent / seconds for name, spent in self._own.items()},
        )


def _num_sequences(worker: _PredictedWorker) -> int:
    return len(worker.running) + len(worker.waiting) + worker.pulling
