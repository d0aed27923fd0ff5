"""Workers without torch; the first part of a worker's name selects its behaviour ("echo.0", "hang.1")."""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time

from group_tokens import group_tokens

from flowrt.actors.control import (
    Connected,
    Control,
    Drain,
    Drained,
    Ended,
    Failed,
    LinkLost,
    Listening,
    LoadProgress,
    Peers,
    Start,
    Statistics,
    StatisticsRequest,
    Stop,
    Submit,
    Tokens,
    as_message,
    from_message,
)
from flowrt.seams import Seams
from flowrt.transports.contract import Channel


async def run_worker(control: Channel, seams: Seams) -> None:
    """Responds to a request with its prompt, one token at a time."""

    async def send(control_message: Control) -> None:
        await control.send(as_message(control_message))

    async def receive() -> Control:
        return from_message(await control.recv())

    start = await receive()
    assert isinstance(start, Start)
    assert len(start.key) == 32
    role = start.name.split(".")[0]
    if role == "hang":
        logging.getLogger("flowrt.worker").warning("about to hang")
        logging.getLogger("flowrt.worker").info("below the log level")
        await asyncio.sleep(3600)
    if role == "block":
        time.sleep(3600)  # noqa: ASYNC251
    if role == "leave":
        return
    if role == "raise":
        print("first line\nsecond line", file=sys.stderr)
        raise RuntimeError("out of tea")
    if role == "bad":
        await send(Failed("no such operator: teapot", user=True))
        raise ValueError("no such operator: teapot")
    if role == "chatty":
        for number in range(200):
            print(f"line {number}", file=sys.stderr)
        os.write(2, b"unfinished")
        os.kill(os.getpid(), signal.SIGSEGV)
    if role == "parent":
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    await send(LoadProgress("weights", 1, 2))
    await send(Listening({"fake": f"fake://{start.name}"}, resident_bytes=1))
    peers = await receive()
    assert isinstance(peers, Peers)
    assert peers.addresses[start.name] == {"fake": f"fake://{start.name}"}
    assert peers.incarnations[start.name] == start.incarnation
    await send(Connected())
    while True:
        match await receive():
            case Submit(request):
                if request.id == "who":
                    facts = (os.getpid(), os.getppid(), len(os.listdir("/proc/self/fd")), int(os.environ["OMP_NUM_THREADS"]))
                    await send(Tokens((group_tokens("who", 0, 0, facts),)))
                for index, token in enumerate(request.prompt_token_ids):
                    await send(Tokens((group_tokens(request.id, request.attempt, index, (token,)),)))
                await send(Ended(request.id, request.attempt, "length"))
                if request.id == "block":
                    ctypes.PyDLL(None).pause()  # keeps Python's lock: no thread of the process runs Python any more
                if role == "complain":
                    await send(LinkLost("echo.1", "it closed"))
            case StatisticsRequest():
                await send(Statistics(num_steps=7))
            case Drain():
                await send(Drained())
            case Stop():
                if role == "stubborn":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    time.sleep(3600)  # noqa: ASYNC251
                await send(Statistics(num_steps=8))
                return
