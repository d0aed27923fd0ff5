"""Probes the hosts of a graph: a process on each reports what it has, connects to those of the other hosts, and measures the way to them.

`flowrt doctor --hosts GRAPH` prints the result. The probes are started, reached and ended like the workers of a run, at its addresses and
ports, and over its transport. Times are of round trips, so no two clocks are compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from flowrt.errors import WorkerDiedError, named_error
from flowrt.graph.model import Graph
from flowrt.graph.settings import HostSettings
from flowrt.hosts.backend import HostsBackend
from flowrt.hosts.messages import own_version
from flowrt.seams import Seams
from flowrt.system.process_backend import ProcessSpec, WorkerProcess
from flowrt.transports.contract import Channel, Identity, Limits, Listener, Transport
from flowrt.transports.errors import TransportError
from flowrt.transports.registry import known_schemes, unavailable_reason
from flowrt.transports.wire.message import Message, Tensor, TensorSpec

BULK_BYTES = 1 << 20
ROUND_TRIPS, NUM_BULK = 200, 64  # small messages, and messages of BULK_BYTES
LIMITS = Limits(max_message_bytes=BULK_BYTES)
REACH_SECONDS = 10.0  # time limit for the connection to another host
EXIT_SECONDS = 5.0  # from the end of a probe's connection to the notice of its exit
_NAME = "probe"
T = TypeVar("T", bound=msgspec.Struct)


class ProbeStart(msgspec.Struct, frozen=True):
    """To a probe: the transports between hosts, and the key of all probes."""

    schemes: tuple[str, ...]
    key: bytes


class HostFacts(msgspec.Struct, frozen=True):
    """What a host has. `missing`: by scheme, why a transport does not work there. `addresses`: by scheme, where its probe listens."""

    flowrt: str
    python: str
    system: str
    missing: dict[str, str]
    addresses: dict[str, str]


class PeerRequest(msgspec.Struct, frozen=True):
    """Measure the way to the probe that listens at this address of a transport."""

    scheme: str
    address: str


class PeerMeasured(msgspec.Struct, frozen=True):
    """`one_way_seconds`: half of the median round trip. `bytes_per_second`: of large messages. `error`: why there is no way, else ""."""

    one_way_seconds: float = 0.0
    bytes_per_second: float = 0.0
    error: str = ""


@dataclass
class HostReport:
    """`facts` by host; `ways` by source host, target host and scheme."""

    facts: dict[str, HostFacts] = field(default_factory=dict)
    ways: dict[tuple[str, str, str], PeerMeasured] = field(default_factory=dict)


# In the process of a probe.


async def run_probe(control: Channel, seams: Seams) -> None:
    """Report the facts of this host, respond to the probes of others, and measure the way to each that is requested."""
    start = (await control.recv()).decode_header(ProbeStart)
    missing = {each: reason for each in known_schemes() if (reason := unavailable_reason(each)) is not None}
    async with contextlib.AsyncExitStack() as stack:
        listeners = dict[str, Listener]()
        for scheme in start.schemes:
            try:
                transport = seams.transport(scheme)
                listening = transport.listen(transport.address_at(seams.host_address), LIMITS, start.key, Identity(_NAME))
                listeners[scheme] = await stack.enter_async_context(await listening)
            except TransportError as error:
                missing[scheme] = str(error)
        addresses = {scheme: listener.address for scheme, listener in listeners.items()}
        system = f"{platform.system()} {platform.release()} {platform.machine()}"
        await control.send(Message("facts", header=HostFacts(own_version(), platform.python_version(), system, missing, addresses)))
        async with asyncio.TaskGroup() as tasks:
            accepting = [tasks.create_task(_respond_all(listener)) for listener in listeners.values()]
            with contextlib.suppress(TransportError):
                while True:
                    request = (await control.recv()).decode_header(PeerRequest)
                    measured = await _measure(request.address, start.key, seams.transport(request.scheme), seams)
                    await control.send(Message("measured", header=measured))
            for each in accepting:
                each.cancel()


async def _respond_all(listener: Listener) -> None:
    async with asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(_respond(await listener.accept()))


async def _respond(channel: Channel) -> None:
    """Respond to each small message, and to the last of the large ones."""
    async with channel:
        with contextlib.suppress(TransportError):
            while True:
                message = await channel.recv()
                if message.kind != "bulk":
                    await channel.send(Message(message.kind))


async def _measure(address: str, key: bytes, transport: Transport, seams: Seams) -> PeerMeasured:
    now, trips, data = seams.clock.now, list[float](), bytearray(BULK_BYTES)
    bulk = Message("bulk", tensors=(Tensor(TensorSpec("uint8", (BULK_BYTES,)), data),))
    try:
        async with asyncio.timeout(REACH_SECONDS):
            channel = await transport.connect(address, LIMITS, key, Identity(_NAME))
        async with channel:
            for _ in range(ROUND_TRIPS):
                began = now()
                await channel.send(Message("trip"))
                await channel.recv()
                trips.append(now() - began)
            began = now()
            for _ in range(NUM_BULK):
                await channel.send(bulk)
            await channel.send(Message("trip"))
            await channel.recv()
            return PeerMeasured(statistics.median(trips) / 2, NUM_BULK * BULK_BYTES / (now() - began))
    except TimeoutError:
        return PeerMeasured(error=f"no answer within {REACH_SECONDS:g} s")
    except TransportError as error:
        return PeerMeasured(error=str(error))


# In the process that asks for the report.


class _Owner:
    """See BackendOwner. `died`: the first probe that has ended, with the reason."""

    def __init__(self) -> None:
        self.died: asyncio.Future[WorkerDiedError] = asyncio.get_running_loop().create_future()

    def on_dying(self, process: WorkerProcess, how: str) -> None:
        return

    def on_exited(self, process: WorkerProcess, how: str) -> None:
        if not self.died.done():
            self.died.set_result(WorkerDiedError(process.spec.name, how, process.output_tail()))

    def on_backend_lost(self, how: str) -> None:
        return

    def on_output(self, name: str, line: str) -> None:
        return


async def probe_hosts(settings: HostSettings, seams: Seams, scheme: str, schemes: tuple[str, ...], seconds: float) -> HostReport:
    """Probe all hosts, and measure one way after another with each of `schemes`. `scheme`: of the connections to the hosts. Raises
    UserError and WorkerDiedError for a host that cannot be used."""
    names = {f"{_NAME}.{number}": host for number, host in enumerate(settings.names)}
    graph, owner, start = Graph({}, {}, hosts=settings, process_hosts=names), _Owner(), ProbeStart(schemes, seams.new_key())
    try:
        async with asyncio.TaskGroup() as tasks:
            run = graph, seams, scheme, tasks.create_task, seams.new_incarnation()
            backend = await HostsBackend.open(*run, owner, (__name__,), len(names), seconds)
            try:
                return await _probe(backend, names, owner, start)
            finally:
                await backend.aclose()
    except ExceptionGroup as group:
        raise named_error(group) from None


async def _probe(backend: HostsBackend, names: Mapping[str, str], owner: _Owner, start: ProbeStart) -> HostReport:
    report, controls = HostReport(), dict[str, Channel]()
    try:
        for name, host in names.items():
            process = await backend.start(ProcessSpec(name, (Identity(name),), f"{__name__}:run_probe"))
            (controls[host],) = process.controls
            report.facts[host] = await _request(controls[host], owner, start, HostFacts)
        for source, control in controls.items():
            for target, facts in report.facts.items():
                for scheme in report.facts[source].addresses if target != source else ():
                    if (address := facts.addresses.get(scheme)) is not None:
                        measured = await _request(control, owner, PeerRequest(scheme, address), PeerMeasured)
                        report.ways[source, target, scheme] = measured
    finally:
        for control in controls.values():
            await control.aclose()
    return report


async def _request(control: Channel, owner: _Owner, request: msgspec.Struct, response: type[T]) -> T:
    try:
        await control.send(Message(_NAME, header=request))
        return (await control.recv()).decode_header(response)
    except TransportError as error:
        await asyncio.wait([owner.died], timeout=EXIT_SECONDS)
        raise owner.died.result() if owner.died.done() else WorkerDiedError(control.peer.name, f"has left: {error}") from None
