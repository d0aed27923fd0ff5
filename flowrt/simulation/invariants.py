"""What must hold after every run, whatever befell it.

Here: `check`, `may_fail`, SURVIVED_FAULTS. Not here: what is looked at inside of workers (inside.py, called by cluster.py), what is drawn
(cases.py). Raises InvariantError with the number of what does not hold:

I1 tokens: indexes 0 to n-1, each once, the reference's up to the first that is marked as degraded. I2 nothing of an old epoch or
incarnation is used: seen as I1, I3 and I4.
I3 each page free or held once. I4 credits at hand and on their way are all there are. I5 every request ends, once, in time.
I6 queues within their bounds: the code's own checks. I7 who did nothing wrong is not held to be dead. I8 nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrt.graph.model import Graph
from flowrt.graph.recovery import survives
from flowrt.reliability.scenario import AnyFault, Scenario, Skew
from flowrt.simulation.errors import InvariantError
from flowrt.simulation.served import Served, SimulatedRequest

# Faults that do not heal by themselves and that the run survives, with all its tokens, when it survives the death of the process they
# hit (flowrt/graph/recovery.py). A lost connection is survived when either of its ends is.
SURVIVED_FAULTS = frozenset({"crash", "reset"})

LOOKED_SECONDS = 0.05  # by which an outage may have begun before it was seen
LOST_TEXT = "no copy is left of expert"  # in the error of a request that ends for a lost expert

Reference = tuple[tuple[int, ...], ...]  # the token ids of each choice of a request


def may_fail(graph: Graph, scenario: Scenario) -> frozenset[str]:
    """The processes that the run may fail for, by name: those that a fault befalls which neither heals nor is outlived."""
    return frozenset(name for fault in scenario.faults if _is_fatal(graph, fault) for name in fault.processes)


def _is_fatal(graph: Graph, fault: AnyFault) -> bool:
    return not fault.heals and not (fault.kind in SURVIVED_FAULTS and any(survives(graph, name) for name in fault.processes))


def check(graph: Graph, scenario: Scenario, requests: Sequence[SimulatedRequest], served: Served, references: Sequence[Reference]) -> None:
    """Raise InvariantError unless `served` is a right outcome: the right tokens; or, where a fault allows it, an error that names who
    failed, in time, with all requests ended and all tokens given till then right. A request may end with an error alone, or be marked as
    degraded, which it is depends on the graph, only when an expert had no copy for as long as the graph says."""
    if served.failure is not None:
        culprits = frozenset[str]() if scenario.expect == "tokens" else may_fail(graph, scenario)
        if served.failed not in culprits:
            raise InvariantError("I7", f"the run failed for {served.failed}, which nothing befell that would allow it: {served.failure}")
        latest = scenario.ends_seconds + scenario.deadline_seconds
        if served.failed_seconds is not None and served.failed_seconds > latest:
            raise InvariantError("I5", f"the failure was told after {served.failed_seconds:.3f} s, allowed were {latest:.3f} s")
    if len(served.choices) < len(requests) and served.failure is None:
        raise InvariantError("I5", f"{len(served.choices)} of {len(requests)} requests were taken")
    for index, (request, choices, reference) in enumerate(zip(requests, served.choices, references, strict=False)):
        if served.num_ends[index] != 1:
            raise InvariantError("I5", f"request {index} ended {served.num_ends[index]} times")
        reason = served.finish_reasons[index]
        broken_off = reason == "abort" and request.cancel_seconds is not None
        told = served.errors[index] or ""
        broken_off = broken_off or (reason == "error" and served.failure is not None and bool(told))
        lost = _lost_long_enough(graph, scenario, served, index)
        degrades = graph.reliability.unavailable_expert == "degrade"
        broken_off = broken_off or (reason == "error" and LOST_TEXT in told and lost and not degrades)
        degraded = served.degraded[index] if served.degraded else ()
        if any(degraded) and not (lost and degrades):
            raise InvariantError("I1", f"request {index} is marked as degraded, and no expert was lost for so long that it may be")
        if not broken_off and reason not in ("length", "stop"):
            raise InvariantError("I1", f"request {index} ended with {reason or 'nothing'}: {served.errors[index]}")
        _check_tokens(index, choices, served.indexes[index], reference, degraded, whole=not broken_off)


def _lost_long_enough(graph: Graph, scenario: Scenario, served: Served, index: int) -> bool:
    """Whether an expert had no copy for so long that the request may have ended for it; by a clock that may have run too fast."""
    fastest = max([1.0, *(fault.rate for fault in scenario.faults if isinstance(fault, Skew))])
    lost_seconds = fastest * (served.outage_seconds[index] + LOOKED_SECONDS)
    return scenario.expect != "tokens" and lost_seconds >= graph.reliability.unavailable_expert_seconds


def _check_tokens(
    index: int, choices: Reference, told: Sequence[Sequence[int]], reference: Reference, degraded: Reference, whole: bool
) -> None:
    if len(choices) != len(reference):
        raise InvariantError("I1", f"request {index} has {len(choices)} choices of {len(reference)}")
    for choice, (ours, theirs, indexes) in enumerate(zip(choices, reference, told, strict=True)):
        which = f"request {index}" + (f" choice {choice}" if choice else "")
        if list(indexes) != list(range(len(ours))):
            raise InvariantError("I1", f"{which}: its client was told the indexes {list(indexes)}")
        if choice < len(degraded) and (marked := degraded[choice]):  # from there on it may say anything, and end anywhere
            first = marked[0]
            ours, theirs = ours[:first], theirs[:first]
        if ours != (theirs if whole else theirs[: len(ours)]):
            raise InvariantError("I1", f"{which} gave {ours}, the reference {theirs}")
