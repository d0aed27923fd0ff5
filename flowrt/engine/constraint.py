"""What one output of a request may continue with: its grammar, the tokens that it allows, its bad words, and the tokens that end it. Pure.

A constraint is a function of the parameters and the tokens of the output, so an output that moved to another group, was replayed or was
preempted has the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

import numpy as np

from flowrt.engine.grammar import Mask, Matcher, cleared, num_mask_bytes
from flowrt.sampling_params import SamplingParams

NO_TOKEN = "its structured_outputs, allowed_token_ids and bad_words together allow no token here"
UNFOLLOWABLE = "its structured_outputs cannot be followed further"


class Constraint:
    """`eos_token_ids`, and the stop tokens of `params`, end the output; they are allowed where it matches its grammar as a whole: before
    `min_tokens`, and the first with `ignore_eos`, only where nothing else is left. `bad_words`: each as token ids.

    `error`: why the output cannot go on, or "", and the `param` that is the reason. Costs of a step do not depend on the length of the
    output.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        eos_token_ids: Collection[int],
        matcher: Matcher | None = None,
        bad_words: Iterable[Sequence[int]] = (),
    ) -> None:
        self._matcher, self._params, self._vocab_size = matcher, params, vocab_size
        self._eos_token_ids = frozenset(eos_token_ids) if matcher is not None or not params.ignore_eos else frozenset()
        self._end_token_ids = self._eos_token_ids.union(params.stop_token_ids)
        self._bad_words = [tuple(word) for word in bad_words]
        self._allowed = _mask_of(params.allowed_token_ids, num_mask_bytes(vocab_size)) if params.allowed_token_ids else None
        self._num_tail = max(map(len, self._bad_words), default=1) - 1
        self._num_tokens = 0
        self._tail: tuple[int, ...] = ()  # the last tokens, as many as the longest bad word needs
        self._new: list[int] = []  # tokens that the matcher does not know yet
        self.error = self.param = ""

    def accept(self, token_id: int) -> None:
        """Add a token of the output."""
        self._num_tokens += 1
        if self._num_tail:
            self._tail = (*self._tail, token_id)[-self._num_tail :]
        if self._matcher is not None and token_id not in self._end_token_ids:
            self._new.append(token_id)

    def catch_up(self) -> None:
        """Pass new tokens to the grammar, which may take time. `mask` does so, too."""
        while self._new and self._matcher is not None:
            self._matcher.accept(self._new[0])
            del self._new[0]

    def mask(self) -> Mask:
        """The tokens that may come next; none after an error. It may run in any thread, one call at a time."""
        matcher, params, ends = self._matcher, self._params, self._end_token_ids
        if matcher is None:
            matched = np.full(num_mask_bytes(self._vocab_size), 255, dtype=np.uint8)
            is_complete = True
        else:
            self.catch_up()
            matched = matcher.allowed()
            is_complete = matcher.is_complete()
        mask = cleared(matched, ends)
        late = ends if self._num_tokens < params.min_tokens else self._eos_token_ids if params.ignore_eos else ()
        if is_complete:
            mask = _with(mask, ends.difference(late))
        if self._allowed is not None:
            mask &= self._allowed
        if bad := [word[-1] for word in self._bad_words if len(word) == 1 or self._tail[1 - len(word) :] == word[:-1]]:
            better = cleared(mask, bad)
            mask = better if better.any() else mask
        if matcher is not None and not mask.any() and self._allowed is None:
            mask = _with(mask, ends) if is_complete else matched  # the end; or a stop token that the grammar needs
        if not self.error and not mask.any():
            self.error, self.param = NO_TOKEN, "structured_outputs" if self._allowed is None else "allowed_token_ids"
            if matcher is not None and matcher.error:
                self.error, self.param = f"{UNFOLLOWABLE}: {matcher.error}", "structured_outputs"
        return mask


def _with(mask: Mask, token_ids: Iterable[int]) -> Mask:
    for token_id in token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return mask


@lru_cache(maxsize=64)
def _mask_of(token_ids: Sequence[int], num_bytes: int) -> Mask:
    """Callers must not modify it."""
    return _with(np.zeros(num_bytes, dtype=np.uint8), token_ids)
