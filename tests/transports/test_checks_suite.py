"""The transport check suite: a third-party transport passes it, and each planted fault is found by the check meant for it."""

from __future__ import annotations

import asyncio
import os
import sys
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest

from flowrt.transports import registry
from flowrt.transports.conformance.suite import CheckResult, LoopKind, plan, run_suite, usable_loops
from flowrt.transports.contract import Channel, Identity, Limits, Listener
from flowrt.transports.errors import AddressError
from flowrt.transports.inproc import InprocChannel, InprocTransport
from flowrt.transports.wire.message import Message

if "uvloop" in usable_loops():
    import uvloop

    uvloop.new_event_loop().close()  # opens libuv's pipe for signals, once per process

PACKAGE = Path(__file__).parents[2] / "examples" / "transport-package"


@pytest.fixture
def installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The example package as an installer leaves it: on the path, with the entry points that its pyproject.toml declares."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    entry_points = project["entry-points"]["flowrt.transports"]
    site = tmp_path / "site"
    information = site / f"flowrt_tcp-{project['version']}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (information / "entry_points.txt").write_text("[flowrt.transports]\n" + "".join(f"{k} = {v}\n" for k, v in entry_points.items()))
    (site / "flowrt_tcp").symlink_to(PACKAGE / "flowrt_tcp")
    monkeypatch.syspath_prepend(str(site))
    (scheme,) = entry_points
    return str(scheme)


@pytest.mark.parametrize("kind", usable_loops())
def test_third_party_transport_passes_the_same_checks(installed_package: str, kind: LoopKind) -> None:
    results = list(run_suite(installed_package, full=False, loops=[kind]))
    sys.modules.pop("flowrt_tcp", None)
    assert [f"{result.name}: {result.why}" for result in results if result.outcome != "passed"] == []
    assert len(results) == len(plan(installed_package, full=False)) >= 30
    assert all(result.property and result.loop == kind for result in results)


def test_the_full_suite_is_the_quick_one_and_the_long_checks() -> None:
    quick = {check.name for check in plan("inproc", full=False)}
    full = {check.name for check in plan("inproc")}
    assert quick < full
    assert full - quick == {"check_one_gibibyte", "check_hundred_thousand_messages", "check_ten_thousand_connections"}


def test_a_check_that_does_not_apply_to_a_scheme_is_not_run() -> None:
    (result,) = run_suite("inproc", loops=["asyncio"], only="dead_peer")
    assert result.outcome == "not applicable"
    assert result.is_ok()


def test_an_unknown_scheme() -> None:
    with pytest.raises(AddressError, match="unknown transport"):
        list(run_suite("nosuch"))


class LosesOnCancel(InprocChannel):
    async def recv(self) -> Message:
        while not self._inbox:
            future = self._loop.create_future()
            self._receiver = lambda future=future: None if future.done() else future.set_result(None)
            try:
                await future
            finally:
                self._receiver = None
            message = self.recv_nowait()
            await asyncio.sleep(0)  # a cancel here loses the message
            if message is not None:
                return message
        return await super().recv()


class Doubles(InprocChannel):
    def _transmit(self, message: Message) -> bool:
        return super()._transmit(message) and (self._counters.messages_sent % 7 != 3 or super()._transmit(message))


class IgnoresBounds(InprocChannel):
    def _transmit(self, message: Message) -> bool:
        self._capacity_messages = 1 << 30
        return super()._transmit(message)


class KeepsDescriptors(InprocChannel):
    def __init__(self, limits: Limits, peer: Identity) -> None:
        super().__init__(limits, peer)
        kept.append(os.open(os.devnull, os.O_RDONLY))


class LeavesTasks(InprocChannel):
    async def _shut(self) -> None:
        self._left = asyncio.ensure_future(asyncio.sleep(1000))
        await super()._shut()


class Fails(InprocChannel):
    async def recv(self) -> Message:
        raise ZeroDivisionError("planted")


kept: list[int] = []


def planted(channel: type[InprocChannel], monkeypatch: pytest.MonkeyPatch) -> str:
    """A scheme whose channels are of `channel`, registered for this test."""
    monkeypatch.setattr(InprocChannel, "pair", classmethod(lambda cls, *arguments: pair(channel, *arguments)))

    class Planted(InprocTransport):
        scheme: ClassVar[str] = "inproc"

        async def listen(self, address: str, limits: Limits, key: bytes, identity: Identity) -> Listener:
            return await super().listen(address, limits, key, identity)

    monkeypatch.setattr(registry, "transport_class", lambda scheme: Planted)
    return "inproc"


def pair(channel: type[InprocChannel], limits: Limits, first: Identity, second: Identity) -> tuple[Channel, Channel]:
    one, two = channel(limits, second), channel(limits, first)
    one._other, two._other = two, one
    return one, two


@pytest.mark.parametrize(
    ("channel", "check", "why"),
    [
        (LosesOnCancel, "check_recv_cancelled_at_every_turn", "recv after a cancelled one"),
        (Doubles, "check_order", "order"),
        (IgnoresBounds, "check_bounds", "at most"),
        (KeepsDescriptors, "check_order", "no resource is left open, but: descriptors"),
        (LeavesTasks, "check_order", "no task is left running"),
        (Fails, "check_order", "ZeroDivisionError: planted"),
    ],
)
def test_planted_faults_are_found(channel: type[InprocChannel], check: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrt.transports.conformance import kit as checks_basics
    from flowrt.transports.conformance import suite as checks_suite

    if channel is LosesOnCancel:
        monkeypatch.setattr(checks_basics, "PATIENCE_SECONDS", 0.5)  # it waits in vain
    monkeypatch.setattr(checks_suite, "_SETTLE_SECONDS", 0.1)
    try:
        results: list[CheckResult] = list(run_suite(planted(channel, monkeypatch), full=False, loops=["asyncio"], only=check))
    finally:
        while kept:
            os.close(kept.pop())
    (result,) = [result for result in results if result.name == check]
    assert (result.outcome, result.is_ok()) == ("failed", False)
    assert why in result.why
