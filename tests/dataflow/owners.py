"""Makes owners of runners from functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def ignore(*given: Any) -> None:
    pass


@dataclass
class OwnerOf:
    """See RunnerOwner."""

    post: Callable[..., Any] = ignore
    on_sink: Callable[..., Any] = ignore
    on_failed: Callable[..., Any] = ignore
    on_unsent: Callable[..., Any] = ignore
    on_response: Callable[..., Any] = ignore
