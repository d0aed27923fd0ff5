"""Reads what a user asks of a plan: hardware, limits and traffic, with units. Pure but for reading cards."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from os.path import exists, isfile
from pathlib import Path

from flowrt.costs.devices import Cluster, NodeGroup, cluster_names, device_names, read_cluster, read_device
from flowrt.costs.quantities import read_quantity
from flowrt.errors import UserError, nearest, shown
from flowrt.planner.instances import Slo, Workload
from flowrt.planner.traffic import Traffic
from flowrt.text_files import TextFileError, read_text_file

_NODES = re.compile(r"([1-9][0-9]{0,5}) ?x ?(\S+)")
_SLO_KEYS = ("ttft", "itl")
MAX_DEVICES = 1 << 17
MAX_NODE_GROUPS = 8  # of different nodes: every two of them are tried together


def read_hardware(text: str) -> Cluster:
    """A cluster card by name or path; a device card, which stands for one node of it; or nodes, as "4xh20,2xl40s".

    Raises UserError for anything else, with the names that exist and the closest one.
    """
    parts = [part.strip() for part in text.split(",")]
    if all(_NODES.fullmatch(part) for part in parts):
        groups = []
        for part in parts:
            count, name = _NODES.fullmatch(part).groups()  # type: ignore[union-attr]
            groups.append(_nodes(name, int(count)))
        found = Cluster(text, tuple(groups))
    elif text in device_names() or (isfile(text) and text not in cluster_names() and not _has_nodes(Path(text))):
        found = Cluster(Path(text).stem, (_nodes(text, 1),))
    elif text in cluster_names() or exists(text):
        found = read_cluster(text)
    else:
        known = (*cluster_names(), *device_names())
        listed = f"clusters: {', '.join(cluster_names())}; devices: {', '.join(device_names())}"
        hint = nearest(text, known)
        closest = f"{hint} " if hint.startswith("did you mean") else ""
        raise UserError(f"--hardware {shown(text)}: no such cluster or device; {closest}Known {listed}; or write 4xh20,2xl40s (nodes)")
    merged = list[NodeGroup]()
    for group in found.groups:
        like = next((each for each in merged if replace(each, nodes=group.nodes) == group), None)
        if like is None:
            merged.append(group)
        else:
            merged[merged.index(like)] = replace(like, nodes=like.nodes + group.nodes)
    found = replace(found, groups=tuple(merged))
    if len(merged) > MAX_NODE_GROUPS:
        raise UserError(f"--hardware {shown(text)}: has {len(merged)} kinds of nodes, at most {MAX_NODE_GROUPS} can be planned together")
    if found.num_devices > MAX_DEVICES:
        raise UserError(f"--hardware {shown(text)}: has {found.num_devices} devices, at most {MAX_DEVICES} can be planned")
    return found


def _nodes(name: str, count: int) -> NodeGroup:
    device = read_device(name)
    return NodeGroup(device, count, device.devices_per_node, device.within, device.between)


def _has_nodes(path: Path) -> bool:
    """Whether a card of the user's is a cluster's."""
    try:
        return re.search(r"^nodes:", read_text_file(path), re.MULTILINE) is not None
    except TextFileError:
        return True  # reading it as a cluster says what is wrong


def read_slo(text: str) -> Slo:
    """ "ttft=2s,itl=50ms": each may be left out. Raises UserError for other keys, a missing unit, and a limit of 0."""
    found = dict[str, float]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in _SLO_KEYS:
            raise UserError(f"--slo {shown(text)}: unknown key {shown(name)}; {nearest(name, _SLO_KEYS)}, as in ttft=2s,itl=50ms")
        if name in found:
            raise UserError(f"--slo {shown(text)}: {name} is given twice; leave one out")
        seconds = read_quantity(value, "s", f"--slo {name}")
        if seconds <= 0:
            raise UserError(f"--slo {name}: is {shown(value)}; a time above 0 is needed, as in itl=50ms")
        found[name] = seconds
    return Slo(**found)


def workload_of(traffic: Traffic, text: str) -> Workload:
    """The steady state of traffic. Raises UserError for traffic without a rate."""
    if not math.isfinite(traffic.rate):
        raise UserError(
            f"--traffic {shown(text)}: a plan needs requests per second; give rate=..., or a trace whose requests come one by one"
        )
    inputs = [each.num_input for each in traffic.arrivals]
    mean, (num_input, num_output) = sum(inputs) / len(inputs), traffic.tokens
    variation = sum((each - mean) ** 2 for each in inputs) / len(inputs) / mean**2
    return Workload(num_input, max(1.0, num_output), traffic.rate, variation)
