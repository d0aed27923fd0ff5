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


def notice(what: str, *words: str) -> Ended:
    """The events that a worker has received, with their times on the machine's clock."""
    return Ended(" ".join((what, *words)), 0, "stop", str(time.monotonic()))


def count_incarnation(folder: str, name: str) -> int:
    """The number of this incarnation of `name`, from 1."""
    with (Path(folder) / name).open("a") as file:
        file.write("x")
    return len((Path(folder) / name).read_text())


async def run_worker(control: Channel, seams: Seams) -> None:
    async def send(message: Control) -> None:
        await control.send(as_message(message))

    async def receive() -> Control:
        return from_message(await control.recv())

    start = await receive()
    assert isinstance(start, Start)
    role = start.name.split(".")[0]
    number = count_incarnation(from_json(start.graph).folder, start.name)
    if role == "stillborn" or (role == "infant" and number <= 2):
        os._exit(7)
    if role == "mute" and number == 1:
        await send(LoadProgress("weights", 0, 2))
        await asyncio.sleep(3600)
    if role == "broken":
        raise RuntimeError("no weights here")
    if number > 1:
        if role == "frail":
            raise RuntimeError("never again")
        if role == "slow":
            await asyncio.sleep(3600)
        if role == "shaky" and number == 2:
            os._exit(7)
    await send(Listening({"fake": f"fake://{start.name}/{number}"}))
    peers = await receive()
    assert isinstance(peers, Peers)
    assert peers.incarnations[start.name] == start.incarnation
    await send(notice("peers", *(f"{name}={peers.addresses[name].get('fake', '')}" for name in sorted(peers.addresses))))
    if role == "lingering" and number == 1:
        await asyncio.sleep(3600)
    await send(Connected())
    while True:
        match await receive():
            case PeerLeft(process, incarnation, _):
                await send(notice("left", process, incarnation))
            case PeerJoined(process, incarnation, addresses):
                await send(notice("joined", process, incarnation, addresses["fake"]))
            case Submit(request):
                match request.id.split():
                    case ["fail"]:
                        await send(Failed("broken teapot"))
                        return
                    case ["hang", "up"]:
                        await control.aclose()
                        await asyncio.sleep(3600)
                    case ["lost", *words]:
                        await send(LinkLost(words[0], "it broke", *words[1:]))
                    case ["heartbeat"]:
                        await send(Heartbeat(sequence=3, lag_seconds=0.5, num_firings=9, incarnation=start.incarnation))
                    case ["late", process]:
                        await send(LateResponse(process, "whoever", 1.0, 0.1))
                await send(notice(f"done {request.id}"))
            case StatisticsRequest():
                await send(Statistics(num_firings=10 * number))
            case Stop():
                await send(Statistics(num_firings=10 * number, resident_bytes=number))
                return


async def run_monitor(control: Channel, seams: Seams) -> None:
    """Writes its messages to a file; marks dead and suspects the processes that the file `verdict` names."""

    async def send(message: Control) -> None:
        await control.send(as_message(message))

    start = from_message(await control.recv())
    assert isinstance(start, Start)
    folder = Path(from_json(start.graph).folder)
    number = count_incarnation(str(folder), start.name)
    await send(Listening({}))
    while True:
        match from_message(await control.recv()):
            case Peers():
                await send(Connected())
            case StatisticsRequest():
                await send(Statistics())
            case Heartbeat() as heartbeat if heartbeat.process == "gateway":
                if (folder / "verdict").exists():
                    kind, process, incarnation = (folder / "verdict").read_text().split()
                    (folder / "verdict").unlink()
                    state = {"dead": ProcessState.DEAD, "suspect": ProcessState.SUSPECT}[kind]
                    await send(DetectorReport(process, incarnation, state, "no sign of it"))
            case Stop():
                return
            case other:
                with (folder / f"received {number}").open("a") as file:
                    words = msgspec.json.encode(other).decode()
                    file.write(f"{type(other).__name__} {words}\n")
