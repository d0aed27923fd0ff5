"""The effect of each fault on a node, in simulations of two processes."""

from __future__ import annotations

import asyncio

import pytest

from flowrt.reliability.scenario import Crash, Cut, Hang, Pause, Scenario, Skew, Slow, SlowLink, Stall
from flowrt.seams import Seams
from flowrt.simulation.faults import Faults
from flowrt.simulation.world import World, run
from flowrt.system.process_status import Activity
from flowrt.transports.contract import Channel, Identity, Limits
from flowrt.transports.errors import AddressError, BrokenChannelError
from flowrt.transports.wire.message import Message

SEEDS = range(10)


def inject(world: World, *faults: object) -> Faults:
    made = Faults(world, Scenario(faults=faults), lambda name: None)
    made.begin()
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crash_is_a_power_cut(seed: int) -> None:
    """No `finally` runs, no cancellation arrives, queued work is never done; the exit and the end of channels are notified."""
    log: list[str] = []

    async def victim(seams: Seams) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(2.0, log.append, "timer")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(endless(seams))
                await seams.clock.sleep(100)
        finally:
            log.append("finally")

    async def endless(seams: Seams) -> None:
        try:
            while True:
                await seams.clock.sleep(0.1)
                log.append("tick")
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    async def main(world: World) -> tuple[str, float, list[str]]:
        process = world.start("victim", victim)
        inject(world, Crash(process="victim", at_seconds=1.05))
        began = world.loop.time()
        how = await process.exit
        elapsed = world.loop.time() - began
        await asyncio.sleep(50)
        assert world.leftovers() == []
        return how, elapsed, list(log)

    how, elapsed, seen = run(seed, main).result
    assert how == "was killed by SIGKILL"
    assert 1.05 <= elapsed < 1.06
    assert seen == ["tick"] * 10


@pytest.mark.parametrize("seed", SEEDS)
def test_channels_and_listeners_of_a_dead_process_are_removed(seed: int) -> None:
    async def main(world: World) -> None:
        key, transport = world.new_key(), world.network.transport("shm")
        address: asyncio.Future[str] = world.loop.create_future()

        async def victim(seams: Seams) -> None:
            async with await transport.listen("shm://", Limits(), key, Identity("victim")) as listener:
                address.set_result(listener.address)
                channel = await listener.accept()
                await channel.send(Message("output tail"))
                await world.loop.create_future()

        process = world.start("victim", victim)
        async with await transport.connect(await address, Limits(), key, Identity("peer")) as channel:
            inject(world, Crash(process="victim", at_seconds=1.0))
            assert (await channel.recv()).kind == "output tail"
            with pytest.raises(BrokenChannelError, match="died"):
                await channel.recv()
        with pytest.raises(AddressError):
            await transport.connect(await address, Limits(), key, Identity("peer"))
        await process.exit
        assert world.leftovers() == []

    run(seed, main)


async def heartbeats(world: World, *faults: object) -> tuple[list[float], list[float]]:
    """Times of a process's heartbeats and of the ends of its computations, one of each every 0.1 s, in seconds from the start."""
    began, looped, computed = world.loop.time(), [], []

    async def work(seams: Seams) -> None:
        compute = seams.new_compute("compute")

        async def heartbeat() -> None:
            for _ in range(20):
                await seams.clock.sleep(0.1)
                looped.append(world.loop.time() - began)

        async def calls() -> None:
            for _ in range(20):
                await compute.run("call", lambda: None)
                computed.append(world.loop.time() - began)
                await seams.clock.sleep(0.1)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(heartbeat())
            tasks.create_task(calls())
        await compute.aclose()

    process = world.start("worker", work)
    inject(world, *faults)
    assert await process.exit == "exited with status 0"
    return looped, computed


def gap(times: list[float]) -> float:
    return max(later - earlier for earlier, later in zip([0.0, *times], times, strict=False))


@pytest.mark.parametrize(
    ("fault", "loop_stops", "compute_stops"),
    [
        (Pause(process="worker", at_seconds=0.55, for_seconds=1.0), True, True),
        (Stall(process="worker", at_seconds=0.55, for_seconds=1.0), True, True),  # the thread continues, and nothing reads its result
        (Hang(process="worker", at_seconds=0.55, for_seconds=1.0), False, True),
    ],
)
def test_stopped_processes(fault: object, loop_stops: bool, compute_stops: bool) -> None:
    looped, computed = run(1, lambda world: heartbeats(world, fault)).result
    assert (gap(looped) > 0.9) == loop_stops
    assert (gap(computed) > 0.9) == compute_stops


@pytest.mark.parametrize(
    ("faults", "activities", "cpu_seconds"),
    [
        ([Stall(process="worker", at_seconds=0.5, for_seconds=1.0)], {Activity.RUNNABLE}, 1.0),
        ([Pause(process="worker", at_seconds=0.5, for_seconds=1.0)], {Activity.STOPPED}, 0.0),
        ([Stall(process="worker", at_seconds=0.5, for_seconds=1.0), Hang(process="worker", for_seconds=9.0)], {Activity.RUNNABLE}, 1.0),
        (
            [Stall(process="worker", at_seconds=0.5, for_seconds=2.0), Pause(process="worker", at_seconds=1.0, for_seconds=1.0)],
            {Activity.RUNNABLE, Activity.STOPPED},
            1.0,
        ),
        ([Stall(process="worker", at_seconds=1.0, for_seconds=0.5), Pause(process="worker", for_seconds=9.0)], {Activity.STOPPED}, 0.0),
    ],
)
def test_what_the_system_shows_of_a_process_that_stands_still(faults: list[object], activities: set[Activity], cpu_seconds: float) -> None:
    """A stopped process receives no processor time, whatever its loop was to do meanwhile."""

    async def main(world: World) -> tuple[set[Activity | None], float]:
        async def work(seams: Seams) -> None:
            await seams.clock.sleep(30)

        process = world.start("worker", work)
        inject(world, *faults)
        seen = set()
        for _ in range(30):
            await asyncio.sleep(0.1)
            seen.add(world.process_activity(process.pid))
        times = world.process_times(process.pid)
        assert times is not None
        world.kill(process)
        await process.exit
        return seen - {Activity.ASLEEP}, times.cpu_seconds

    assert run(1, main).result == (activities, pytest.approx(cpu_seconds))


def test_slow_and_skewed_processes_have_other_times() -> None:
    plain, _ = run(1, lambda world: heartbeats(world)).result
    fast, _ = run(1, lambda world: heartbeats(world, Skew(process="worker", rate=2.0))).result
    assert plain[-1] == pytest.approx(2.0)
    assert fast[-1] == pytest.approx(1.0, abs=0.11)

    async def one_call(world: World, *faults: object) -> float:
        async def work(seams: Seams) -> None:
            compute = seams.new_compute("compute")
            await seams.clock.sleep(0.01)
            for _ in range(50):
                await compute.run("call", lambda: None)
            await compute.aclose()

        began = world.loop.time()
        process = world.start("worker", work)
        inject(world, *faults)
        await process.exit
        return world.loop.time() - began

    usual = run(1, one_call).result
    slow = run(1, lambda world: one_call(world, Slow(process="worker", at_seconds=0.001, for_seconds=100, factor=10.0))).result
    assert slow > 5 * usual


@pytest.mark.parametrize(("direction", "there_late", "back_late"), [("both", True, True), ("there", True, False), ("back", False, True)])
def test_cut_holds_frames_until_it_heals(direction: str, there_late: bool, back_late: bool) -> None:
    async def main(world: World) -> dict[str, list[float]]:
        key, transport = world.new_key(), world.network.transport("shm")
        address: asyncio.Future[str] = world.loop.create_future()
        arrivals: dict[str, list[float]] = {"left": [], "right": []}

        async def talk(name: str, channel: Channel) -> None:
            async def receive() -> None:
                for number in range(10):
                    assert (await channel.recv()).edge == number  # in order, cut or not
                    arrivals[name].append(world.loop.time())

            async with channel, asyncio.TaskGroup() as tasks:
                tasks.create_task(receive())
                for number in range(10):
                    await channel.send(Message("word", edge=number))
                    await asyncio.sleep(0.1)

        async def left(seams: Seams) -> None:
            await talk("left", await transport.connect(await address, Limits(), key, Identity("left")))

        async def right(seams: Seams) -> None:
            async with await transport.listen("shm://", Limits(), key, Identity("right")) as listener:
                address.set_result(listener.address)
                await talk("right", await listener.accept())

        processes = [world.start("right", right), world.start("left", left)]
        inject(world, Cut(between=("left", "right"), at_seconds=0.35, for_seconds=3.0, direction=direction))
        for process in processes:
            assert await process.exit == "exited with status 0"
        return arrivals

    arrivals = run(2, main).result
    assert (gap([time - arrivals["right"][0] for time in arrivals["right"]]) > 2.5) == there_late
    assert (gap([time - arrivals["left"][0] for time in arrivals["left"]]) > 2.5) == back_late


def test_healing_ends_active_faults_and_cancels_the_rest() -> None:
    async def main(world: World) -> float:
        async def work(seams: Seams) -> None:
            for _ in range(20):
                await seams.clock.sleep(0.1)

        began = world.loop.time()
        process = world.start("worker", work)
        later = Crash(process="worker", at_seconds=1.5)
        faults = inject(world, Pause(process="worker", at_seconds=0.5, for_seconds=1000), later)
        await asyncio.sleep(1.0)
        faults.heal()
        assert await process.exit == "exited with status 0"
        assert world.num_faults == {"pause": 1}
        return world.loop.time() - began

    assert run(0, main).result == pytest.approx(2.4, abs=0.11)


def test_second_incarnation_is_another_node() -> None:
    async def main(world: World) -> list[str]:
        async def work(seams: Seams) -> None:
            await seams.clock.sleep(1)

        first = world.start("worker", work)
        assert world.kill(first)
        assert not world.kill(first)
        second = world.start("worker", work)
        return [await first.exit, await second.exit, first.node, second.node]

    assert run(0, main).result == ["was killed by SIGKILL", "exited with status 0", "worker", "worker~2"]


def test_a_process_that_is_left_is_named() -> None:
    async def main(world: World) -> list[str]:
        async def work(seams: Seams) -> None:
            await seams.clock.sleep(1)

        process = world.start("worker", work)
        left = world.leftovers()
        await process.exit
        return [*left, *world.leftovers()]

    assert run(0, main).result == ["process worker"]


def test_worst_of_overlapping_faults_applies_and_each_reverts_itself() -> None:
    async def main(world: World) -> list[float]:
        async def work(seams: Seams) -> None:
            seams.new_compute("compute")
            await seams.clock.sleep(5)

        world.start("one", work)
        process = world.start("other", work)
        links = [SlowLink(between=("one", "other"), at_seconds=at, for_seconds=2, factor=factor) for at, factor in ((1, 3.0), (2, 300.0))]
        slow = Slow(process="one", at_seconds=1, for_seconds=1, factor=7.0)
        inject(world, *links, slow)
        seen = []
        for _ in range(5):
            seen.append(world.network.links("other", "one")[0].slowness)
            await asyncio.sleep(1.01)
        assert await process.exit == "exited with status 0"
        assert world.num_faults == {"slow_link": 2, "slow": 1}
        return seen

    assert run(0, main).result == [1.0, 3.0, 300.0, 300.0, 1.0]
