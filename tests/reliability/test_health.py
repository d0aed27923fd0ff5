"""Health is ok only while work progresses."""

from __future__ import annotations

import pytest

from flowrt.reliability.health import STALL_SECONDS, Health, RequestProgress, ServiceState, WorkerProgress, health

OVERDUE = WorkerProgress(7, 0.1, "'experts'", 70.0, 60.0)


def state_of(progress: RequestProgress, now: float) -> ServiceState:
    return ServiceState(num_open=progress.num_open, idle_seconds=progress.idle_seconds(now))


def test_requests_without_progress_are_unhealthy() -> None:
    progress = RequestProgress()
    assert health(state_of(progress, 1e6)).ok  # no request waits, and nothing comes
    progress.opened(1e6)
    assert health(state_of(progress, 1e6 + STALL_SECONDS)).ok  # it counts from the first that waits
    assert health(state_of(progress, 1e6 + STALL_SECONDS + 0.1)) == Health(
        False, ("1 request is open, and none has made progress for 5.1 s",)
    )
    progress.opened(1e6 + 6)  # a new request is not progress
    assert not health(state_of(progress, 1e6 + 6)).ok
    progress.progressed(1e6 + 7)
    assert health(state_of(progress, 1e6 + 8)).ok
    progress.ended(1e6 + 20)
    assert health(state_of(progress, 1e6 + 21)).ok  # an end, even an error, is something that came
    assert health(state_of(progress, 1e6 + 30)).problems == ("1 request is open, and none has made progress for 10.0 s",)
    progress.ended(1e6 + 31)
    assert health(state_of(progress, 1e6 + 99)).ok
    with pytest.raises(ValueError, match="more requests ended"):
        progress.ended(1e6 + 99)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (ServiceState(), Health(True)),
        (ServiceState(num_open=7, idle_seconds=4.9), Health(True)),
        (ServiceState(num_open=7, idle_seconds=9.0), Health(False, ("7 requests are open, and none has made progress for 9.0 s",))),
        (ServiceState(failure="fork server was killed"), Health(False, ("the run has ended: fork server was killed",))),
        (ServiceState(lost_experts="no copy of expert 3 is left"), Health(False, ("no copy of expert 3 is left",))),
        (
            ServiceState(suspects={"experts.1": "no heartbeat for 0.42 s"}, given_up={"experts.0": "it ends too often"}),
            Health(True, (), ("experts.1 is suspect: no heartbeat for 0.42 s", "experts.0 stays down: it ends too often")),
        ),
        (
            ServiceState(fenced={"attention.1": "stopped"}, groups=["attention.0", "attention.1"]),
            Health(True, (), ("attention.1 is marked dead: stopped",)),
        ),
        (
            ServiceState(fenced={"attention.0": "stopped"}, down={"attention.1": "has ended"}, groups=["attention.0", "attention.1"]),
            Health(
                False,
                ("no attention group is left; requests wait",),
                ("attention.0 is marked dead: stopped", "attention.1 has ended; it is being started again"),
            ),
        ),
        (
            ServiceState(degraded="no copy of expert 3 is left", down={"experts.1": "was killed by SIGKILL"}),
            Health(
                True,
                (),
                ("no copy of expert 3 is left; output is degraded", "experts.1 was killed by SIGKILL; it is being started again"),
            ),
        ),
        (ServiceState(workers={"experts.0": WorkerProgress(7, 0.1)}), Health(True, workers={"experts.0": WorkerProgress(7, 0.1)})),
        (
            ServiceState(workers={"experts.0": OVERDUE}),
            Health(False, ("experts.0 has run 'experts' for 70.0 s, its bound is 60.0 s",), workers={"experts.0": OVERDUE}),
        ),
    ],
)
def test_events_of_health(state: ServiceState, expected: Health) -> None:
    assert health(state) == expected
