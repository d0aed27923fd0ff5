"""Estimates which worker has the KV of which beginnings of prompts in its prefix cache, from the requests that it was given. Pure.

It counts in pieces of PIECE_TOKENS tokens. When a worker has been given more than fit in its pages, the oldest are forgotten. A wrong
estimate costs time alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrt.engine.prefix_cache import content_digest

PIECE_TOKENS = 64


def digests_of(salt: str, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """The digest of each whole piece of a prompt, which stands for all tokens up to its end. At least one token lies behind the last."""
    digests: list[bytes] = []
    for start in range(0, (len(tokens) - 1) // PIECE_TOKENS * PIECE_TOKENS, PIECE_TOKENS):
        digests.append(content_digest(digests[-1] if digests else salt.encode(), tokens[start : start + PIECE_TOKENS]))
    return tuple(digests)


class PrefixIndex:
    """`max_kv_tokens`: of each worker, the tokens that its cache may hold. `earlier`: the index of other workers, some of which stay."""

    def __init__(self, max_kv_tokens: Mapping[str, int], earlier: PrefixIndex | None = None) -> None:
        known = {} if earlier is None else earlier._pieces
        self._max_pieces = {worker: num_tokens // PIECE_TOKENS for worker, num_tokens in max_kv_tokens.items()}
        self._pieces: dict[str, dict[bytes, None]] = {worker: known.get(worker, {}) for worker in max_kv_tokens}  # the latest last

    def add(self, worker: str, digests: Sequence[bytes]) -> None:
        pieces = self._pieces[worker]
        for digest in reversed(digests):  # the end of a prompt is forgotten first
            pieces.pop(digest, None)
            pieces[digest] = None
        while len(pieces) > self._max_pieces[worker]:
            del pieces[next(iter(pieces))]

    def num_cached_tokens(self, worker: str, digests: Sequence[bytes]) -> int:
        pieces = self._pieces[worker]
        found = next((number for number, digest in enumerate(digests) if digest not in pieces), len(digests))
        return found * PIECE_TOKENS

    def num_held_tokens(self, worker: str) -> int:
        return len(self._pieces[worker]) * PIECE_TOKENS

    def clear(self, worker: str) -> None:
        """The worker was lost: its next incarnation has an empty cache."""
        self._pieces[worker].clear()
