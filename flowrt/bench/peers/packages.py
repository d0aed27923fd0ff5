"""Echoes of packages that are measured where they are installed: ucxx, Ray's compiled graphs, xoscar's actors."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

import numpy as np

from flowrt.bench.peers.checksum import check
from flowrt.bench.peers.process import Peer, Served, start_peer

NAMES = {"ucxx": "bare ucxx", "ray": "Ray compiled graph", "xoscar": "xoscar actor call"}
Bytes: TypeAlias = np.ndarray[Any, Any]
Opened = AsyncIterator[tuple[dict[str, Any], Callable[[Bytes, Bytes], Awaitable[None]]]]  # facts, one round trip of a payload


class PackageEcho:
    """Round trips between two processes of a package; both ends read and check every byte."""

    def __init__(self, ends: list[Peer]) -> None:
        self._ends = ends

    async def round_trip_seconds(self, num_rounds: int, payload: Any) -> float:
        num_bytes = memoryview(payload).nbytes
        responses = await asyncio.gather(*(end.request(num_rounds=num_rounds, num_bytes=num_bytes) for end in self._ends))
        seconds: list[float] = responses[-1]["seconds"]
        return statistics.median(seconds)


@asynccontextmanager
async def package_echo(package: str) -> AsyncIterator[PackageEcho]:
    async with AsyncExitStack() as stack:
        peer, facts = await stack.enter_async_context(start_peer(NAMES[package], __name__, package))
        ends = [peer]
        if package == "ucxx":  # both of its ends need the number of rounds; the other packages start their second process themselves
            other, _ = await stack.enter_async_context(start_peer(NAMES[package], __name__, package, facts["port"]))
            ends.append(other)
        echo = PackageEcho(ends)
        await echo.round_trip_seconds(10, b"\x01")
        yield echo


def installed_packages() -> tuple[list[str], list[str]]:
    """The packages that can be imported here, and the others."""
    installed = [package for package in NAMES if importlib.util.find_spec(package) is not None]
    return installed, [package for package in NAMES if package not in installed]


@asynccontextmanager
async def open_peer(package: str, *port: str) -> AsyncIterator[Served]:
    opened = {"ucxx": _open_ucxx, "ray": _open_ray, "xoscar": _open_xoscar}[package]
    async with opened(*map(int, port)) as (facts, make_round_trip):

        async def respond(num_rounds: int, num_bytes: int) -> dict[str, Any]:
            payload, received = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
            times = []
            for _ in range(num_rounds):
                start = time.perf_counter()
                await make_round_trip(payload, received)
                times.append(time.perf_counter() - start)
            return {"seconds": times}

        yield facts, respond


@asynccontextmanager
async def _open_ray() -> Opened:
    """An actor behind a compiled graph: Ray's fastest way between two processes of a machine."""
    import ray
    from ray.dag import InputNode

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    class RayEcho:
        def echo(self, payload: Any) -> Any:
            check(payload)
            return payload

    with InputNode() as node:
        graph = ray.remote(RayEcho).remote().echo.bind(node)
    graph = graph.experimental_compile()

    async def make_round_trip(payload: Bytes, received: Bytes) -> None:
        check(ray.get(graph.execute(payload)))

    yield {}, make_round_trip
    graph.teardown()
    ray.shutdown()


@asynccontextmanager
async def _open_xoscar() -> Opened:
    """A call of an actor in another process of a pool."""
    import xoscar

    from flowrt.bench.peers.xoscar_actor import XoscarEcho

    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    strategy = xoscar.allocate_strategy.ProcessIndex(1)
    echo = await xoscar.create_actor(XoscarEcho, address=pool.external_address, uid="echo", allocate_strategy=strategy)

    async def make_round_trip(payload: Bytes, received: Bytes) -> None:
        check(await echo.echo(payload))

    yield {}, make_round_trip
    await pool.stop()


@asynccontextmanager
async def _open_ucxx(port: int | None = None) -> Opened:
    """One end of bare endpoints, buffers made once. Without a port: the end that listens."""
    os.environ.setdefault("UCXPY_PROGRESS_MODE", "blocking")  # as fast as polling, and no thread spins
    import ucxx

    connected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    if port is None:
        listener = ucxx.create_listener(connected.set_result)
    else:
        connected.set_result(await ucxx.create_endpoint("127.0.0.1", port))

    async def make_round_trip(payload: Bytes, received: Bytes) -> None:
        endpoint = await connected
        if port is not None:
            await endpoint.send(payload)
        await endpoint.recv(received)
        check(received)
        if port is None:
            await endpoint.send(received)

    yield {"port": listener.port} if port is None else {}, make_round_trip
    (await connected).abort()
