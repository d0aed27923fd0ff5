"""The second half of `make transfers`: aborts real requests while their KV moves from a prefill worker to a group.

Requests beside them must keep their tokens, and nothing may be left of the aborted ones: no sequence, no page in either worker. A credit or
an offer that was left would stop the later transfers. Exit code 1 when a token differs or something is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import flowrt
from flowrt.api.running_graph import RunningGraph

GRAPH = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
SETTINGS = ["numerics=strict", "deploy.prefill.workers=2", "deploy.prefill.stream={stream}"]
AT_ONCE, NUM_CHECKED = 6, 4
PROMPT_TOKENS, NEW_TOKENS = 256, 16
LOOK_SECONDS = 0.0005
SETTLE_SECONDS = 20.0


class Aborts:
    def __init__(self, running: RunningGraph, number: int, seed: int) -> None:
        self._running, self._number, self._random = running, number, random.Random(seed)
        self._params = flowrt.SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        requests = running.run.requests
        assert requests is not None
        self._requests = requests
        self._seconds = 0.0  # that a transfer takes
        self.num_aborted = self.num_late = self.num_checked = 0

    def _prompt(self) -> list[int]:
        return [self._random.randrange(10, 500) for _ in range(PROMPT_TOKENS)]

    async def run(self) -> list[str]:
        """Returns what is wrong."""
        prompts = [self._prompt() for _ in range(NUM_CHECKED)]
        expected = [(await self._running.complete(prompt, self._params)).token_ids for prompt in prompts]
        index = await self._begin()
        began = time.monotonic()
        await _until(lambda: not self._moves(index))
        self._seconds = time.monotonic() - began
        self._requests.close(index)
        aborting = [asyncio.ensure_future(self._abort_some()) for _ in range(AT_ONCE)]
        wrong: list[str] = []
        while not all(task.done() for task in aborting) and not wrong:
            which = self.num_checked % NUM_CHECKED
            found = await self._running.complete(prompts[which], self._params)
            self.num_checked += 1
            if found.token_ids != expected[which]:
                wrong.append(f"prompt {which} has the tokens {found.token_ids}, before the aborts {expected[which]}")
        await asyncio.gather(*aborting)
        left: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while left := await self._left():  # noqa: ASYNC110  (it asks several processes)
                    await asyncio.sleep(0.1)
        return wrong + left

    async def _abort_some(self) -> None:
        while self.num_aborted < self._number:
            index = await self._begin()
            await asyncio.sleep(self._random.uniform(0.0, self._seconds))
            if self._moves(index):
                self.num_aborted += 1
            else:
                self.num_late += 1
            self._requests.close(index)

    async def _begin(self) -> int:
        """Submit a request, and wait until a group pulls its KV."""
        index = await self._running.submit(self._prompt(), self._params)
        await _until(lambda: self._moves(index) or self._requests.gateway.has_ended(index))
        return index

    def _moves(self, index: int) -> bool:
        """Whether the request is in a prefill worker and in a group."""
        return len(self._requests.gateway.groups_of(index)) == 2

    async def _left(self) -> list[str]:
        found = []
        for name, each in (await self._running.statistics()).items():
            kept = {"sequences": each.num_running + each.num_waiting, "pages": each.num_pages - each.num_free_pages}
            found += [f"{name} has {count} {what} left" for what, count in kept.items() if count]
        return found


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (the gateway has no event for a request that is placed)
        await asyncio.sleep(LOOK_SECONDS)


async def measure(number: int, stream: bool, seed: int) -> bool:
    settings = [each.format(stream=str(stream).lower()) for each in SETTINGS]
    async with flowrt.open(GRAPH, overrides=settings) as running:
        aborts = Aborts(running, number, seed)
        began = time.monotonic()
        wrong = await aborts.run()
        seconds = time.monotonic() - began
    how = "while prompts are computed" if stream else "of complete prompts"
    print(f"KV {how}: {aborts.num_aborted} requests aborted while it moved, {aborts.num_late} after it, in {seconds:.1f} s")
    print(f"beside them {aborts.num_checked} requests had the tokens that they had before; left: {'; '.join(wrong) or 'nothing'}")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aborts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    half = options.aborts // 2
    good = [asyncio.run(measure(number, stream, options.seed)) for number, stream in ((options.aborts - half, True), (half, False))]
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
