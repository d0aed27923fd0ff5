"""A user's callbacks: an exception of one is printed, and the run goes on."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from flowrt.errors import ArgumentError, error_text, shortened, shown
from flowrt.observe import print_line


def guarded(name: str, function: Callable[..., None] | None) -> Callable[..., None] | None:
    return None if function is None else Callback(name, function)


class Callback:
    """A user's function. Its first exception is printed in one line; later ones are ignored, and the run goes on."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ArgumentError(f"{name} is {shown(function)}, it must be a function, and not a coroutine function")
        self._name, self._function, self._has_failed = name, function, False

    def __call__(self, *arguments: Any) -> None:
        try:
            self._function(*arguments)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{shortened(error_text(error), 400)} ({frame.filename}:{frame.lineno})"
                text = f"{self._name} raised {where}; the run goes on, and its later errors are not printed"
                print_line(f"flowrt: error: {text}")
