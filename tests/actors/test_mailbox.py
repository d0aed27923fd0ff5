"""The mailbox is bounded and first in, first out; a cancelled wait loses no item."""

import asyncio

import pytest

from flowrt.actors.mailbox import Mailbox, MailboxClosedError


async def test_items_come_out_in_order():
    box: Mailbox[int] = Mailbox(3)
    for item in range(3):
        box.post(item)
    assert [box.take_nowait() for _ in range(4)] == [0, 1, 2, None]


async def test_items_that_overtake_follow_the_first_one_in_their_order():
    box: Mailbox[str] = Mailbox(9)
    box.post("early", overtakes=True)
    for item in ("bulk 1", "credit 1", "bulk 2", "credit 2"):
        box.post(item, overtakes=item.startswith("credit"))
    assert await box.wait_item() == box.take_nowait() == "early"
    box.post("credit 3", overtakes=True)
    assert [box.take_nowait() for _ in range(5)] == ["credit 1", "credit 2", "credit 3", "bulk 1", "bulk 2"]
    box.post("bulk 3")
    box.post("credit 4", overtakes=True)
    box.post("bulk 4")
    assert [box.take_nowait() for _ in range(4)] == ["bulk 3", "credit 4", "bulk 4", None]


async def test_a_full_mailbox_is_a_fault_of_the_poster():
    box: Mailbox[int] = Mailbox(1)
    box.post(1)
    with pytest.raises(OverflowError, match="without a credit"):
        box.post(2)


async def test_cancelling_a_wait_loses_nothing():
    box: Mailbox[str] = Mailbox(2)
    async with asyncio.TaskGroup() as group:
        waiter = group.create_task(box.wait_item())
        await asyncio.sleep(0)
        box.post("kept")
        waiter.cancel()
    assert await box.wait_item() == "kept"
    assert box.take_nowait() == "kept"


async def test_closing_wakes_the_reader_after_the_last_item():
    box: Mailbox[int] = Mailbox(2)
    box.post(1)
    box.close()
    assert await box.wait_item() == 1
    box.take_nowait()
    with pytest.raises(MailboxClosedError):
        await box.wait_item()
    with pytest.raises(MailboxClosedError):
        box.post(2)


async def test_waiting_for_empty():
    box: Mailbox[int] = Mailbox(2)
    await box.wait_empty()
    box.post(1)
    async with asyncio.TaskGroup() as group:
        empty = group.create_task(box.wait_empty())
        await asyncio.sleep(0)
        assert not empty.done()
        box.take_nowait()
