"""Turns the outputs of one request into text, choice by choice: decodes tokens, finds stop strings and tool calls, counts tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from flowrt.actors.front_end_messages import RequestOutput
from flowrt.actors.outputs import ChoiceEvent, EndEvent, Logprobs, TokenEvent
from flowrt.gateway.request_log import ChoiceLog, Detokenizer, is_hidden_stop, new_stop_strings
from flowrt.sampling_params import FinishReason, SamplingParams
from flowrt.serving.output_parser import CallDelta, ContentDelta, OutputDelta, OutputParser, ReasoningDelta, joined


@dataclass(slots=True)
class TextPiece:
    """New text of a choice, and the tokens that it comes from. `logprobs`: one per token, or none. The last piece of a choice has the
    `finish_reason`. `ends_at_stop_token`: its last token gives no text. `deltas`: content and, where a parser finds them, reasoning and
    calls, in order. `cuts_call`: the choice ends within a call."""

    choice: int
    deltas: list[OutputDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_degraded: bool = False
    ends_at_stop_token: bool = False
    cuts_call: bool = False

    def parts(self) -> tuple[str, str, list[CallDelta]]:
        """Content, reasoning and calls."""
        text, reasoning, calls = "", "", list[CallDelta]()
        for each in self.deltas:
            match each:
                case ContentDelta():
                    text += each.text
                case ReasoningDelta():
                    reasoning += each.text
                case CallDelta():
                    calls.append(each)
        return text, reasoning, calls


def merged(pieces: Iterable[TextPiece]) -> dict[int, TextPiece]:
    """The pieces of each choice as one."""
    of_choices: dict[int, list[TextPiece]] = {}
    for piece in pieces:
        of_choices.setdefault(piece.choice, []).append(piece)
    return {choice: _merged(each) for choice, each in of_choices.items()}


def _merged(pieces: list[TextPiece]) -> TextPiece:
    return TextPiece(
        pieces[0].choice,
        joined(delta for piece in pieces for delta in piece.deltas),
        [token_id for piece in pieces for token_id in piece.token_ids],
        [logprobs for piece in pieces for logprobs in piece.logprobs],
        pieces[-1].finish_reason,  # the last one of a choice has it
        any(piece.is_degraded for piece in pieces),
        any(piece.ends_at_stop_token for piece in pieces),
        pieces[-1].cuts_call,
    )


class RequestText:
    """The choices of one request. `first_choice`: the number of its first one among those of an HTTP request. `on_stop` is called when a
    stop string ends a choice. `new_parser` returns that of one choice, or None: then the text is as it is."""

    def __init__(
        self,
        params: SamplingParams,
        new_detokenizer: Callable[[], Detokenizer] | None,
        eos_token_ids: Collection[int],
        first_choice: int,
        on_stop: Callable[[int], None],
        new_parser: Callable[[], OutputParser | None] = lambda: None,
    ) -> None:
        self._params, self._eos_token_ids, self._first_choice, self._on_stop = params, eos_token_ids, first_choice, on_stop
        self._choices = [
            ChoiceLog(index, new_detokenizer() if new_detokenizer is not None else None, new_stop_strings(params))
            for index in range(params.n)
        ]
        self._parsers = [new_parser() for _ in range(params.n)]
        self.num_reasoning_tokens = 0

    @property
    def has_ended(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    def add(self, output: RequestOutput) -> Iterator[TextPiece]:
        """One piece per token, and one for the end of a choice without tokens. `output.end` is no error."""
        for event in output.events:
            match event:
                case TokenEvent():
                    choice = self._choices[event.choice]
                    for at, token_id in enumerate(event.token_ids):
                        if choice.finish_reason is not None:  # computed before the stop was known
                            break
                        yield self._push(choice, token_id, list(event.logprobs[at : at + 1]), event.degraded)
                case ChoiceEvent():
                    yield from self._end(self._choices[event.choice], event.finish_reason)
                case EndEvent():
                    for choice in self._choices:
                        yield from self._end(choice, event.finish_reason)

    def _push(self, choice: ChoiceLog, token_id: int, logprobs: list[Logprobs], is_degraded: bool) -> TextPiece:
        text, has_stopped = choice.push(token_id, self._params, self._eos_token_ids)
        piece = TextPiece(self._first_choice + choice.index, [], [token_id], logprobs, None, is_degraded)
        piece.ends_at_stop_token = is_hidden_stop(self._params, self._eos_token_ids, token_id)
        if has_stopped:
            piece.finish_reason, _ = choice.end("stop")
            self._on_stop(choice.index)
        return self._with_text(choice.index, piece, text)

    def _end(self, choice: ChoiceLog, reason: FinishReason) -> Iterator[TextPiece]:
        if choice.finish_reason is None:
            finish_reason, text = choice.end(reason)
            yield self._with_text(choice.index, TextPiece(self._first_choice + choice.index, finish_reason=finish_reason), text)

    def _with_text(self, index: int, piece: TextPiece, text: str) -> TextPiece:
        if (parser := self._parsers[index]) is None:
            piece.deltas = [ContentDelta(text)] if text else []
        else:
            self.num_reasoning_tokens += len(piece.token_ids) if parser.is_in_reasoning else 0
            piece.deltas = joined([*parser.push(text), *([] if piece.finish_reason is None else parser.finish())])
            piece.cuts_call = piece.finish_reason is not None and parser.has_cut_call
        return piece
