"""Injects faults into a run on several hosts, one after another under load, and counts the tokens that they change. Run by hand:

python tests/hosts/network.py --hosts 3 python tests/hosts/faults.py --workers 100 --servers 30 --ends 20 --partitions 30
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from end_to_end.test_expert_failover import Story
from hosts.network import cut, end_host, host_of, start_host
from left_processes import left_processes
from served_models import NEW_TOKENS, Served, make_served

import flowrt
from flowrt.launcher import events
from flowrt.processes.leftover import marked_processes

PARAMS = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
PAUSE_SECONDS, BACK_SECONDS = 0.2, 180.0


class Load:
    """Eight requests at a time, without end; counts those whose tokens are not the expected ones."""

    def __init__(self, running: flowrt.RunningGraph, served: Served) -> None:
        self.running, self.served, self.counts = running, served, Counter[str]()
        self.is_over = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for prompt, expected in zip(self.served.prompts, self.served.expected, strict=True):
                tasks.create_task(self.repeat(prompt, expected))

    async def repeat(self, prompt: list[int], expected: list[int]) -> None:
        while not self.is_over:
            tokens, reason = [], ""
            async for event in self.running.follow(await self.running.submit(prompt, PARAMS)):
                if isinstance(event, flowrt.TokenEvent):
                    self.counts["misplaced"] += event.index != len(tokens)
                    tokens.append(event.token_id)
                elif isinstance(event, flowrt.EndEvent):
                    reason = event.finish_reason
            self.counts["requests"] += 1
            self.counts["tokens"] += len(tokens)
            self.counts["failed"] += reason != "length"
            self.counts["changed"] += tokens != expected[: len(tokens)]


def server_of(run_id: str, host: str) -> int:
    return next(
        marked.pid
        for marked in marked_processes()
        if marked.run_id == f"{run_id}.{host}" and "flowrt.hosts.server" in psutil.Process(marked.pid).cmdline()
    )


async def inject(kind: str, host: int, run_id: str, story: Story, chance: random.Random) -> float:
    """Inject one fault and wait until the processes that it costs are back. Returns the seconds until the first one was given up."""
    lost, back = len(story.lost), len(story.back)
    server, began = server_of(run_id, f"host.{host}"), time.monotonic()
    machine = host_of(server)
    workers = [child.pid for child in psutil.Process(server).children() if child.name().startswith("fr:")]
    if kind == "worker":
        os.kill(chance.choice(workers), signal.SIGKILL)
    elif kind == "server":
        os.kill(chance.choice([server, psutil.Process(server).ppid()]), signal.SIGKILL)
    elif kind == "end":
        end_host(machine)
        start_host(machine)
    if kind.startswith("partition"):
        with cut(machine, one_way=kind.endswith("one way")):
            await story.until(lambda story: len(story.lost) > lost)
            seconds = time.monotonic() - began
            left = await asyncio.to_thread(left_processes, [server, *workers])
            assert not left, f"{left} go on in a partition"
    else:
        await story.until(lambda story: len(story.lost) > lost)
        seconds = time.monotonic() - began
    async with asyncio.timeout(BACK_SECONDS):
        while len(story.back) - back < len(story.lost) - lost:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return seconds


async def main(options: argparse.Namespace) -> int:
    """Run the faults and print the counts."""
    num_hosts, chance = int(os.environ["FLOWRT_TEST_HOSTS"]), random.Random(options.seed)
    kinds = ["worker"] * options.workers + ["server"] * options.servers + ["end"] * options.ends
    kinds += ["partition", "partition one way"] * (options.partitions // 2)
    chance.shuffle(kinds)
    with tempfile.TemporaryDirectory() as name:
        served, story, seconds = make_served(Path(name), seed=3), Story(), dict[str, list[float]]()
        deploy = {"attention": {"groups": num_hosts}, "experts": {"servers": num_hosts, "replicas": 2}}
        hosts, reliability = {"engine": "ray", "count": num_hosts}, {"restarts": 1000}
        path = served.write(Path(name), deploy, numerics="strict", hosts=hosts, reliability=reliability)

        def note(event: events.Event) -> None:
            story.note(event)
            if text := events.news(event):
                print(f"  {text}", file=sys.stderr, flush=True)

        async with flowrt.open(path, on_event=note) as running:
            run_id, load = running.launcher.run_id, Load(running, served)
            loading = asyncio.create_task(load.run())
            for number, kind in enumerate(kinds):
                await asyncio.sleep(PAUSE_SECONDS)
                host = chance.randrange(1, num_hosts)
                print(f"{number + 1}/{len(kinds)} {kind} of host.{host}", file=sys.stderr, flush=True)
                seconds.setdefault(kind, []).append(await inject(kind, host, run_id, story, chance))
                print(f"  lost after {seconds[kind][-1]:.3f} s; {dict(load.counts)}", file=sys.stderr, flush=True)
            load.is_over = True
            await loading
        left = left_processes([marked.pid for marked in marked_processes() if marked.run_id.startswith(run_id)])
    lost = {
        kind: {"faults": len(each), "median_seconds": statistics.median(each), "max_seconds": max(each)} for kind, each in seconds.items()
    }
    print(json.dumps({"counts": load.counts, "until_lost": lost, "left": left}, indent=1))
    return int(bool(left or load.counts["changed"] or load.counts["failed"] or load.counts["misplaced"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("workers", "servers", "ends", "partitions", "seed"):
        parser.add_argument(f"--{name}", type=int, default=0)
    sys.exit(asyncio.run(main(parser.parse_args())))
