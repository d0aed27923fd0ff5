"""Workers without torch whose deaths a run survives: `client.N` reports the events it receives, a server acts by its name."""

import asyncio
import os
import time
from pathlib import Path

import msgspec

from flowrt.actors.control import (
    Connected,
    Control,
    DetectorReport,
    Ended,
    Failed,
    Heartbeat,
    LateResponse,
    LinkLost,
    Listening,
    LoadProgress,
    PeerJoined,
    PeerLeft,
    Peers,
    Start,
    Statistics,
    StatisticsRequest,
    Stop,
    Submit,
    as_message,
    from_message,
)
from flowrt.graph.model import from_json
from flowrt.reliability.detector import ProcessState
from flowrt.seams import Seams
from flowrt.transports.contract import Channel


def told(what: str, *words: str) -> Ended:
    """The events that a worker has received, with their times on the machine's clock."""
    return Ended(" ".join((what, *words)), 0, "stop", str(time.monotonic()))


def count_life(folder: str, name: str) -> int:
    """Which life of `name` this is, from 1."""
    with (Path(folder) / name).open("a") as file:
        file.write("x")
    return len((Path(folder) / name).read_text())


async def run_worker(control: Channel, seams: Seams) -> None:
    async def say(word: Control) -> None:
        await control.send(as_message(word))

    async def hear() -> Control:
        return from_message(await control.recv())

    start = await hear()
    assert isinstance(start, Start)
    role = start.name.split(".")[0]
    life = count_life(from_json(start.graph).folder, start.name)
    if role == "stillborn" or (role == "infant" and life <= 2):
        os._exit(7)
    if role == "mute" and life == 1:
        await say(LoadProgress("weights", 0, 2))
        await asyncio.sleep(3600)
    if role == "broken":
        raise RuntimeError("no weights here")
    if life > 1:
        if role == "frail":
            raise RuntimeError("never again")
        if role == "slow":
            await asyncio.sleep(3600)
        if role == "shaky" and life == 2:
            os._exit(7)
    await say(Listening({"fake": f"fake://{start.name}/{life}"}))
    peers = await hear()
    assert isinstance(peers, Peers)
    assert peers.incarnations[start.name] == start.incarnation
    await say(told("peers", *(f"{name}={peers.addresses[name].get('fake', '')}" for name in sorted(peers.addresses))))
    if role == "lingering" and life == 1:
        await asyncio.sleep(3600)
    await say(Connected())
    while True:
        match await hear():
            case PeerLeft(process, incarnation, _):
                await say(told("left", process, incarnation))
            case PeerJoined(process, incarnation, addresses):
                await say(told("joined", process, incarnation, addresses["fake"]))
            case Submit(request):
                match request.id.split():
                    case ["fail"]:
                        await say(Failed("broken teapot"))
                        return
                    case ["hang", "up"]:
                        await control.aclose()
                        await asyncio.sleep(3600)
                    case ["lost", *words]:
                        await say(LinkLost(words[0], "it broke", *words[1:]))
                    case ["beat"]:
                        await say(Heartbeat(sequence=3, lag_seconds=0.5, num_firings=9, incarnation=start.incarnation))
                    case ["late", process]:
                        await say(LateResponse(process, "whoever", 1.0, 0.1))
                await say(told(f"done {request.id}"))
            case StatisticsRequest():
                await say(Statistics(num_firings=10 * life))
            case Stop():
                await say(Statistics(num_firings=10 * life, resident_bytes=life))
                return


async def run_monitor(control: Channel, seams: Seams) -> None:
    """Writes down what it is told; condemns and suspects whom the file `verdict` names."""

    async def say(word: Control) -> None:
        await control.send(as_message(word))

    start = from_message(await control.recv())
    assert isinstance(start, Start)
    folder = Path(from_json(start.graph).folder)
    life = count_life(str(folder), start.name)
    await say(Listening({}))
    while True:
        match from_message(await control.recv()):
            case Peers():
                await say(Connected())
            case StatisticsRequest():
                await say(Statistics())
            case Heartbeat() as heartbeat if heartbeat.process == "gateway":
                if (folder / "verdict").exists():
                    kind, process, incarnation = (folder / "verdict").read_text().split()
                    (folder / "verdict").unlink()
                    state = {"condemn": ProcessState.DEAD, "suspect": ProcessState.SUSPECT}[kind]
                    await say(DetectorReport(process, incarnation, state, "no sign of it"))
            case Stop():
                return
            case other:
                with (folder / f"heard {life}").open("a") as file:
                    words = msgspec.json.encode(other).decode()
                    file.write(f"{type(other).__name__} {words}\n")
