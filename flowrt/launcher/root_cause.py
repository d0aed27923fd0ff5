"""Why a run ended: a death is heard of first by those it cuts off, so all accusations of one moment are weighed before one is named.

Here: `Verdict`, and `named_error` for what the run's tasks raise. Not here: who accuses, and what follows (launcher.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from flowrt.errors import UserError, WorkerDiedError
from flowrt.seams import Clock

SETTLE_SECONDS = 0.2  # from the first accusation to the verdict


class Kind(IntEnum):
    """What is wrong, by what is named first: the user's mistake, then the dead, then those who complain, perhaps only of a death."""

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
    """Collects accusations. `output_tail(host)` gives the last lines of an OS process, asked when the verdict is spoken."""

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
        """Raises what `wait_error` gives."""
        raise await self.wait_error()

    async def wait_error(self) -> UserError | WorkerDiedError:
        """Waits until somebody is accused, and a moment more. The error that ends the run."""
        await self._any.wait()
        await self._clock.sleep(SETTLE_SECONDS)
        worst = min(self._accusations)
        if worst.kind is Kind.BAD_INPUT:
            return UserError(worst.reason)
        reason = f"failed: {worst.reason}" if worst.kind is Kind.COMPLAINED else worst.reason
        return WorkerDiedError(worst.name, reason, self._output_tail(worst.host))


def named_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to name of those a run's tasks have raised: a verdict if there is one, else the first."""
    errors = list(_leaves(group))
    return next((error for error in errors if isinstance(error, (UserError, WorkerDiedError))), errors[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterable[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
