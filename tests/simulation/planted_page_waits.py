"""Lists planted bugs by which sequences of prefill workers and groups wait for pages in a circle. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, bug

ENGINE = "flowrt.engine.engine"
TRANSFERS = "flowrt.engine.transfers"
SEQUENCE = "flowrt.engine.sequence"

PAGE_WAIT_BUGS: tuple[Bug, ...] = (
    bug("choices-apart", "a prefill worker computes a prompt once for each choice, and a choice that is computed keeps its pages for the others", (
        SEQUENCE, "Sequence.__post_init__", "if self.prefills:", "if False:"), (
        ENGINE, "Engine._begin", "del choices[1:]", "pass"), (
        TRANSFERS, "is_offered", "not first.prefills", "not first.prefills or any((each.state is not SequenceState.HELD for each in siblings))"), (
        ENGINE, "Engine._append", "decisions.append(Hold(request.id, request.attempt, sequence.num_prompt_tokens, sequence.is_degraded))",
        "decisions += [Hold(request.id, request.attempt, sequence.num_prompt_tokens, sequence.is_degraded)] * all((each.state is SequenceState.HELD for each in sequence.siblings))")),
)  # fmt: skip
