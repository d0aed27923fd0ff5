"""The virtual event loop: time jumps, choices by seed, order within a node, and errors where a real loop would hang or log."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import weakref

import pytest

from flowrt.simulation.errors import DeadlockError, ForeignThreadError, LivelockError, UnhandledError
from flowrt.simulation.loop import VirtualLoop
from flowrt.simulation.world import World, run

FEW = range(12)


async def ticker(world: World, log: list[str], name: str, count: int) -> None:
    for number in range(count):
        log.append(f"{name}{number}")
        await asyncio.sleep(0)


async def three_tickers(world: World) -> list[str]:
    log: list[str] = []
    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(ticker(world, log, name, 5), context=world.context(name))
    return log


def test_an_hour_passes_at_once() -> None:
    async def main(world: World) -> float:
        before = world.loop.time()
        await asyncio.sleep(3000)
        return world.loop.time() - before

    outcome = run(0, main)
    assert outcome.result == 3000
    assert outcome.virtual_seconds == 3000


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    runs = [run(seed, three_tickers) for seed in FEW]
    repeated = [run(seed, three_tickers) for seed in FEW]
    assert [(r.result, r.digest, r.num_steps) for r in runs] == [(r.result, r.digest, r.num_steps) for r in repeated]
    assert len({tuple(r.result) for r in runs}) > len(FEW) / 2
    assert len({r.digest for r in runs}) == len(FEW)


@pytest.mark.parametrize("seed", FEW)
def test_order_within_a_node_is_kept(seed: int) -> None:
    async def main(world: World) -> list[int]:
        order: list[int] = []
        done = asyncio.Event()
        for number in range(20):
            world.loop.call_soon(order.append, number)
        world.loop.call_soon(done.set)
        await done.wait()
        return order

    assert run(seed, main).result == list(range(20))


def test_timers_of_one_instant_fire_in_the_order_they_were_set() -> None:
    async def main(world: World) -> list[int]:
        order: list[int] = []
        when = world.loop.time() + 1
        for number in range(20):
            world.loop.call_at(when, order.append, number)
        world.loop.call_at(when - 0.5, order.append, -1)
        await asyncio.sleep(2)
        return order

    assert run(3, main).result == [-1, *range(20)]


def test_cancelled_timers_and_callbacks_do_not_run() -> None:
    async def main(world: World) -> list[int]:
        ran: list[int] = []
        handles = [world.loop.call_later(1, ran.append, 1), world.loop.call_soon(ran.append, 2), world.loop.call_soon(ran.append, 3)]
        handles[0].cancel()
        handles[1].cancel()
        assert handles[0].cancelled()
        assert not handles[2].cancelled()
        await asyncio.sleep(2)
        return ran

    assert run(0, main).result == [3]


def test_queues_timeouts_groups_and_generators_work_as_on_any_loop() -> None:
    async def numbers(count: int):
        for number in range(count):
            await asyncio.sleep(0.1)
            yield number

    async def main(world: World) -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)

        async def produce() -> None:
            async for number in numbers(10):
                await queue.put(number)

        got: list[int] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(produce(), context=world.context("producer"))
            for _ in range(10):
                got.append(await queue.get())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await queue.get()
        async for number in numbers(3):  # left half-way: finished by the loop
            if number == 1:
                break
        return got

    for seed in FEW:
        assert run(seed, main).result == list(range(10))


def test_deadlock_error_names_the_waiting_tasks() -> None:
    async def stuck(event: asyncio.Event) -> None:
        await event.wait()

    async def main(world: World) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(stuck(asyncio.Event()), context=world.context("expert.0"))

    with pytest.raises(DeadlockError, match=r"expert\.0.*stuck|stuck.*expert\.0") as caught:
        run(5, main)
    assert any("seed 5" in note for note in caught.value.__notes__)


def test_a_livelock_is_an_error() -> None:
    async def main(world: World) -> None:
        while True:  # noqa: ASYNC110  (the endless loop is the point)
            await asyncio.sleep(0)

    with pytest.raises(LivelockError):
        run(0, main)


def test_no_end_in_the_time_allowed_is_an_error() -> None:
    async def main(world: World) -> None:
        while True:  # noqa: ASYNC110  (the endless loop is the point)
            await asyncio.sleep(1)

    with pytest.raises(LivelockError, match="virtual seconds"):
        run(0, main, max_seconds=100)


def test_another_thread_cannot_reach_the_loop() -> None:
    async def main(world: World) -> list[BaseException]:
        caught: list[BaseException] = []

        def reach() -> None:
            try:
                world.loop.call_soon_threadsafe(print)
            except ForeignThreadError as error:
                caught.append(error)

        thread = threading.Thread(target=reach)
        thread.start()
        thread.join()
        return caught

    assert len(run(0, main).result) == 1


def test_unretrieved_exception_ends_the_run() -> None:
    async def fail() -> None:
        raise ValueError("unseen")

    async def main(world: World) -> None:
        world.loop.create_task(fail())
        await asyncio.sleep(1)

    with pytest.raises(UnhandledError, match="unseen"):
        run(0, main)


def test_a_task_left_running_ends_the_run() -> None:
    async def main(world: World) -> None:
        world.loop.create_task(asyncio.sleep(100), name="forgotten")
        await asyncio.sleep(1)

    with pytest.raises(UnhandledError, match="forgotten"):
        run(0, main)


def test_nothing_of_a_run_is_left_behind_it() -> None:
    kept: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main(world: World) -> None:
        async def wait() -> None:
            await asyncio.sleep(1e6)

        kept.append(weakref.ref(world.loop))
        world.start("worker", lambda seams: wait())
        world.kill(world.processes["worker"])

    run(0, main)
    assert kept[0]() is None


def test_real_sockets_are_not_available() -> None:
    async def main(world: World) -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    with pytest.raises(NotImplementedError):
        run(0, main)


def test_a_loop_inside_a_loop_is_refused() -> None:
    async def inner() -> None:
        return None

    async def main(world: World) -> None:
        coroutine, loop = inner(), VirtualLoop(0)
        try:
            loop.run_until_complete(coroutine)
        finally:
            coroutine.close()
            loop.close()

    with pytest.raises(RuntimeError, match="while another loop is running"):
        run(0, main)


COMPUTE = """
import asyncio
from flowrt.simulation.world import run

async def worker(world, name, log):
    seams = world.seams(name)
    compute = seams.new_compute(name)
    for number in range(20):
        await compute.run("step", lambda: log.append((name, number, round(seams.clock.now(), 9))))
        await seams.clock.sleep(seams.random.random() / 100)
    log.append((name, seams.new_incarnation(), seams.new_seed()))

async def wait(log, number):
    try:
        await asyncio.sleep(60)
    finally:
        log.append(number)  # a group cancels its tasks in the order of a set: by address, were they asyncio's own

async def fail():
    await asyncio.sleep(0.5)
    raise ValueError

async def main(world):
    log = []
    async with asyncio.TaskGroup() as group:
        for name in ["left", "right", "middle"]:
            group.create_task(worker(world, name, log), context=world.context(name))
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(wait(log, number))
            group.create_task(fail())
    except* ValueError:
        pass
    return log

for seed in range(5):
    outcome = run(seed, main)
    print(outcome.digest, outcome.virtual_seconds, outcome.result)
"""


def test_digests_do_not_depend_on_the_process_or_its_hash_seed() -> None:
    printed = set()
    for hash_seed in ("0", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        outcome = subprocess.run([sys.executable, "-c", COMPUTE], capture_output=True, text=True, env=environment, check=False)
        assert outcome.returncode == 0, outcome.stderr
        printed.add(outcome.stdout)
    assert len(printed) == 1
    assert len(set(printed.pop().splitlines())) == 5


@pytest.mark.parametrize("seed", FEW)
def test_one_computation_at_a_time_and_its_label_is_visible(seed: int) -> None:
    async def main(world: World) -> bool:
        compute = world.seams("expert.0").new_compute("compute")
        seen: list[str | None] = []

        async def watch() -> None:
            for _ in range(400):
                seen.append(compute.running.label if compute.running else None)
                await asyncio.sleep(10e-6)

        async def work() -> None:
            for _ in range(8):
                assert await compute.run("experts", lambda: 7, bound_seconds=1.0) == 7

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            group.create_task(work())
        with pytest.raises(ZeroDivisionError):
            await compute.run("experts", lambda: 1 // 0)
        assert compute.running is None
        await compute.aclose()
        return "experts" in seen

    assert run(seed, main).result
