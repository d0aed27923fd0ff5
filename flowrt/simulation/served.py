"""What is asked of a simulated graph, and what came of it: SimulatedRequest, Served. Filled in by cluster.py, judged by invariants.py."""

from __future__ import annotations

from dataclasses import dataclass

from flowrt.actors.control import Statistics
from flowrt.sampling_params import SamplingParams


@dataclass(frozen=True)
class SimulatedRequest:
    """What a client asks, as token ids; when it comes after the one before (None: the seed says), and when it loses patience."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    after_seconds: float | None = None
    cancel_seconds: float | None = None


@dataclass(frozen=True)
class Served:
    """What clients saw: per request its tokens, how it ended and with which error; and each worker's last statistics.

    `choices` has the tokens of every choice, `token_ids` those of the first. `num_ends` counts a request's terminal events. `failed` is
    the process that the run failed for, `failure` the text, `failed_seconds` the time since the first request; None in a good run.
    `outage_seconds`: for how long, at most, an expert had no copy that the request's group could ask, while the request was there.
    """

    choices: tuple[tuple[tuple[int, ...], ...], ...]
    finish_reasons: tuple[str, ...]
    errors: tuple[str | None, ...]
    num_ends: tuple[int, ...]
    indexes: tuple[tuple[tuple[int, ...], ...], ...]  # of each choice's token events, in the order told
    statistics: dict[str, Statistics]
    failed: str | None = None
    failure: str | None = None
    failed_seconds: float | None = None
    outage_seconds: tuple[float, ...] = ()
    degraded: tuple[tuple[tuple[int, ...], ...], ...] = ()  # of each choice, the indexes of tokens that were marked

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(choices[0] if choices else () for choices in self.choices)
