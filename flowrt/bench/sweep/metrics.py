"""The metrics of sweeps: what a run of a variant gives, and equations for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrt.bench.measure.modelled import ModelledRun
from flowrt.bench.report.figures import nearest_rank
from flowrt.costs.ping_pong import PingPong
from flowrt.costs.work import FiringLoad
from flowrt.errors import UserError
from flowrt.graph.model import Graph, role_of
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import ModelConfig
from flowrt.planner.deployment import deployment_of
from flowrt.planner.requests import TrafficTimes

PERCENTILES = (50, 90, 99)
DECODE, TRAFFIC = "decode", "traffic"


@dataclass(frozen=True)
class MeasuredVariant:
    """One run of a variant: of traffic, or of decoding `batch` sequences. `at` and `below_tokens` are those of the figure."""

    graph: Graph
    run: Any
    batch: int = 0
    at: str = ""
    below_tokens: int | None = None

    @property
    def config(self) -> ModelConfig:
        assert self.graph.model is not None
        return read_model_config(Path(self.graph.model.path))


@dataclass(frozen=True)
class Metric:
    """`of`: the section of a sweep file whose runs have it. Names in `_seconds` are reported in `unit`, by this `factor`."""

    of: str
    words: str
    unit: str
    value: Callable[[MeasuredVariant], float]
    factor: float = 1.0


def busy_share(measured: MeasuredVariant) -> float:
    """Of a process, or the mean of those of a role."""
    run: ModelledRun = measured.run
    return run.busy[measured.at] if measured.at in run.busy else run.busy_share(measured.at)


def sent_per_layer(measured: MeasuredVariant) -> tuple[float, float]:
    """Messages and bytes of a step of a group, per layer, on the edges that begin with the node `at`, or on all."""
    sent: Mapping[str, tuple[float, float]] = measured.run.sent
    sender = f".{measured.at}." if measured.at else "."
    found = [each for edge, each in sent.items() if sender in edge.partition(" -> ")[0]]
    if not found:
        raise UserError(f"no edge begins with a node {measured.at!r}")
    messages, num_bytes = (sum(column) / measured.config.num_layers for column in zip(*found, strict=True))
    return messages, num_bytes


def ping_pong_of(measured: MeasuredVariant) -> PingPong:
    """The times of a micro-batch of one group in one layer."""
    deployment = deployment_of(measured.graph, measured.config)
    if not deployment.servers:
        raise UserError("the ping-pong pipeline needs expert servers")
    rows = measured.batch / len(deployment.groups) / deployment.micro_batches
    pairs = rows * deployment.model.num_experts_per_token / len(deployment.servers)
    link, num_bytes = deployment.link, deployment.dispatch_bytes.of(rows, pairs)
    return PingPong(
        deployment.groups[0].times.seconds("attention", FiringLoad(rows)),
        deployment.servers[0].times.seconds("experts", FiringLoad(pairs)),
        link.latency_seconds + link.busy_seconds(num_bytes),
    )


def _off_ping_pong(measured: MeasuredVariant) -> float:
    expected = ping_pong_of(measured).step_seconds(measured.graph.micro_batches, measured.config.num_layers)
    return abs(float(measured.run.mean_step_seconds) / expected - 1)


def _exposed_exchange(measured: MeasuredVariant) -> float:
    run: ModelledRun = measured.run
    waiting = (1 - run.busy_share("experts")) * run.mean_step_seconds / measured.config.num_layers
    return waiting / ping_pong_of(measured).exchange_seconds


def _percentile(name: str, share: int) -> Callable[[MeasuredVariant], float]:
    def value(measured: MeasuredVariant) -> float:
        run: TrafficTimes = measured.run
        values = run.first_tokens if name == "first_token" else run.gaps
        if measured.below_tokens is not None:
            values = run.first_tokens[run.num_inputs < measured.below_tokens]
        if not len(values):
            raise UserError(f"no request has a prompt below {measured.below_tokens} tokens")
        return nearest_rank(values.tolist(), share / 100)

    return value


def _messages_per_server(measured: MeasuredVariant) -> float:
    return sent_per_layer(measured)[0] / sum(role_of(name) == "experts" for name in measured.graph.process_names())


METRICS: dict[str, Metric] = {
    "tokens_per_second": Metric(DECODE, "tokens per second", "tokens/s", lambda measured: measured.run.tokens_per_second),
    "step_seconds": Metric(DECODE, "decode step", "us", lambda measured: measured.run.mean_step_seconds, 1e6),
    "median_step_seconds": Metric(DECODE, "step of most sequences", "us", lambda each: statistics.median(each.run.step_seconds), 1e6),
    "busy_share": Metric(DECODE, "busy share", "", busy_share),
    "messages_per_layer": Metric(DECODE, "messages of a group per layer", "", lambda measured: sent_per_layer(measured)[0]),
    "messages_per_server": Metric(DECODE, "messages of a group per layer", "of one per server", _messages_per_server),
    "bytes_per_layer": Metric(DECODE, "bytes of a layer", "KiB", lambda measured: sent_per_layer(measured)[1], 1 / 1024),
    "off_ping_pong": Metric(DECODE, "step, off the equation", "", _off_ping_pong),
    "exposed_exchange": Metric(DECODE, "exposed exchange", "of T_c", _exposed_exchange),
    "output_tokens_per_second": Metric(TRAFFIC, "output tokens per second", "tokens/s", lambda each: each.run.output_per_second),
}
for _name, _words in (("first_token", "first token"), ("inter_token", "inter-token latency")):
    for _share in PERCENTILES:
        METRICS[f"{_name}_p{_share}_seconds"] = Metric(TRAFFIC, f"{_words} p{_share}", "ms", _percentile(_name, _share), 1e3)
