"""Builds the constraints of requests (constraint.py): compiles their grammars, and turns their bad words into tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from flowrt.actors.control import Request
from flowrt.engine.constraint import Constraint
from flowrt.engine.grammar import GrammarError, Grammars
from flowrt.errors import shown
from flowrt.sampling_params import SamplingParams


class ConstraintBuilder:
    """Compiles each grammar of one model once. It reads the model's tokenizer at its first use. Not for two threads at a time."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._directory, self._vocab_size = directory, vocab_size
        self._eos_token_ids = frozenset(each for each in eos_token_ids if 0 <= each < vocab_size)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._directory, self._vocab_size, self._eos_token_ids)

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer.from_file(str(self._directory / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise GrammarError("cannot be used: the directory of the model has no tokenizer.json that can be read", "bad_words") from error

    def build(self, request: Request) -> dict[int, Constraint]:
        """The constraint of each choice behind its committed tokens. Raises GrammarError."""
        choices = (choice for choice in range(request.params.n) if choice not in request.ended_choices)
        replays = request.stage != "prefill"  # a prefill worker computes the first token again
        return {choice: self.constraint(request.params, request.committed(choice) if replays else ()) for choice in choices}

    def constraint(self, params: SamplingParams, token_ids: Sequence[int] = ()) -> Constraint:
        """The constraint of an output behind its first tokens. Raises GrammarError."""
        outputs = params.structured_outputs
        matcher = self._grammars.matcher(outputs) if outputs is not None else None
        words = list(self._token_ids_of(params.bad_words))
        constraint = Constraint(params, self._vocab_size, self._eos_token_ids, matcher, words)
        for token_id in token_ids:
            constraint.accept(token_id)
        constraint.catch_up()
        return constraint

    def _token_ids_of(self, words: Sequence[str]) -> Iterator[Sequence[int]]:
        """The tokens of each word; also those with a space before it, if these are as many and begin with another token, as in vLLM. White
        space alone is a word, too. Raises GrammarError for a word without tokens."""
        for word in words:
            text = word.lstrip()
            inside = self._tokenizer.encode(text or word, add_special_tokens=False).ids
            if not inside:
                raise GrammarError(f"has {shown(word)}, of which the tokenizer of this model makes no token", "bad_words")
            yield inside
            after_space = self._tokenizer.encode(f" {text}", add_special_tokens=False).ids if text else []
            if len(after_space) == len(inside) and after_space[0] != inside[0]:
                yield after_space
