"""Determines the root cause of a failed run.

The peers of a dead process often report lost links before the death itself is detected. All reports within SETTLE_SECONDS are therefore
collected, and the most fundamental one is named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from flowrt.errors import UserError, WorkerDiedError
from flowrt.seams import Clock

SETTLE_SECONDS = 0.2  # from the first report to the choice of the root cause


class Kind(IntEnum):
    """Kinds of failure, the most fundamental first. A COMPLAINED failure may be only the consequence of a death."""

    BAD_INPUT = 0
    DIED = 1
    COMPLAINED = 2


@dataclass(frozen=True, order=True)
class _Accusation:
    kind: Kind
    order: int
    name: str = field(compare=False)
    host: str = field(compare=False)
    reason: str = field(compare=False)


class Verdict:
    """Collects failure reports and chooses the root cause. `output_tail(host)` returns the last lines of an OS process; it is called when
    the choice is made."""

    def __init__(self, clock: Clock, output_tail: Callable[[str], tuple[str, ...]]) -> None:
        self._clock, self._output_tail = clock, output_tail
        self._accusations: list[_Accusation] = []
        self._any = asyncio.Event()

    def accuse(self, kind: Kind, name: str, host: str, reason: str) -> None:
        self._accusations.append(_Accusation(kind, len(self._accusations), name, host, reason))
        self._any.set()

    @property
    def any_accused(self) -> bool:
        return self._any.is_set()

    def accused(self, *names: str) -> bool:
        return any(accusation.name in names for accusation in self._accusations)

    async def judge(self) -> None:
        """Raise the error that `wait_error` returns."""
        raise await self.wait_error()

    async def wait_error(self) -> UserError | WorkerDiedError:
        """Wait for the first report and SETTLE_SECONDS more. Returns the error that ends the run."""
        await self._any.wait()
        await self._clock.sleep(SETTLE_SECONDS)
        worst = min(self._accusations)
        if worst.kind is Kind.BAD_INPUT:
            return UserError(worst.reason)
        reason = f"failed: {worst.reason}" if worst.kind is Kind.COMPLAINED else worst.reason
        return WorkerDiedError(worst.name, reason, self._output_tail(worst.host))


def named_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report of those that a run's tasks raised: the first UserError or WorkerDiedError, else the first error."""
    errors = list(_leaves(group))
    return next((error for error in errors if isinstance(error, (UserError, WorkerDiedError))), errors[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterable[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
