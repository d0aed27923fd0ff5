"""Defines SamplingParams: the parameters of a request, their bounds and their checks.

The Python API, the command line, prompt files, the gateway and the engine all use it. Bounds that depend on a model or a graph are
in flowrt/engine/validation.py. It does not import torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

import msgspec
from msgspec import Meta

from flowrt.errors import ArgumentError, shown
from flowrt.structured_outputs import StructuredOutputs, checked_outputs

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 17  # of a prompt, in one message: 2 MB
MAX_WHOLE = (1 << 63) - 1  # the largest integer of a message header
MIN_FACTOR, MAX_NUMBER = 1e-9, 1e9  # logits times or divided by these stay finite
MAX_SALT_CHARACTERS = 256
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKEN_IDS = 64, 1024, 1024
MAX_BIASES, MAX_BIAS = 1024, 100
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 256, 256


def _whole(least: int, most: int = MAX_WHOLE, note: str = "") -> Meta:
    upper = "2**63 - 1" if most == MAX_WHOLE else str(most)
    return Meta(ge=least, le=most, description=f"a whole number from {least} to {upper}{note}")


_STOP = Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)
_STOPS = Meta(
    max_length=MAX_STOPS, description=f"a text or a list of at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARACTERS} characters"
)
_STOP_IDS = Meta(max_length=MAX_STOP_TOKEN_IDS, description=f"a list of at most {MAX_STOP_TOKEN_IDS} whole numbers from 0 to 2**63 - 1")
_BIAS = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
_BIASES = Meta(
    max_length=MAX_BIASES,
    description=f"a mapping of at most {MAX_BIASES} token ids to numbers from -{MAX_BIAS} to {MAX_BIAS}",
)
_ALLOWED = Meta(
    max_length=MAX_ALLOWED_TOKEN_IDS, description=f"a list of at most {MAX_ALLOWED_TOKEN_IDS} whole numbers from 0 to 2**63 - 1"
)
_WORD = Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)
_WORDS = Meta(
    max_length=MAX_BAD_WORDS, description=f"a list of at most {MAX_BAD_WORDS} texts, each of 1 to {MAX_BAD_WORD_CHARACTERS} characters"
)
_OUTPUTS = Meta(description="an object with one of json, json_object, regex, choice, grammar")
_SALT = Meta(max_length=MAX_SALT_CHARACTERS, description=f"a text of at most {MAX_SALT_CHARACTERS} characters")
_BOOL = Meta(description="true or false")
_FACTOR = f"a number from {MIN_FACTOR:g} to {MAX_NUMBER:g}; 1 is off"
_PENALTY = Meta(ge=-2, le=2, description="a number from -2 to 2; 0 is off")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The number of tokens of a request, and how they are sampled. The call that it is given to checks the values.

    `max_tokens` None: as many as the graph's limits and the model's positions allow. `n`: the number of choices, which differ in their
    noise; all other values apply to each choice. Before a choice has `min_tokens`, no token that would end it is sampled. `temperature` 0
    is greedy; between 0 and 0.01 it counts as 0.01. `seed` None: the gateway draws one. `logprobs` k: the logprob of each token, and the
    k largest at its position. `prompt_logprobs`: the same for the tokens of the prompt behind the first.

    `logit_bias` is added to the logits of these tokens first; it is given as a mapping, and kept as pairs in the order of the ids. Then
    penalties apply, before the temperature: `repetition_penalty` divides positive and multiplies negative logits of tokens in the prompt
    or the output; `frequency_penalty` is subtracted once per occurrence in the output, `presence_penalty` once if there is any.

    `min_p` drops tokens that are less likely than this times the likeliest, after `top_k` and `top_p`. `structured_outputs`: what each
    choice must match (structured_outputs.py). Only `allowed_token_ids` are sampled, if there are any, and no token that would complete one
    of `bad_words`.

    `include_stop_str_in_output`: the text of a choice ends with the stop string or the stop token that ended it. Without
    `skip_special_tokens`, special tokens are part of the text. Both change no token.

    `cache_salt`: only requests with the same one share KV through the prefix cache. It changes no token.
    """

    max_tokens: Annotated[int, _whole(1)] | None = None
    min_tokens: Annotated[int, _whole(0)] = 0
    n: Annotated[int, _whole(1, MAX_CHOICES)] = 1
    temperature: Annotated[float, Meta(ge=0, le=MAX_NUMBER, description=f"a number from 0 to {MAX_NUMBER:g}; 0 is greedy")] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="a number above 0 and at most 1; 1 is off")] = 1.0
    top_k: Annotated[int, _whole(0, note="; 0 is off")] = 0
    min_p: Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1; 0 is off")] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_FACTOR, le=MAX_NUMBER, description=_FACTOR)] = 1.0
    presence_penalty: Annotated[float, _PENALTY] = 0.0
    frequency_penalty: Annotated[float, _PENALTY] = 0.0
    seed: Annotated[int, _whole(0)] | None = None
    stop: Annotated[tuple[Annotated[str, _STOP], ...], _STOPS] = ()
    stop_token_ids: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_WHOLE)], ...], _STOP_IDS] = ()
    ignore_eos: Annotated[bool, _BOOL] = False
    include_stop_str_in_output: Annotated[bool, _BOOL] = False
    skip_special_tokens: Annotated[bool, _BOOL] = True
    logprobs: Annotated[int, _whole(0, MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, _whole(0, MAX_LOGPROBS)] | None = None
    logit_bias: Annotated[tuple[tuple[Annotated[int, Meta(ge=0, le=MAX_WHOLE)], _BIAS], ...], _BIASES] = ()
    allowed_token_ids: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_WHOLE)], ...], _ALLOWED] = ()
    bad_words: Annotated[tuple[Annotated[str, _WORD], ...], _WORDS] = ()
    structured_outputs: Annotated[StructuredOutputs | None, _OUTPUTS] = None
    cache_salt: Annotated[str, _SALT] = ""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_constrained(self) -> bool:
        """Whether a mask over the vocabulary (engine/constraint.py) rules tokens out."""
        return self.structured_outputs is not None or bool(self.allowed_token_ids or self.bad_words)


class SamplingKeywords(TypedDict, total=False):
    """The parameters of SamplingParams as keywords of a call."""

    max_tokens: int | None
    min_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None
    cache_salt: str


PARAMETER_TYPES: dict[str, Any] = get_type_hints(SamplingParams, include_extras=True)
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")


def checked_value(name: str, value: object) -> Any:
    """The value of one parameter, converted to its declared type. Raises ValueError of one line that does not name the parameter.

    `stop` may also be a single text. Lists may be any iterable, or None for none. So may `logit_bias` be None, or a mapping whose keys are
    numbers or, as in JSON, their texts. `structured_outputs` may be a mapping.
    """
    kind = PARAMETER_TYPES[name]
    given = value
    if name == "stop" and isinstance(value, str):
        value = (value,)
    elif name in _LISTS:
        if value is None:
            value = ()
        elif isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
            value = tuple(value)
    elif name == "structured_outputs":
        return checked_outputs(value)
    elif name == "logit_bias":
        value = _biases(value)
    try:
        checked = msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError):
        raise ValueError(f"is {shown(given)}, it must be {_description(kind)}") from None
    for text in {"stop": checked, "bad_words": checked, "cache_salt": (checked,)}.get(name, ()):
        check_text(text)
    return checked


def _biases(value: object) -> object:
    """The pairs of a mapping, and of any other value the value."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        return value
    keys = {key: int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key for key in value}
    if not set(map(type, keys.values())) <= {int}:
        return value
    return tuple(sorted((keys[key], each) for key, each in value.items()))


def checked_params(
    params: SamplingParams | None, keywords: Mapping[str, object], defaults: Mapping[str, object] | None = None
) -> SamplingParams:
    """The parameters of a call, given as an object or as keywords, with every value checked and converted. Raises ArgumentError.

    `defaults` are values of parameters that no keyword gives; an object is used as it is.
    """
    if params is None:
        given: Mapping[str, object] = {**(defaults or {}), **keywords}
    elif not isinstance(params, SamplingParams):
        raise ArgumentError(f"params is {shown(params)}, it must be a SamplingParams; keywords such as max_tokens=16 work, too")
    elif keywords:
        raise ArgumentError(f"both params and {next(iter(keywords))} are given; write all parameters in one of the two forms")
    else:
        given = {name: getattr(params, name) for name in PARAMETER_TYPES}
    values = {}
    for name, value in given.items():
        if name not in PARAMETER_TYPES:
            near = difflib.get_close_matches(name, PARAMETER_TYPES, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(PARAMETER_TYPES)}"
            raise ArgumentError(f"there is no parameter {shown(name)}; {hint}")
        try:
            values[name] = checked_value(name, value)
        except ValueError as error:
            raise ArgumentError(f"{name} {error}") from None
    return SamplingParams(**values)


def check_text(text: str) -> None:
    """Raises ValueError for text that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a character (an unpaired surrogate, or bytes that are not UTF-8); write whole characters") from None


def _description(kind: Any) -> str:
    """The description of the constraint in `kind`, which may be optional."""
    for part in (kind, *get_args(kind)):
        for meta in getattr(part, "__metadata__", ()):
            if meta.description:
                return str(meta.description)
    raise TypeError(f"{kind} has no description")
