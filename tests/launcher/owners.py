"""Makes launchers without a gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from flowrt.actors.control import Control
from flowrt.graph.model import Graph
from flowrt.launcher import events
from flowrt.launcher.launcher import Launcher, LaunchOptions
from flowrt.processes.fork_server import WorkerMain
from flowrt.seams import Seams


@dataclass
class Owner:
    on_event: Callable[[events.Event], None]
    on_control: Callable[[str, Control], None]

    async def on_failing(self, error: Exception) -> None:
        pass


def launcher_of(
    graph: Graph,
    on_event: Callable[[events.Event], None],
    on_control: Callable[[str, Control], None],
    *,
    seams: Seams | None = None,
    hosted: Mapping[str, WorkerMain] | None = None,
    **options: Any,
) -> Launcher:
    """`options`: of LaunchOptions."""
    return Launcher(graph, seams or Seams(), Owner(on_event, on_control), LaunchOptions(**options), hosted or {})


class LauncherRun:
    """A launcher that runs inside the block."""

    launcher: Launcher

    async def __aenter__(self) -> Self:
        await self.launcher.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.launcher.__aexit__(*error)
