"""`make overload`: sends a real server 1x to 5x the load that it can serve.

First the peak: a closed loop with as many clients as requests are admitted. Then open loops, whose requests come at multiples of the rate
of the peak. Goodput counts tokens of requests that got all their tokens. Prints a line per load: goodput and its share of the peak, how
long refusals took, and memory. During a last load of 3x expert servers are killed: how long after a kill was its death announced?
At the end, with its workers stopped: how much processor time does a refusal take of the launcher and the front end?
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from serving.server_process import STANDS_STILL, Server, completion_request  # noqa: E402

from flowrt.bench.report.figures import nearest_rank  # noqa: E402
from flowrt.system.process_status import process_times  # noqa: E402

TOKENS = 40


@dataclass
class Load:
    """What one load gave until its `end`; later requests that are complete count in `num_late`."""

    end: float
    num_tokens: int = 0
    num_complete: int = 0
    num_late: int = 0
    num_failed: int = 0
    refusal_seconds: list[float] = field(default_factory=list)
    announced_seconds: list[float] = field(default_factory=list)
    mebibytes: int = 0


async def send(port: int, number: int, load: Load) -> None:
    fields = {"prompt": f"Once upon a time {number % 10}", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    began = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(completion_request(fields))
        data = await reader.read(-1)
        writer.close()
    except OSError:
        load.num_failed += 1
        return
    status = data[9:12]
    if status in (b"429", b"503"):
        load.refusal_seconds.append(time.monotonic() - began)
    elif status == b"200" and b"[DONE]" in data and b'"error"' not in data:
        if time.monotonic() > load.end:
            load.num_late += 1
            return
        load.num_complete += 1
        load.num_tokens += TOKENS
    else:
        load.num_failed += 1


class Announcements:
    """Reads the server's standard error: when it announced deaths, and the ids of restarted processes."""

    def __init__(self, server: Server) -> None:
        self._server, self._waiting = server, dict[str, asyncio.Future[float]]()
        self._is_back = dict[str, asyncio.Event]()
        assert server.process.stderr is not None
        self._file = server.process.stderr
        os.set_blocking(self._file.fileno(), False)
        self._rest = ""
        asyncio.get_running_loop().add_reader(self._file.fileno(), self._read)

    def _read(self) -> None:
        now = time.monotonic()
        *lines, self._rest = (self._rest + os.read(self._file.fileno(), 1 << 16).decode()).split("\n")
        for line in lines:
            if (died := re.match(r"flowrt: (\S+) was killed by SIGKILL", line)) and died[1] in self._waiting:
                self._waiting.pop(died[1]).set_result(now)
            if back := re.match(r"flowrt: (\S+) is back after .*, pid (\d+)", line):
                self._server.pids[back[1]] = int(back[2])
                self._is_back[back[1]].set()

    async def kill(self, name: str) -> float:
        """Seconds from the kill to its announcement. Returns when the process is back."""
        self._is_back[name] = asyncio.Event()
        announced = self._waiting[name] = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        os.kill(self._server.pids[name], signal.SIGKILL)
        seconds = await announced - began
        await self._is_back[name].wait()
        return seconds


async def kill_servers(announcements: Announcements, load: Load, servers: int, rng: random.Random) -> None:
    while True:
        load.announced_seconds.append(await announcements.kill(f"experts.{rng.randrange(servers)}"))


async def run_load(server: Server, announcements: Announcements, seconds: float, rate: float | None, clients: int, kills: bool) -> Load:
    """`rate` None: a closed loop of `clients`."""
    load, numbers = Load(time.monotonic() + seconds), itertools.count()

    async def client() -> None:
        while time.monotonic() < load.end:
            await send(server.port, next(numbers), load)

    async with asyncio.TaskGroup() as tasks:
        killing = tasks.create_task(kill_servers(announcements, load, 3, random.Random(3))) if kills else None
        if rate is None:
            await asyncio.gather(*(client() for _ in range(clients)))
        else:
            async with asyncio.TaskGroup() as requests:
                due = time.monotonic()
                while due < load.end:
                    requests.create_task(send(server.port, next(numbers), load))
                    due += 1 / rate
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
        if killing is not None:
            killing.cancel()
    processes = [psutil.Process(pid) for pid in (server.process.pid, server.pids["front_end.0"])]
    load.mebibytes = sum(process.memory_info().rss for process in processes) >> 20
    return load


async def measure(server: Server, seconds: float, clients: int) -> None:
    announcements = Announcements(server)
    await run_load(server, announcements, 2.0, None, clients, False)
    peak = await run_load(server, announcements, seconds, None, clients, False)
    rate, goodput = peak.num_complete / seconds, peak.num_tokens / seconds
    print(f"peak: {goodput:.0f} tokens/s, {rate:.1f} requests/s, {peak.mebibytes} MiB", flush=True)
    for times, kills in ((1, False), (2, False), (3, False), (5, False), (3, True)):
        load = await run_load(server, announcements, seconds, times * rate, clients, kills)
        good = load.num_tokens / seconds
        refused, announced = load.refusal_seconds, load.announced_seconds
        counts = f"{load.num_complete} complete in time, {load.num_late} late, {load.num_failed} failed"
        parts = [f"{times}x: {good:.0f} tokens/s ({good / goodput:.0%} of the peak), {counts}"]
        for values, what in ((refused, "refused"), (announced, "deaths announced")):
            if values:
                parts.append(f"{len(values)} {what}, p99 {nearest_rank(values, 0.99) * 1e3:.1f} ms")
        print(", ".join([*parts, f"{load.mebibytes} MiB"]), flush=True)


def measure_refusals(number: int) -> None:
    server = Server("--set", "serving.max_requests=1", *STANDS_STILL)
    pids = server.process.pid, server.pids["front_end.0"]
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True}
    text, headers = json.dumps(body), {"content-type": "application/json"}

    def used_seconds() -> float:
        return sum(times.loop_cpu_seconds for pid in pids if (times := process_times(pid)) is not None)

    try:
        with server.open_stream(body), server.stopped(*(name for name in server.pids if name.startswith(("attention", "experts")))):
            for keeps in (False, True):
                connection, before = server.connect(), used_seconds()
                for _ in range(number):
                    connection.request("POST", "/v1/completions", text, headers)
                    response = connection.getresponse()
                    assert response.status == 429, response.read()
                    response.read()
                    if not keeps:
                        connection.close()  # the next request opens another one
                connection.close()
                name = "a refusal on a connection that is kept" if keeps else "a refusal with its connection"
                print(f"{name}: {(used_seconds() - before) / number * 1e3:.3f} ms of processor time of the server", flush=True)
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="many times what a request takes")
    parser.add_argument("--clients", type=int, default=32, help="also serving.max_requests")
    parser.add_argument("--refusals", type=int, default=2000, help="of which the processor time is measured")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = Server("--set", f"serving.max_requests={options.clients}", "--set", "reliability.restarts=1000")
    try:
        asyncio.run(measure(server, options.seconds, options.clients))
    finally:
        server.process.terminate()
        server.process.wait()
        server.close()
    measure_refusals(options.refusals)


if __name__ == "__main__":
    main()
