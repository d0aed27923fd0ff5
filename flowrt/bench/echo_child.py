"""The process of a peer that echoes: ucxx, Ray's compiled graphs or xoscar, each as its own examples would have it.

Here: a first line of facts, then for each line {"rounds", "bytes"} that comes on standard input, a line {"seconds": [...]}, one per
round trip; no rounds is the end. Not here: who asks (installed.py). Run as a module, once for each end of ucxx.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

from flowrt.bench.operators import check


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def requests() -> Iterator[tuple[int, int]]:
    """(rounds, bytes) until the end; reading blocks, so that nothing of the peer runs in between."""
    for line in sys.stdin:
        request = json.loads(line)
        if not request["rounds"]:
            return
        yield request["rounds"], request["bytes"]


def ray() -> None:
    """An actor behind a compiled graph: Ray's fastest way between two processes of a machine."""
    import ray
    from ray.dag import InputNode

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    class Echo:
        def echo(self, payload: Any) -> Any:
            check(payload)
            return payload

    with InputNode() as node:
        graph = ray.remote(Echo).remote().echo.bind(node)
    graph = graph.experimental_compile()
    say(version=ray.__version__)
    for num_rounds, num_bytes in requests():
        payload = np.ones(num_bytes, np.uint8)
        times = []
        for _ in range(num_rounds):
            start = time.perf_counter()
            check(ray.get(graph.execute(payload)))
            times.append(time.perf_counter() - start)
        say(seconds=times)
    graph.teardown()
    ray.shutdown()
    say()


async def xoscar() -> None:
    """A call of an actor in another process of a pool."""
    import xoscar

    from flowrt.bench.xoscar_actor import Echo

    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    strategy = xoscar.allocate_strategy.ProcessIndex(1)
    echo = await xoscar.create_actor(Echo, address=pool.external_address, uid="echo", allocate_strategy=strategy)
    say(version=xoscar.__version__)
    for num_rounds, num_bytes in requests():
        payload = np.ones(num_bytes, np.uint8)

        async def once(payload: Any = payload) -> None:
            check(await echo.echo(payload))

        say(seconds=await _timed(once, num_rounds))
    await pool.stop()
    say()


async def ucxx(port: int | None) -> None:
    """One end of bare endpoints, buffers made once: without a port the one that answers, which says where it listens."""
    os.environ.setdefault("UCXPY_PROGRESS_MODE", "blocking")  # as fast as polling, and no thread spins
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # standard output is for our lines
    import ucxx

    came: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    if port is None:
        listener = ucxx.create_listener(came.set_result)
        say(port=listener.port)
        endpoint = await came
    else:
        endpoint = await ucxx.create_endpoint("127.0.0.1", port)
        say(version=ucxx.__version__)
    for num_rounds, num_bytes in requests():
        payload, into = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)

        async def ask(payload: Any = payload, into: Any = into) -> None:
            await endpoint.send(payload)
            await endpoint.recv(into)
            check(into)

        async def answer(into: Any = into) -> None:
            await endpoint.recv(into)
            check(into)
            await endpoint.send(into)

        say(seconds=await _timed(answer if port is None else ask, num_rounds))
    endpoint.abort()
    say()


async def _timed(once: Callable[[], Awaitable[None]], num_rounds: int) -> list[float]:
    times = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        await once()
        times.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    if sys.argv[1] == "ray":
        ray()
    elif sys.argv[1] == "xoscar":
        asyncio.run(xoscar())
    else:
        asyncio.run(ucxx(int(sys.argv[2]) if len(sys.argv) > 2 else None))
