"""xoscar's actor that echoes; a pool imports it by name."""

from __future__ import annotations

from typing import Any

import xoscar

from flowrt.bench.peers.checksum import check


class XoscarEcho(xoscar.Actor):  # type: ignore[misc]  # typed only where it is installed
    """Returns its payload, read and checked."""

    async def echo(self, payload: Any) -> Any:
        check(payload)
        return payload
