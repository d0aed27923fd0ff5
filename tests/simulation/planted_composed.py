"""Lists planted bugs of steps of a target time, and of workers for long prompts alone. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, bug

ROUTER = "flowrt.gateway.router"
SCHEDULER = "flowrt.engine.scheduler"
STEP_TIMES = "flowrt.engine.step_times"

COMPOSED_BUGS: tuple[Bug, ...] = (
    bug("target-stops-prompts", "a prompt for which a step has no time left gets no row", (
        STEP_TIMES, "StepBudget.num_prompt_rows", "max(self._min_prompt_rows, math.floor(left / row_seconds))", "max(0, math.floor(left / row_seconds))"), (
        STEP_TIMES, "StepBudget.__init__", "max(target_seconds - fixed, fixed)", "target_seconds / 10 - fixed")),
    bug("target-stops-decoding", "a sequence whose context alone takes longer than the target gets no row", (
        SCHEDULER, "Scheduler.schedule", "parts and (not budget.has_room(len(sequence.tokens)))", "not budget.has_room(len(sequence.tokens))"), (
        STEP_TIMES, "StepBudget.__init__", "max(target_seconds - fixed, fixed)", "target_seconds / 10 - fixed")),
    bug("long-prompts-stranded", "long prompts wait for their worker when it does not come back", (
        ROUTER, "Router._meant_for", "self._idle if self._lost.keys() >= {*meant} else meant", "meant")),
)  # fmt: skip
