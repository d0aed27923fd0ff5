"""Compiles the grammar of a request's structured outputs for the tokens of a model, with the library llguidance.

It does not import torch, and is pure: the same tokenizer file, grammar and tokens give the same masks. Its limits count work, not time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrt.errors import as_line, install_command
from flowrt.structured_outputs import StructuredOutputs

MAX_CACHED = 64  # compiled grammars
MAX_ERROR_CHARACTERS = 300
Mask = NDArray[np.uint8]  # [num_mask_bytes], a bit per token, the least significant first
_MISSING = f"cannot be used without the package llguidance: {install_command('structured')}"
# What a schema may not choose by the library's own key x-guidance: to have keywords ignored, or white space without a bound, of which a
# model may write nothing else to the end.
_STRICT = {"lenient": False, "coerce_one_of": False}
_JSON = _STRICT | {"whitespace_flexible": True, "whitespace_pattern": r" |\r?\n[ \t]{0,40}"}
_DENSE_JSON = _STRICT | {"whitespace_flexible": False}
_LIMITS = {
    "initial_lexer_fuel": 2_000_000,  # some tens of milliseconds
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 4_000,  # a schema with a thousand optional properties; the time for a token grows with it
    "max_lexer_states": 50_000,  # 1 to 2 KB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
MIN_INTEGER = 1024 - (1 << 63)  # the next double
_LONG_NUMBER = re.compile(r"-\d{19}")
_TOO_WIDE = "too many alternatives are open at one place; use fewer, or write texts as choice, regex or enum"
_TOO_LARGE = "its regular expressions and lengths are too large; use shorter or fewer repetitions"
_SPECIAL = "it needs the text of a special token, which no output has"
_CAUSES = {  # by a part of the library's text
    "forced bytes: got": _SPECIAL,
    "NoExtension": "no text in tokens of this model matches it",
    " items; max is ": _TOO_WIDE,
    "Too many items (limit ": _TOO_WIDE,
    "too many expressions": _TOO_LARGE,
    "too many states": _TOO_LARGE,
    "initial lexer configuration (grammar) too big": _TOO_LARGE,
    "fuel exhausted": _TOO_LARGE,
    "relevance check fuel": _TOO_LARGE,
}


class GrammarError(ValueError):
    """A parameter of a request cannot be used. The message is one line: the parameter, then `text`."""

    def __init__(self, text: str, param: str = "structured_outputs") -> None:
        super().__init__(f"{param} {text}")
        self.text, self.param = text, param


class Grammars:
    """The compiled grammars of one model, the newest of which are kept. `vocab_size`: the tokens of the model, which may be more than those
    of the tokenizer; `eos_token_ids` are below it. Raises GrammarError where the library is missing or does not know this kind of
    tokenizer."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._library, self._vocab_size = _load(), vocab_size
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise GrammarError("cannot be used without the tokenizer.json of the model, and its directory has none")
        # The library ends a text that is complete with one of these tokens; a model without any gets one that no mask contains.
        try:
            self._tokens = self._library.LLTokenizer(str(path), n_vocab=vocab_size, eos_token=sorted(eos_token_ids) or None)
        except (ValueError, OSError) as error:
            raise GrammarError(f"cannot be used with the tokenizer of this model: {as_line(str(error))}") from error
        self._compiled: dict[StructuredOutputs, Any] = {}  # the latest used last

    def matcher(self, outputs: StructuredOutputs) -> Matcher:
        """A matcher at the beginning of an output. Raises GrammarError."""
        if (compiled := self._compiled.pop(outputs, None)) is None:
            compiled = self._compile(outputs)
        self._compiled[outputs] = compiled
        while len(self._compiled) > MAX_CACHED:
            del self._compiled[next(iter(self._compiled))]
        return Matcher(compiled.deep_copy(), self._tokens.eos_tokens, num_mask_bytes(self._vocab_size))

    def _compile(self, outputs: StructuredOutputs) -> Any:
        try:
            grammar = self._grammar_of(outputs)
            limits = self._library.LLParserLimits(**_LIMITS)
            compiled = self._library.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
            error = compiled.get_error()
            if not error:
                mask = compiled.compute_bitmask()  # the first takes the longest; behind an error it allows the end
                error = compiled.get_error()
                if not (error or compiled.is_accepting() or self._has_text(mask)):
                    error = _SPECIAL
        except Exception as raised:  # of the library's Python
            error = str(raised) or type(raised).__name__
        if error:
            raise GrammarError(f"cannot be used: {_cause(error)}")
        return compiled

    def _has_text(self, mask: bytes) -> bool:
        allowed = np.frombuffer(mask, dtype=np.uint8)[: num_mask_bytes(self._vocab_size)]
        return bool(cleared(allowed, self._tokens.eos_tokens).any())

    def _grammar_of(self, outputs: StructuredOutputs) -> str:
        library = self._library.LLMatcher
        if outputs.json is not None or outputs.json_object:
            schema = within_int64(outputs.json or '{"type": "object"}')
            return str(library.grammar_from_json_schema(schema, overrides=_DENSE_JSON if outputs.disable_any_whitespace else _JSON))
        if outputs.regex is not None:
            return str(library.grammar_from_regex(outputs.regex))
        if outputs.choice:
            # One terminal: the lexer walks thousands of choices as one automaton, the parser each one by itself.
            return str(library.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, outputs.choice))))
        return str(self._library.grammar_from("grammar", outputs.grammar))


def within_int64(schema: str) -> str:
    """The schema with bounds of integers that the library can read: it cannot read -2^63, which generators of schemas for such integers
    write. The bound that replaces it allows a thousand numbers less."""
    if not _LONG_NUMBER.search(schema):
        return schema

    def bounded(value: Any) -> Any:
        if isinstance(value, list):
            return [bounded(each) for each in value]
        if not isinstance(value, dict):
            return value
        found = {name: bounded(each) for name, each in value.items() if name not in ("enum", "const")}
        bounds = {name: max(value[name], MIN_INTEGER) for name in ("minimum", "exclusiveMinimum") if type(value.get(name)) is int}
        return value | found | bounds

    return json.dumps(bounded(json.loads(schema)))


class Matcher:
    """What one output may continue with: a function of its grammar and its tokens. `error`: why there is no mask any more, or "".
    `end_token_ids`: those by which the library lets an output end. `num_bytes`: of a mask."""

    def __init__(self, matcher: Any, end_token_ids: Collection[int], num_bytes: int) -> None:
        self._matcher, self._end_token_ids, self._num_bytes = matcher, tuple(end_token_ids), num_bytes
        self.error = ""

    def accept(self, token_id: int) -> None:
        """Add a token of the output, not one that ends it."""
        if not self.error and not self._matcher.consume_token(token_id):
            self.error = _cause(self._matcher.get_error()) or f"token {token_id} does not match"

    def is_complete(self) -> bool:
        """Whether the output so far matches as a whole."""
        return not self.error and bool(self._matcher.is_accepting())

    def allowed(self) -> Mask:
        """The tokens of text that may come next; none after an `error`. It may run in any thread, one call of a matcher at a time."""
        mask = cleared(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: self._num_bytes], self._end_token_ids)
        if not self.error and self._matcher.is_error():
            self.error = _cause(self._matcher.get_error())
        if self.error:
            mask[:] = 0
        return mask


def _cause(error: str) -> str:
    """The cause of an error of the library, on one line; of the limits that a grammar may reach at any token, in words for its author."""
    for part, cause in _CAUSES.items():
        if part in error:
            return cause
    return as_line(error.replace("<non-verbose/>", ""), MAX_ERROR_CHARACTERS)


def num_mask_bytes(vocab_size: int) -> int:
    return -(-vocab_size // 8)


def cleared(mask: Mask, token_ids: Iterable[int]) -> Mask:
    """A copy of the mask in which these tokens are not allowed."""
    mask = mask.copy()
    for token_id in token_ids:
        mask[token_id >> 3] &= 255 ^ (1 << (token_id & 7))
    return mask


def _load() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GrammarError(_MISSING) from error
    return llguidance
