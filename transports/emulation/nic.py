"""Emulates the NIC of one process for one kind of link in real time, with one outgoing and one incoming direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flowrt.transports.emulation.nic_model import SharedDirection
from flowrt.transports.errors import InvalidMessageError
from flowrt.transports.wire.message import Message


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class LinkTimer(Protocol):
    """A clock in seconds that all processes of the machine share, with callbacks that never run early."""

    def now(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[], object]) -> Cancellable: ...


class LinkTimes(Protocol):
    """The times of a link that nothing else uses (flowrt/costs/links.py)."""

    @property
    def latency_seconds(self) -> float: ...
    def busy_seconds(self, num_bytes: float) -> float: ...


Note = Callable[[float, float], None]  # called per delivered message with its modelled duration and its lateness, in seconds


def payload_bytes(message: Message) -> float:
    return message.payload_bytes


class Nic:
    """The NIC of one process for one kind of link: an outgoing and an incoming direction, each shared by all its channels.

    All times are the profile's times multiplied by `dilation`. `note` is called for every message received. `num_bytes`: the bytes that a
    message has on the link. Close the NIC after its channels.
    """

    def __init__(
        self,
        profile: LinkTimes,
        timer: LinkTimer,
        dilation: float = 1.0,
        note: Note | None = None,
        num_bytes: Callable[[Message], float] = payload_bytes,
    ) -> None:
        self.profile = profile
        self.timer = timer
        self.latency_seconds = profile.latency_seconds * dilation
        self.note = note or (lambda modelled_seconds, late_seconds: None)
        self.sending, self.receiving = _Direction(timer), _Direction(timer)
        self._dilation, self._num_bytes = dilation, num_bytes

    def for_several(self, count: int) -> Nic:
        """Returns the same NIC for channels whose messages stand for so many each, one after another."""
        if count == 1:
            return self
        nic = Nic(self.profile, self.timer, self._dilation * count, self.note, self._num_bytes)
        nic.sending, nic.receiving = self.sending, self.receiving
        return nic

    def work(self, message: Message) -> float:
        """Returns the dilated seconds for which the message alone occupies a direction. Raises InvalidMessageError."""
        try:
            return self.profile.busy_seconds(self._num_bytes(message)) * self._dilation
        except (KeyError, TypeError) as error:
            raise InvalidMessageError(f"a tensor of unknown dtype or shape: {error}") from error

    def close(self) -> None:
        self.sending.close()
        self.receiving.close()


class _Direction:
    """A SharedDirection in real time. A flow is a callback that gets the exact time at which one of its messages has passed."""

    def __init__(self, timer: LinkTimer) -> None:
        self.model = SharedDirection()
        self._timer = timer
        self._alarm: Cancellable | None = None
        self._alarm_seconds = 0.0
        self._looking = False

    def add(self, flow: Callable[[float], None], begin: float, work: float) -> float:
        moved = self.model.add(flow, begin, work)
        if not self._looking:
            self._look()
        return moved

    def passing(self, begin: float, work: float) -> float:
        """When a message of high priority that arrives at `begin` would have passed."""
        return self.model.passing(begin, work)

    def interrupt(self, begin: float, work: float) -> tuple[float, float]:
        """Serves a message of high priority; see SharedDirection. No callback: the time at which it has passed is known now."""
        passed = self.model.interrupt(begin, work)
        if not self._looking:
            self._look()
        return passed

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _look(self) -> None:
        self._looking = True
        try:
            while (passed := self.model.step(self._timer.now())) is not None:
                time, flow = passed
                flow(time)  # type: ignore[operator]
        finally:
            self._looking = False
        self._arm(self.model.next_event())

    def _arm(self, when: float | None) -> None:
        if self._alarm is not None:
            if when == self._alarm_seconds:
                return
            self.close()
        if when is not None:
            self._alarm, self._alarm_seconds = self._timer.call_at(when, self._wake), when

    def _wake(self) -> None:
        self._alarm = None
        self._look()
