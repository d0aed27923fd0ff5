"""Checks the section `reliability` of a graph. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from flowrt.graph.document import Path_
from flowrt.graph.model import Graph
from flowrt.graph.recovery import standby_candidates, standby_names, survivable_processes
from flowrt.graph.settings import ReliabilitySettings

MIN_SUSPECT_SECONDS = 0.2  # two heartbeats


def check_reliability(graph: Graph) -> Iterator[tuple[Path_, str]]:
    """Path of a key and what is wrong with its value."""
    settings = graph.reliability
    suspect, dead = settings.suspect_seconds, settings.dead_seconds
    if suspect < MIN_SUSPECT_SECONDS:
        text = f"{suspect:g} s is less than two heartbeats of 0.1 s; write at least {MIN_SUSPECT_SECONDS:g}"
        yield ("reliability", "suspect_seconds"), text
    if dead <= suspect:
        key = "suspect_seconds" if dead == ReliabilitySettings().dead_seconds else "dead_seconds"
        text = f"dead_seconds {dead:g} is not longer than suspect_seconds {suspect:g}; raise dead_seconds"
        yield ("reliability", key), text
    if settings.unavailable_expert == "degrade" and settings.recovery == "off":
        text = "degrade needs a run that continues when a server dies; write recovery: fine"
        yield ("reliability", "unavailable_expert"), text
    if settings.standby:
        yield from _check_standby(graph)
    if settings.request_log and graph.model is None:
        yield ("reliability", "request_log"), "only requests of a model are logged, and this graph serves none; remove the key"
    if not settings.request_log.isprintable():
        yield ("reliability", "request_log"), f"{settings.request_log!r} does not name a folder; write its path"
    if settings.request_log_sync and not settings.request_log:
        yield ("reliability", "request_log_sync"), "there is no request log to sync; write request_log: FOLDER, too"


def _check_standby(graph: Graph) -> Iterator[tuple[Path_, str]]:
    names = standby_names(graph)
    for node in graph.nodes.values():
        if node.process in names:
            yield ("nodes", node.name, "process"), f"{node.process!r} is a standby process; choose another name"
    key = ("reliability", "standby")
    if graph.processes != "many":
        yield key, "a standby process replaces one worker, and processes hold several; write `processes: many`, or standby: 0"
    elif not survivable_processes(graph):
        yield key, "there is no process that the run can lose and a standby process can replace; write standby: 0"
    elif not standby_candidates(graph):
        text = "a standby process replaces only processes on the CPU that share their weights, and there is none"
        yield key, f"{text}; write standby: 0"
