"""Lists planted bugs of the prefix cache, and of logprobs of prompts, which may not use it. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, bug

BATCH = "flowrt.engine.batch"
CACHE = "flowrt.engine.prefix_cache"
ENGINE = "flowrt.engine.engine"
MEMORY = "flowrt.engine.group_memory"
SCHEDULER = "flowrt.engine.scheduler"
SEQUENCE = "flowrt.engine.sequence"
TRANSFER = "flowrt.exchange.kv_transfer"

PREFIX_BUGS: tuple[Bug, ...] = (
    bug("prefix-tokens-ignored", "what is cached is found by its length", (
        CACHE, "content_digest", "sha256(before + array('q', tokens).tobytes())", "sha256(before)"), (
        CACHE, "PrefixCache._segment", "segment if segment.tokens == self._tokens(tokens, number) else None", "segment")),
    bug("prefix-salt-ignored", "requests of different cache_salt share pages", (
        CACHE, "PrefixCache._digest", "prefix.salt.encode()", "b''"), (
        CACHE, "PrefixCache._segment", " or segment.namespace != prefix.namespace", "")),
    bug("prefix-order-ignored", "pages of the middle of a prompt are found for a beginning", (
        CACHE, "PrefixCache._digest", "content_digest(before,", "content_digest(b'',"), (
        CACHE, "PrefixCache._segment", "segment.parent is not parent or ", "")),
    bug("prefix-used-still-idle", "cached pages that a sequence uses count as free", (
        CACHE, "PrefixCache.take", "self._idle.pop(segment, None)", "pass")),
    bug("prefix-idle-too-soon", "cached pages count as free when the first of their sequences ends", (
        CACHE, "PrefixCache.release", " and self._pages.holders_of(page) == {HOLDER}", "")),
    bug("prefix-evicted-kept", "an evicted page is still found", (
        CACHE, "PrefixCache._drop", "del self._segments[segment.digest], self._by_page[segment.pages[0]]", "del self._by_page[segment.pages[0]]")),
    bug("prefix-page-leaked", "evicted pages are not free", (
        CACHE, "PrefixCache._drop", "self._pages.free(segment.pages, HOLDER)", "pass")),
    bug("prefix-degraded-kept", "what was computed without an expert is kept", (
        MEMORY, "GroupMemory.cache", " and (not sequence.is_degraded)", "")),
    bug("prefix-whole-prompt-found", "nothing is left to compute of a prompt that is cached", (
        MEMORY, "GroupMemory._cached", "num_tokens - 1", "num_tokens")),
    bug("prefix-pull-skips", "a group pulls from the wrong token on what its cache lacks", (
        ENGINE, "Engine.new_pulls", "each.num_computed_tokens, each", "each.num_computed_tokens * 2, each")),
    bug("prompt-logprobs-cached", "a prompt whose logprobs are wanted begins with cached pages", (
        SEQUENCE, "Sequence.computes_whole_prompt", "self.num_redone > 0 or self.scores_prompt", "self.num_redone > 0")),
    bug("prompt-logprobs-doubled", "logprobs of a prompt that is computed again are added to the first ones", (
        SCHEDULER, "Scheduler.recompute", "sequence.prompt_logprobs = []", "pass")),
    bug("prompt-logprobs-shifted", "each token of a prompt gets the logprob of the next one", (
        BATCH, "build_batch", "sequence.tokens[start + at + 1]", "sequence.tokens[start + at]")),
)  # fmt: skip
