"""What the clients of a simulated run saw, by request."""

from __future__ import annotations

from flowrt.simulation.served import Served


def finish_reasons(served: Served) -> tuple[str, ...]:
    return tuple(client.finish_reason for client in served.clients)


def errors(served: Served) -> tuple[str | None, ...]:
    return tuple(client.error for client in served.clients)


def token_ids(served: Served) -> tuple[tuple[int, ...], ...]:
    """Token ids of choice 0 of each request."""
    return tuple(client.choices[0] for client in served.clients)
