"""Lists planted bugs of KV transfers and of requests that go through two stages. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, bug

TRANSFER = "flowrt.exchange.kv_transfer"
GROUP = "flowrt.workers.group"
ENGINE = "flowrt.engine.engine"
SCHEDULER = "flowrt.engine.scheduler"
GATEWAY = "flowrt.gateway.gateway"
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
    bug("offered-after-one-choice", "a prompt is offered when its first choice has a token", (
        ENGINE, "Engine._offer", "any((sequence.state is not SequenceState.HELD for sequence in siblings))", "siblings[0].state is not SequenceState.HELD")),
    bug("first-token-forgotten", "a group is not told the tokens of the prefill worker", (
        REQUEST_LOG, "request_of", "if log.attempt or log.kv else ()", "if log.attempt else ()")),
    bug("first-token-skipped", "a group takes the first token for one whose KV it has pulled", (
        SCHEDULER, "Scheduler.pulled", "sequence.num_computed_tokens = sequence.kv.num_tokens", "sequence.num_computed_tokens = sequence.kv.num_tokens + 1")),
)  # fmt: skip
