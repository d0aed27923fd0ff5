"""Lists planted bugs of KV transfers and of requests that go through two stages. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, bug

TRANSFER = "flowrt.exchange.kv_transfer"
ENGINE = "flowrt.engine.engine"
SCHEDULER = "flowrt.engine.scheduler"
GATEWAY = "flowrt.gateway.gateway"
REQUEST_LOG = "flowrt.gateway.request_log"
STAGES = "flowrt.gateway.stages"
PROBED_LINK = "flowrt.actors.probed_link"
LAZY_CHANNEL = "flowrt.actors.lazy_channel"

TRANSFER_BUGS: tuple[Bug, ...] = (
    bug("late-chunk-written", "the chunks of an attempt that has ended are written into pages that others have by then", (
        TRANSFER, "KvUnpack.drop_ended", "if not is_pulling(*key)", "if False")),
    bug("offer-kept", "a prefill worker keeps the offers of ended attempts", (
        TRANSFER, "KvPack.update", "if key not in by_key or by_key[key].pages != offer.prompt.pages:", "if False:")),
    bug("pulled-too-soon", "a group uses KV while the last chunks are on their way", (
        TRANSFER, "KvUnpack.on_chunk", "if header.is_last:", "if header.is_last or transfer.received[0] == transfer.kv.num_tokens:")),
    bug("chunk-before-its-layer", "a pull is answered with tokens of layers that the running step has not computed", (
        TRANSFER, "_PromptOffer._num_computed", "self.prompt.num_in_step if layer < self.num_written else self.prompt.num_committed", "self.prompt.num_in_step")),
    bug("layers-of-the-step-before", "the layers that a step has written count for the next step", (
        TRANSFER, "_PromptOffer.advance", "if prompt.step != self.prompt.step:", "if False:")),
    bug("hold-freed-under-pulls", "an offer ends and the pulls that wait for it get no response", (
        TRANSFER, "KvPack.update", "self._refuse_waiting(offer, 'the offer has ended')", "pass")),
    bug("kv-without-first-token", "a group decodes when it has the KV, before it knows the first token", (
        ENGINE, "Engine._use_pulled", "if not sequence.is_pulled or sequence.kv is None or (not sequence.kv.is_complete):", "if not sequence.is_pulled or sequence.kv is None:")),
    bug("completion-unsent", "a group that pulls early does not learn that the prompt is computed", (
        GATEWAY, "Gateway.on_transfer", "if completed is not None", "if False")),
    bug("held-pages-kept", "a prefill worker is not told that the KV was pulled", (
        GATEWAY, "Gateway.on_transfer", "decisions = self._cancel(log, (group,))", "decisions = []")),
    bug("moved-pages-kept", "the worker that did not die keeps the pages of a moved request", (
        GATEWAY, "Gateway._move", "decisions = self._cancel(log, but)", "decisions = []")),
    bug("loss-before-blame", "KV that is lost while its prompt is computed begins an attempt elsewhere, before the prefill worker's end arrives", (
        STAGES, "Stages.lose_kv", "self._stage(log) is self._prefill", "False")),
    bug("first-token-forgotten", "a group is not told the tokens of the prefill worker", (
        REQUEST_LOG, "request_of", "if log.attempt or log.kv else ()", "if log.attempt else ()")),
    bug("first-token-skipped", "a group takes the first token for one whose KV it has pulled", (
        SCHEDULER, "Scheduler.pulled", "sequence.num_computed_tokens = sequence.kv.num_tokens", "sequence.num_computed_tokens = sequence.kv.num_tokens + 1")),
    bug("broken-link-kept", "a link is used on that has not carried a probe", (
        PROBED_LINK, "ProbedLink.check", "elif self._num_silent == LOST_AFTER:", "elif False:")),
    bug("unopened-link-kept", "a link that cannot be opened is waited for", (
        LAZY_CHANNEL, "LazyChannel.abort", "self._fail(reason)", "pass")),
)  # fmt: skip
