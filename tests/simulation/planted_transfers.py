"""Lists planted bugs of KV transfers and of requests that go through two stages. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, bug

TRANSFER = "flowrt.exchange.kv_transfer"
GROUP = "flowrt.workers.group"
ENGINE = "flowrt.engine.engine"
SCHEDULER = "flowrt.engine.scheduler"
GATEWAY, STAGES = "flowrt.gateway.gateway", "flowrt.gateway.stages"
REQUEST_LOG = "flowrt.gateway.request_log"

TRANSFER_BUGS: tuple[Bug, ...] = (
    bug("late-chunk-written", "the chunks of an attempt that has ended are written into pages that others have by then", (
        TRANSFER, "KvUnpack.drop_ended", "if not is_pulling(*key)", "if False")),
    bug("offer-kept", "a prefill worker keeps the offers of ended attempts", (
        GROUP, "Group._carry_out", "if self._pack is not None:", "if False:")),
    bug("pulled-too-soon", "a group uses KV while the last chunks are on their way", (
        TRANSFER, "KvUnpack.on_chunk", "elif transfer.waiting or transfer.outstanding:", "elif transfer.waiting:")),
    bug("held-pages-kept", "a prefill worker is not told that the KV was pulled", (
        GATEWAY, "Gateway.on_transfer", "decisions = self._cancel(log, but=group)", "decisions = []")),
    bug("moved-pages-kept", "the worker that did not die keeps the pages of a moved request", (
        GATEWAY, "Gateway._move", "decisions = self._cancel(log, but)", "decisions = []")),
    bug("prefill-awaited-for-ever", "requests wait for prefill workers of which none is left", (
        STAGES, "Stages.place_waiting", "if self._prefill.has_no_group:", "if False:")),
    bug("offered-after-one-choice", "a prompt is offered when its first choice has a token", (
        ENGINE, "Engine._offer", "any((sequence.state is not SequenceState.HELD for sequence in siblings))", "siblings[0].state is not SequenceState.HELD")),
    bug("first-token-forgotten", "a group is not told the tokens of the prefill worker", (
        REQUEST_LOG, "request_of", "if log.attempt or log.kv else ()", "if log.attempt else ()")),
    bug("old-offer-taken", "the offer of an older attempt counts for the present one", (
        GATEWAY, "Gateway.on_transfer", "control.attempt != log.attempt", "control.attempt > log.attempt"),
        (STAGES, "Stages.worker_of", "return self._stage(log).group_of(log)", "return self._stage(log).group_of(log) or self._prefill.group_of(log)")),
    bug("pulling-runs", "a sequence takes part in steps before its KV is there", (
        SCHEDULER, "Scheduler._admit", "self.pulling.append(sequence)", "self._run(sequence)")),
)  # fmt: skip
