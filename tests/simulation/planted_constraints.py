"""Lists planted bugs of structured outputs: masks, their state, and the control messages that wait for them. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug, with_graphs

BUILDER = "flowrt.engine.constraint_builder"
CONSTRAINT = "flowrt.engine.constraint"
GRAMMAR = "flowrt.engine.grammar"
GROUP = "flowrt.workers.group"
SAMPLING = "flowrt.operators.sampling"
SEQUENCE = "flowrt.engine.sequence"
WORK = "flowrt.workers.constraint_work"

CONSTRAINT_BUGS: tuple[Bug, ...] = (
    bug(
        "constraint-forgets-committed",
        "a moved request begins its grammar anew",
        (BUILDER, "ConstraintBuilder.build", "request.committed(choice) if replays else ()", "()"),
    ),
    bug(
        "constraint-misses-tokens",
        "a sequence does not tell its constraint its tokens",
        (SEQUENCE, "Sequence.append", "self.constraint.accept(token_id)", "pass"),
    ),
    bug(
        "constraint-shared-by-choices",
        "the choices of a request, and requests with one grammar, share its state",
        (GRAMMAR, "Grammars.matcher", "compiled.deep_copy()", "compiled"),
    ),
    bug(
        "constraint-ends-anywhere",
        "an output may end where it does not match",
        (CONSTRAINT, "Constraint.mask", "if is_complete:", "if True:"),
    ),
    bug(
        "constraint-unmasked",
        "masks change no logits",
        (SAMPLING, "penalized_logits", "_add_masks(logits_SV, inputs.masked_M, inputs.allowed_MB)", "pass"),
    ),
    bug(
        "constraint-wrong-rows",
        "masks are taken for those of the first rows",
        (SAMPLING, "penalized_logits", "inputs.masked_M, inputs.allowed_MB", "torch.arange(inputs.masked_M.numel()), inputs.allowed_MB"),
    ),
    bug(
        "constraint-step-forgotten",
        "a step whose masks took time is never completed",
        (GROUP, "Group._emit_sampling", "start.epoch == self._engine.epoch", "start.epoch == self._engine.epoch and start.step % 7 != 3"),
    ),
    *with_graphs(  # a cancel may come before its submission; a prompt's KV may not
        "prefill.yaml",
        (
            bug(
                "constraint-overtaken",
                "messages of a request overtake its submission, which waits for its grammar",
                (WORK, "ConstraintWork.keep", "not waits and request_id not in self._num_kept", "not waits"),
            ),
        ),
    ),
    bug(
        "constraint-kept-for-ever",
        "a request whose grammar is built is not submitted",
        (
            WORK,
            "ConstraintWork._run_controls",
            "on_built(control, constraints, error)",
            "not constraints and on_built(control, constraints, error)",
        ),
    ),
    bug(
        "constraint-dropped",
        "requests run without their constraint",
        (GROUP, "Group._act", "self._engine.submit(request, constraints or {}, error)", "self._engine.submit(request)"),
    ),
)
