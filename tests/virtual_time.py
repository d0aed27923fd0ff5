"""Tests that run in virtual time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import ParamSpec

from flowrt.simulation.world import run

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[object, object, None]]) -> Callable[P, None]:
    """A test that runs an async one on a loop of its own, whose clock is advanced to the next timer."""

    @functools.wraps(test)
    def run_test(*arguments: P.args, **named: P.kwargs) -> None:
        run(0, lambda world: test(*arguments, **named))

    del run_test.__wrapped__  # type: ignore[attr-defined]  # pytest would take it for an async test
    run_test.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run_test
