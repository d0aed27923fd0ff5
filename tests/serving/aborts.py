"""`make aborts`: opens many connections to a real server and aborts each at a random point, beside clients that are slow on purpose.

Before, it measures how soon a request is freed everywhere when its client leaves in its stream. Nothing may be left of any: no request,
page, descriptor or task, and a request afterwards has the tokens that it had before. Exit code 1 when something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import sys
import time
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from serving.server_process import Server, completion_request, metrics_of  # noqa: E402

from flowrt.bench.report.figures import nearest_rank  # noqa: E402

AT_ONCE = 32
MAX_READ_BYTES = 3000  # that a client reads before it leaves
SETTLE_SECONDS = 20.0
LONG = {"max_tokens": 120, "n": 8}  # so that a request whose client has left would go on for long


def request(number: int, **more: int) -> bytes:
    texts = ("Once upon a time", "What is 1 + 2?", "Count from 3 to 11", "The dog")
    fields = {"prompt": texts[number % 4], "max_tokens": 60, "ignore_eos": True, "temperature": 1, "seed": number % 4, "stream": True}
    return completion_request(fields | more)


async def text_of(port: int, number: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(number))
    data = await reader.read(-1)
    writer.close()
    if b"[DONE]" not in data or b'"error"' in data:
        raise AssertionError(f"a stream failed: {data[-300:]!r}")
    return "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', data.decode()))


async def abort(port: int, number: int, rng: random.Random) -> None:
    """Send a part of a request or all of it, read a part of the response or nothing, and reset the connection."""
    data = request(number)
    cut = rng.randrange(len(data) + 1) if rng.random() < 0.5 else len(data)
    reads = rng.randrange(1, MAX_READ_BYTES) if cut == len(data) and rng.random() < 0.7 else 0
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data[:cut])
        if reads:
            await reader.read(reads)
        writer.transport.abort()
    except OSError:
        pass


async def slow(port: int, number: int) -> str:
    """A client that sends a byte of its head, or of its body, per second, or nothing, until it is cut off. Returns what it was sent."""
    kind = ("head", "body", "nothing", "huge head")[number % 4]
    data = request(number)
    at = {"head": 10, "body": len(data) - 20, "nothing": 0, "huge head": 0}[kind]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /ready HTTP/1.1\r\nx: " + b"y" * (64 << 10) if kind == "huge head" else data[:at])
    ended = asyncio.ensure_future(reader.read(-1))
    while not ended.done() and at < len(data):
        await asyncio.wait({ended}, timeout=1.0)
        if kind in ("head", "body"):
            writer.write(data[at : at + 1])
            at += 1
    writer.close()
    try:
        return f"{kind}: {(await ended)[:12].decode()}"
    except OSError:
        return f"{kind}: reset"


def holding(server: Server) -> dict[str, tuple[int, int]]:
    """Descriptors and MiB of memory of the launcher and the front end."""
    pids = {"launcher": server.process.pid, "front end": server.pids["front_end.0"]}
    return {name: (psutil.Process(pid).num_fds(), psutil.Process(pid).memory_info().rss >> 20) for name, pid in pids.items()}


def left(server: Server) -> dict[str, float]:
    names = ("flowrt_requests_active", "flowrt_kv_pages_used", "flowrt_group_running_sequences")
    return {name: value for name, value in metrics_of(server).items() if name.startswith(names) and value}


async def freed_seconds(server: Server, number: int) -> float:
    """From the moment at which a client leaves, whose stream has begun, until no group has anything of its request. The scrape that sees it
    is included."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request(number, **LONG))
    await reader.readuntil(b"data: ")
    began = time.monotonic()
    writer.transport.abort()
    await asyncio.sleep(0)  # now the connection is closed
    while left(server):
        pass
    return time.monotonic() - began


async def whole_seconds(server: Server) -> float:
    """Of such a request that goes to its end."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request(0, **LONG))
    await reader.read(-1)
    writer.close()
    return time.monotonic() - began


async def measure(server: Server, number: int, num_slow: int, num_leaving: int, seed: int) -> bool:
    port, rng, slots = server.port, random.Random(seed), asyncio.Semaphore(AT_ONCE)
    expected = await text_of(port, 0)
    whole = await whole_seconds(server)
    freed = [await freed_seconds(server, index) for index in range(num_leaving)]
    step = f"a step takes {whole / LONG['max_tokens'] * 1e3:.1f} ms, the whole request {whole * 1e3:.0f} ms"
    quantiles = ", ".join(f"p{share * 100:g} {nearest_rank(freed, share) * 1e3:.1f} ms" for share in (0.5, 0.99))
    print(f"{num_leaving} clients left in a stream; freed everywhere after {quantiles} ({step})", flush=True)
    before, began = holding(server), time.monotonic()

    async def one(index: int) -> None:
        async with slots:
            await abort(port, index, rng)

    slow_ones = [asyncio.ensure_future(slow(port, index)) for index in range(num_slow)]
    await asyncio.gather(*map(one, range(number)))
    seconds = time.monotonic() - began
    assert await text_of(port, 0) == expected, "tokens changed while slow clients were connected"
    cut_off = await asyncio.gather(*slow_ones)
    deadline = time.monotonic() + SETTLE_SECONDS
    while (still := left(server)) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    after = holding(server)
    print(f"{number} connections aborted in {seconds:.1f} s")
    print(f"slow clients: {', '.join(f'{cut_off.count(each)} {each}' for each in sorted(set(cut_off)))}")
    print(f"left: {still or 'nothing'}; (descriptors, MiB) before {before}, after {after}")
    assert await text_of(port, 0) == expected, "tokens changed"
    return not still and all(after[name][0] <= before[name][0] for name in before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--slow", type=int, default=64)
    parser.add_argument("--leaving", type=int, default=200, help="clients whose time from leaving to freeing is measured")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = Server()
    try:
        return 0 if asyncio.run(measure(server, options.connections, options.slow, options.leaving, options.seed)) else 1
    finally:
        server.process.terminate()
        server.process.wait()
        server.close()


if __name__ == "__main__":
    raise SystemExit(main())
