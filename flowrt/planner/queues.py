"""How long requests wait for a server, in closed form. Pure."""

from __future__ import annotations

import math


def waiting_seconds(rate: float, service_seconds: float, num_servers: int, variation: float = 0.0) -> float:
    """The mean wait of a Poisson stream of `rate` requests per second before `num_servers` equal servers (Sakasegawa 1977, which is exact
    for one server). `variation`: the squared coefficient of variation of the service time, 0: all take equally long. inf: no server is
    left."""
    load = rate * service_seconds / num_servers
    if load >= 1:
        return math.inf
    waiting = float(load ** (math.sqrt(2 * (num_servers + 1)) - 1))
    return service_seconds * (1 + variation) / 2 * waiting / (num_servers * (1 - load))
