"""Measures this machine as a device card: its operators, its links, and what the runtime adds beside both."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from flowrt.api import open_graph
from flowrt.bench.cases.graphs import ring
from flowrt.bench.cases.hop import measure_hop, payload_of
from flowrt.bench.cases.small_model import write_small_model
from flowrt.bench.machine import calls
from flowrt.bench.machine.constants import FITTED, FitErrors, MeasuredCall, MeasuredStep, fit_device, fit_link, fit_runtime
from flowrt.bench.machine.shapes import PROFILE_MODEL, TINY_MODEL, RunLoad, read_shape, run_tries, speeds_of, step_seconds, terms_of
from flowrt.bench.measure.benchmark import open_all
from flowrt.bench.measure.decoding import DecodeRun
from flowrt.bench.measure.host_probe import HostReport
from flowrt.bench.peers.process import Peer, start_peer
from flowrt.bench.report.report import Machine, print_progress
from flowrt.costs.devices import CONSTANTS, FIELDS, MEASURED, Device
from flowrt.costs.links import LinkProfile, link_label, profile_of
from flowrt.costs.work import MachineLimits
from flowrt.errors import UserError
from flowrt.graph.show import counted
from flowrt.kinds.device_times import exchange_seconds
from flowrt.launcher.transport_choice import BETWEEN, BETWEEN_HOSTS
from flowrt.system.machine_limits import available_memory_bytes, memory_limit_bytes
from flowrt.transports.registry import unavailable_reason

MESSAGE_BYTES = (64, 64 << 10, 1 << 20, 4 << 20)
LOADS = (RunLoad(1), RunLoad(4), RunLoad(16))  # of the runs that show what the runtime adds
TINY_LOADS = (RunLoad(1, 16, 256),)  # steps so short need many: the client must see tokens come one after another
ROUNDS = 4
NAME = "machine"


@dataclass(frozen=True)
class ProfileOptions:
    """`threads`: of a process; `devices`: such processes that the cores hold. `is_tiny`: sizes with which a profile takes seconds and says
    nothing."""

    threads: int
    devices: int
    dtypes: tuple[str, ...]
    is_tiny: bool = False


@dataclass(frozen=True)
class MachineProfile:
    """A device, and how well it fits what was measured."""

    device: Device
    calls: FitErrors
    by_operator: Mapping[str, FitErrors]
    steps: FitErrors


async def profile_machine(options: ProfileOptions, hosts: HostReport | None = None) -> MachineProfile:
    """Raises UserError when a process of a measurement fails."""
    several = f"{options.devices} processes of {counted(options.threads, 'thread')} compute operators"
    print_progress(several if options.devices > 1 else "operators")
    limits, measured = await _measure_calls(options)
    device = fit_device(_device_of(options, limits), measured)
    print_progress("links between processes")
    sizes = MESSAGE_BYTES[:2] if options.is_tiny else MESSAGE_BYTES
    within = await _measure_link(BETWEEN, sizes)
    between = await _measure_link(BETWEEN_HOSTS, sizes) if hosts is None else _host_link(hosts)
    device = replace(device, within=within, between=between)
    measured = [call for call in measured if call.work.num_flops]
    errors = dict[str, list[float]]()
    for call in measured:
        errors.setdefault(call.operator, []).append(call.error(device))
    every, by_operator = FitErrors.of([*chain(*errors.values())]), {name: FitErrors.of(own) for name, own in errors.items()}
    device, steps = await _measure_runtime(device, options)
    return MachineProfile(device, every, by_operator, steps)


async def _measure_calls(options: ProfileOptions) -> tuple[list[MachineLimits], list[MeasuredCall]]:
    """Limits of each process, all at once, and the calls of the first, while the others do the same."""
    dtypes = [*dict.fromkeys((*options.dtypes, "bfloat16"))]
    starts = (start_peer("a process of the profile", calls.__name__, options.threads, options.is_tiny) for _ in range(options.devices))
    async with open_all(starts) as opened:
        peers = [peer for peer, _ in opened]
        limits = await _at_once(peers, action="limits", dtypes=dtypes)
        times = (await _at_once(peers, action="operators", dtypes=options.dtypes))[0]["times"]
    return [MachineLimits(**each) for each in limits], msgspec.convert(times, list[MeasuredCall])


async def _at_once(peers: Sequence[Peer], **request: Any) -> list[dict[str, Any]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(peer.request(**request)) for peer in peers]
    return [task.result() for task in tasks]


def _device_of(options: ProfileOptions, limits: Sequence[MachineLimits]) -> Device:
    """The facts; its constants are still those with which a fit begins. What it shares with equal devices is divided evenly."""
    facts: dict[str, Any] = dict.fromkeys((FIELDS[name] for name in (*CONSTANTS, *MEASURED)), 0.0)
    shares = {name: 1.0 for name in facts if name.endswith("efficiency")}
    dtypes = limits[0].flops_per_second
    return Device(
        name=NAME,
        family="",
        memory_bytes=(available_memory_bytes() or memory_limit_bytes()) / options.devices,
        bytes_per_second=statistics.median(each.read_bytes_per_second for each in limits),
        flops_per_second={dtype: statistics.median(each.flops_per_second[dtype] for each in limits) for dtype in dtypes},
        within="",
        between="",
        devices_per_node=options.devices,
        **facts | shares,
    )


async def _measure_link(schemes: Sequence[str], sizes: Sequence[int]) -> str:
    """The label of the link that actors of two processes have over the first transport that works."""
    scheme = next((each for each in schemes if unavailable_reason(each) is None), None)
    if scheme is None:
        raise UserError(f"no transport between processes works here: {unavailable_reason(schemes[0])}")
    hops, seconds = ring("many", scheme), dict[int, float]()
    async with open_graph(hops.graph) as graph:
        for num_bytes in sizes:
            measure = measure_hop(graph, hops, payload_of(num_bytes))
            seconds[num_bytes] = statistics.median([await measure() for _ in range(4)][1:]) / 1e6
    return _label(*fit_link(seconds))


def _host_link(report: HostReport) -> str:
    """The label of the slowest way between two hosts by the best transport of each. Raises UserError for hosts that have none."""
    best = dict[tuple[str, str], tuple[float, float]]()
    for (source, target, scheme), way in report.ways.items():
        if not way.error and (way.bytes_per_second, way.one_way_seconds) > best.get((source, target), (0.0, 0.0)):
            best[source, target] = way.bytes_per_second, way.one_way_seconds
        elif way.error and (source, target) not in best:
            print_progress(f"{source} to {target}, {scheme}: {way.error}")
    if not best:
        raise UserError("no host of --hosts reaches another; flowrt doctor --hosts says why")
    bandwidth, latency = min(best.values())
    return _label(latency, bandwidth)


def _label(latency: float, bandwidth: float) -> str:
    numbers = {"latency_seconds": latency, "bandwidth_bytes_per_second": min(bandwidth, 1e15)}
    return link_label({name: float(f"{number:.3g}") for name, number in numbers.items()})


async def _measure_runtime(device: Device, options: ProfileOptions) -> tuple[Device, FitErrors]:
    """The device with what steps, firings and messages of real runs take beside operators and links."""
    loads, rounds = (TINY_LOADS, 1) if options.is_tiny else (LOADS, ROUNDS)
    with TemporaryDirectory(prefix="flowrt-profile-") as folder:
        model = write_small_model(Path(folder), **(TINY_MODEL if options.is_tiny else PROFILE_MODEL))
        graphs = [
            read_shape(model, 1, servers, options.threads, options.dtypes[0]) for servers in ((0, 1, 2) if options.devices > 1 else (0, 1))
        ]
        runs: dict[tuple[int, RunLoad], list[DecodeRun]] = {}
        async with open_all(map(open_graph, graphs)) as running:
            for number in range(rounds):
                print_progress(f"runs of one group and up to {len(graphs) - 1} servers, {number + 1} of {rounds}")
                for (graph, each), load in product(enumerate(running), loads):
                    runs.setdefault((graph, load), []).extend(await run_tries(each, load, 1))
        found = [(graphs[graph], load, load.batch / speeds_of(own).decode) for (graph, load), own in runs.items()]
        steps = [MeasuredStep(took, step_seconds(graph, device, load), terms_of(graph, device, load)) for graph, load, took in found]
        added = fit_runtime(steps)
        device = device.with_constants(added)
        device = replace(device, exchange_seconds=exchange_seconds(device, 2) + device.links[0].latency_seconds)
        errors = FitErrors.of([step_seconds(graph, device, load) / took - 1 for graph, load, took in found])
    return device, errors


def card_text(profile: MachineProfile, machine: Machine, options: ProfileOptions, command: str, hosts: str | None) -> str:
    """The card as YAML."""
    device = profile.device
    about = f"{machine.cores} cores of {machine.cpu}; {command}; " + ", ".join(f"{name} {each}" for name, each in machine.versions.items())
    flops = ", ".join(f"{dtype}: {rate / 1e9:.4g} GFLOPS" for dtype, rate in device.flops_per_second.items())
    lines = [
        f"# {machine.cores} cores of {machine.cpu}: a device is a process of {counted(options.threads, 'thread')}. Its constants fit",
        f"# {profile.calls.count} calls of operators ({profile.calls}) and {profile.steps.count} steps of real runs ({profile.steps}).",
        f"memory: {device.memory_bytes / 1e9:.3g} GB",
        f"bandwidth: {device.bytes_per_second / 1e9:.4g} GB/s",
        f"flops: {{{flops}}}",
        f"within: {_link_text(profile_of(device.within))}",
        f"between: {_link_text(profile_of(device.between))}",
        f"devices_per_node: {device.devices_per_node}",
    ]
    units = {name: unit for name, (unit, _) in (*CONSTANTS.items(), *MEASURED.items())}
    lines += [f"{name}: {_quantity(getattr(device, FIELDS[name]), unit)}" for name, unit in units.items()]
    lines += ["dtypes:"] if device.by_dtype else []
    for dtype, own in device.by_dtype.items():
        lines.append(f"  {dtype}: {{{', '.join(f'{name}: {_quantity(getattr(own, FIELDS[name]), units[name])}' for name in FITTED)}}}")
    between = f"the ways between the hosts of {hosts}" if hosts else f"{BETWEEN_HOSTS[0]} between two processes of this machine"
    sources = {
        "memory": "available when it was measured, divided among all devices",
        "bandwidth": "reading while all devices read, or more where an operator reached it",
        "flops": "products of matrices while all devices compute, or more where an operator reached it",
        "within": "hops between two processes",
        "between": between,
        "devices_per_node": "cores divided by threads",
    }
    return "\n".join([*lines, "sources:", *(f"  {name}: {json.dumps(f'{text}; {about}')}" for name, text in sources.items())]) + "\n"


def _link_text(link: LinkProfile) -> str:
    return f"{{latency: {_quantity(link.latency_seconds, 's')}, bandwidth: {link.bandwidth_bytes_per_second / 1e9:.3g} GB/s}}"


def _quantity(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1e6 * value:.3g} us"
    return f"{value / 1e12:.3g} TFLOPS" if unit == "flop/s" else f"{value:.3g}"
