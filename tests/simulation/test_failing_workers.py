"""Starts that fail, in virtual time: the run ends with the name of a worker or a file, and a reason."""

from __future__ import annotations

import pytest
from simulation.graph_files import load

from flowrt.sampling_params import SamplingParams
from flowrt.simulation.case import Case, SimulatedRequest
from flowrt.simulation.launchers import simulate

FAILURES = {
    "fail_to_load": "failed: no weights",
    "load_other_weights": "has changed since the run began; restore the file, or start the run again",
    "be_silent": "sent nothing for 120 s while loading",
    "send_unknown_message": "sent a message on its control connection that cannot be decoded: 'unknown' is not a control message",
}


def failure_of(worker: str, seed: int = 0) -> str | None:
    request = SimulatedRequest((5, 6), SamplingParams(max_tokens=2))
    case = Case(load("2x3.yaml"), (request,), seed=seed, exact=False, worker=f"simulation.failing_workers:{worker}")
    return simulate(case).result.failure


@pytest.mark.parametrize("worker", FAILURES)
def test_worker_that_does_not_start_is_named_with_the_reason(worker: str) -> None:
    for seed in range(3):
        name, _, reason = (failure_of(worker, seed) or "").partition(" ")
        assert name in ("/model/weights", "attention.0", "attention.1", "experts.0", "experts.1", "experts.2")
        assert reason == FAILURES[worker]
