"""xoscar's actor that echoes: its pool imports it by name, so it cannot stand in the file that is run (echo_child.py)."""

from __future__ import annotations

from typing import Any

import xoscar

from flowrt.bench.operators import check


class Echo(xoscar.Actor):  # type: ignore[misc]  # typed only where it is installed
    """Gives back what it is sent, read and checked."""

    async def echo(self, payload: Any) -> Any:
        check(payload)
        return payload
