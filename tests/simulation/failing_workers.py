"""Workers that fail to start, which no drawn fault causes."""

from __future__ import annotations

import asyncio

from flowrt.actors.control import Failed, Listening, Start, as_message, from_message
from flowrt.seams import Seams
from flowrt.transports.contract import Channel
from flowrt.transports.wire.message import Message


async def fail_to_load(control: Channel, seams: Seams) -> None:
    await control.recv()
    await control.send(as_message(Failed("no weights")))


async def be_silent(control: Channel, seams: Seams) -> None:
    await asyncio.get_running_loop().create_future()


async def send_unknown_message(control: Channel, seams: Seams) -> None:
    await control.send(Message("unknown"))
    await asyncio.get_running_loop().create_future()


async def load_other_weights(control: Channel, seams: Seams) -> None:
    """The files of the model change while the workers load."""
    start = from_message(await control.recv())
    assert isinstance(start, Start)
    await control.send(as_message(Listening({}, files={"/model/weights": start.name})))
    await asyncio.get_running_loop().create_future()
