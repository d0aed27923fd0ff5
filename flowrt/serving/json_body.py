"""Reads the JSON body of a request field by field, each with a bound on the time that decoding it takes. Pure.

JSON of many small values decodes slowly, seconds for 16 MiB, and meanwhile a front end serves no other client. So a field is decoded when
it is read, lists end at the first item too many, token ids are counted before they are decoded, and of all other values only long texts
may be long. A null is as a field that is not given.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from flowrt.errors import shown
from flowrt.sampling_params import MAX_CHOICES, PARAMETER_TYPES
from flowrt.serving.api_errors import INVALID, NO_MODEL, UNSUPPORTED, ApiError
from flowrt.serving.chat import FIELDS as CHAT_FIELDS
from flowrt.serving.chat import Chat, ChatError, check_chat
from flowrt.serving.tokenizer_process import MAX_TEXT_CHARACTERS

MAX_MESSAGES = 4096
MAX_NAMED = 8  # wrong fields in one error
MAX_FIELD_BYTES = 256 << 10  # besides its texts; but for prompts, messages and token ids
MAX_CHAT_BYTES = 512 << 10  # besides their texts: of all messages together
MAX_DEPTH = 128  # of lists and objects within each other; what reads a value later may call itself for each
_SHORT_TEXT = 16  # bytes; what a text costs however short it is
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# Fields that change no output: they are for the caller's own books, or ask for what each response here is.
_LABELS = (
    *("user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("verbosity", "request_id", "parallel_tool_calls", "spaces_between_special_tokens"),
)
# Fields that ask for what flowrt does not do, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions", "logits_processors"), ([],)),
    **dict.fromkeys(("vllm_xargs", "kv_transfer_params"), ({},)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("use_beam_search", "echo", "return_token_strs", "early_stopping"), (False,)),
    **dict.fromkeys(("detokenize", "include_reasoning"), (True,)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    "modalities": (["text"],),
    "suffix": ("",),
    "priority": (0,),
}
# vLLM's fields of the past, and what has their place.
_REPLACED = {f"guided_{name}": f'structured_outputs: {{"{name}": ...}}' for name in ("json", "regex", "choice", "grammar")}
_WITHOUT_DEFAULT = ("audio", "prediction", "web_search_options", "chat_template", "structural_tag", "truncate_prompt_tokens")
_UNSUPPORTED |= dict.fromkeys((*_WITHOUT_DEFAULT, "guided_decoding_backend", "guided_whitespace_pattern", *_REPLACED), ())
_OTHER = (
    *("model", "prompt", "tokens", "stream", "stream_options", "max_completion_tokens", "top_logprobs", "parse_output"),
    *("add_special_tokens", "response_format", "reasoning_effort", "return_token_ids", "return_tokens_as_token_ids"),
)
FIELDS = frozenset({*_OTHER, *CHAT_FIELDS, *PARAMETER_TYPES, *_LABELS, *_UNSUPPORTED})
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_HALF_CHARACTER = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]")


def _list_of(kind: Any, most: int) -> Any:
    """A type of lists of at most `most` items. Unlike that of Meta(max_length), its decoding ends at the first item too many."""
    items = [(f"item_{index}", kind | UnsetType, UNSET) for index in range(most)]
    return msgspec.defstruct("List", items, array_like=True, forbid_unknown_fields=True)


def _items(values: msgspec.Struct) -> list[Any]:
    return [item for item in msgspec.structs.astuple(values) if item is not UNSET]


_Messages, _Prompts = _list_of(Raw, MAX_MESSAGES), _list_of(Raw, MAX_CHOICES)
_TokenIds = tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...]
_IS_TOKEN_IDS = re.compile(rb"\[\s*[^\s\"\[]")  # also an empty list
MESSAGES = '[{"role": "user", "content": "Hello"}]'  # as an example
_MESSAGE_LIST = f"must be a list of at most {MAX_MESSAGES} messages, such as {MESSAGES}"


class TokenIds:
    """The JSON of a list of token ids. `num_tokens`: its length, when it is a list of numbers."""

    def __init__(self, name: str, json: bytes) -> None:
        self._name, self._json = name, json
        self.num_tokens = json.count(b",") + 1 if json[1:-1].strip() else 0

    def read(self) -> tuple[int, ...]:
        """Token ids of any vocabulary. Raises ApiError."""
        try:
            return msgspec.json.decode(self._json, type=_TokenIds)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(self._name, "must be a list of token ids") from None


Prompt = str | TokenIds | Chat


class Fields:
    """The fields of a JSON object that no reader has taken yet. The error of a value names its field."""

    def __init__(self, body: bytes) -> None:
        given = split_object(body, FIELDS)
        self.nulls = {name for name, json in given.items() if json == b"null"}  # as not given
        self._values = {name: json for name, json in given.items() if name not in self.nulls}
        self._known: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        json = self._take_json(name)
        if json is None:
            return default
        return decode_bounded(json, name)

    def take_bool(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(name, f"is {shown(value)}, it must be true or false")
        return value

    def take_checked(self, name: str, check: Callable[[Any], Any]) -> Any:
        """`check` raises ValueError of one line that does not name the field. A whole number may be written as 2.0."""
        value = self.take(name)
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        try:
            return None if value is None else check(value)
        except ValueError as error:
            raise invalid(name, str(error)) from None

    def take_token_ids(self, name: str) -> TokenIds:
        return TokenIds(name, self._take_json(name) or b"null")

    def take_prompts(self) -> tuple[str | TokenIds, ...]:
        """A text, a list of token ids, or a list of either; () when it is not given."""
        if (json := self._take_json("prompt")) is None:
            return ()
        is_list = json.startswith(b"[") and not _IS_TOKEN_IDS.match(json)
        prompts = _split_list(json, MAX_CHOICES, _Prompts) if is_list else [json]
        if prompts is None:
            raise invalid("prompt", f"has more than {MAX_CHOICES} prompts")
        read = tuple(_read_prompt(each, f"prompt[{index}]" if is_list else "prompt") for index, each in enumerate(prompts))
        _check_length("prompt", sum(len(each) for each in read if isinstance(each, str)))
        return read

    def take_chat(self) -> Chat | None:
        """The messages with all that a chat template sees of them; None when there are none."""
        json = self._take_json("messages") or b"[]"
        if (listed := _split_list(json, MAX_MESSAGES, _Messages)) is None:
            raise invalid("messages", _MESSAGE_LIST)
        if not _is_bounded(json, MAX_CHAT_BYTES):
            raise invalid("messages", f"have more than {MAX_CHAT_BYTES >> 10} KiB besides their texts")
        messages = [_decode(each, f"messages[{index}]") for index, each in enumerate(listed)]
        kwargs = self.take("chat_template_kwargs", {})
        if not isinstance(kwargs, dict):
            raise invalid("chat_template_kwargs", f"is {shown(kwargs)}, it must be an object")
        if (effort := self.take("reasoning_effort")) is not None:
            if not isinstance(effort, str):
                raise invalid("reasoning_effort", f"is {shown(effort)}, it must be a text such as low or high")
            kwargs = {"reasoning_effort": effort, **kwargs}
        continues = self.take_bool("continue_final_message")
        adds_prompt = self.take_bool("add_generation_prompt", not continues)
        tools, documents = (None if value == [] else value for value in (self.take("tools"), self.take("documents")))
        chat = Chat(messages, tools, documents, adds_prompt, continues, kwargs)
        try:
            check_chat(chat)
        except ChatError as error:
            raise ApiError(UNSUPPORTED if error.is_unsupported else INVALID, str(error), error.path) from None
        return chat if messages else None

    def check_model(self, served: str) -> None:
        model = self.take("model", served)
        if model != served:
            raise ApiError(NO_MODEL, f"there is no model {shown(model)}; this server has {served}", "model")

    def refuse_rest(self) -> None:
        """Refuse the fields that no reader took, except those without an effect."""
        for name in _LABELS:
            self._take_json(name)
        wrong: dict[str, str] = {}
        for name in [*self._values]:
            if name not in _UNSUPPORTED:
                near = difflib.get_close_matches(name[:80], [*self._known, *_UNSUPPORTED], 1)
                wrong[name] = f"there is no field {shown(name)}{f'; did you mean {near[0]}?' if near else ''}"
            elif self.take(name) not in _UNSUPPORTED[name]:
                wrong[name] = f"{name} is not supported{f'; write {_REPLACED[name]}' if name in _REPLACED else ''}"
            if len(wrong) == MAX_NAMED:
                break
        if wrong:
            raise ApiError(UNSUPPORTED, " - ".join(wrong.values()), next(iter(wrong))[:80])

    def _take_json(self, name: str) -> bytes | None:
        self._known.append(name)
        return self._values.pop(name, None)


def invalid(name: str, text: str) -> ApiError:
    return ApiError(INVALID, f"{name} {text}", name)


def split_object(body: bytes, names: frozenset[str]) -> dict[str, bytes]:
    """The JSON of each field. Of those that are not in `names`, only the first is there if they are long. Raises ApiError."""
    known, strict = _body_types(names)
    unknown: re.Match[str] | None = None
    try:
        try:
            read = msgspec.json.decode(body, type=strict)
        except msgspec.ValidationError as error:
            if (unknown := _UNKNOWN.fullmatch(str(error))) is None:
                raise ApiError(INVALID, "the body is not a JSON object") from None
            read = msgspec.json.decode(body, type=known)
        given = {name: bytes(json) for name in names if (json := getattr(read, name)) is not UNSET}
        return given if unknown is None else given | _unknown_fields(body, given, unknown[1])
    except RecursionError:
        raise ApiError(INVALID, f"the body nests deeper than {MAX_DEPTH} lists and objects") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = str(error).removeprefix("JSON is malformed: ")
        if _HALF_CHARACTER.search(body):
            text = "a text holds half a character (an unpaired surrogate); write whole characters"
        raise ApiError(INVALID, f"the body is not JSON: {text}") from None


@cache
def _body_types(names: frozenset[str]) -> tuple[Any, Any]:
    known = msgspec.defstruct("Body", [(name, Raw | UnsetType, UNSET) for name in sorted(names)])
    return known, msgspec.defstruct("StrictBody", [], bases=(known,), forbid_unknown_fields=True)


def _split_list(json: bytes, most: int, bounded: Any) -> list[bytes] | None:
    """The JSON of each item; None for more than `most`, and for what is not a list."""
    try:
        items = (
            msgspec.json.decode(json, type=list[Raw]) if len(json) < MAX_FIELD_BYTES else _items(msgspec.json.decode(json, type=bounded))
        )
    except msgspec.ValidationError:
        return None
    return [bytes(item) for item in items] if len(items) <= most else None


def _unknown_fields(body: bytes, known: Mapping[str, bytes], first: str) -> dict[str, bytes]:
    """The JSON of the fields that no table has. `first`: the name of the first one, which is all that is read of too many."""
    if len(body) - sum(map(len, known.values())) > MAX_FIELD_BYTES:
        return {first: b"..."}
    return {name: bytes(json) for name, json in msgspec.json.decode(body, type=dict[str, Raw]).items() if name not in known}


def _is_bounded(json: bytes, limit: int) -> bool:
    """Whether decoding JSON takes little time: it has few values, or few besides long texts."""
    rest = len(json)
    for number, text in enumerate(_TEXT.finditer(json) if rest > limit else ()):
        rest -= max(text.end() - text.start() - _SHORT_TEXT, 0)
        if rest <= limit or number > limit // 4:
            break
    return rest <= limit


def decode_bounded(json: bytes, name: str, limit: int = MAX_FIELD_BYTES) -> Any:
    """The value of a field, whose decoding takes a bounded time. Raises ApiError."""
    if not _is_bounded(json, limit):
        raise invalid(name, f"has more than {limit >> 10} KiB besides its texts")
    return _decode(json, name)


def _decode(json: bytes, name: str) -> Any:
    """`json` is JSON, but for its texts and numbers, which are decoded here for the first time."""
    try:
        value = msgspec.json.decode(json)
    except UnicodeDecodeError:
        raise invalid(name, "holds bytes that are not UTF-8") from None
    except msgspec.ValidationError:
        raise invalid(name, "holds a number that is out of range") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for each in level if isinstance(each, dict | list) for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return value
    raise invalid(name, f"nests deeper than {MAX_DEPTH} lists and objects")


def _read_prompt(json: bytes, name: str) -> str | TokenIds:
    if json.startswith(b"["):
        return TokenIds(name, json)
    if json.startswith(b'"'):
        return str(_decode(json, name))
    raise invalid(name, "must be a text, a list of token ids, or a list of these")


def _check_length(name: str, num_characters: int) -> None:
    if num_characters > MAX_TEXT_CHARACTERS:
        raise invalid(name, f"has {num_characters} characters, at most {MAX_TEXT_CHARACTERS} are possible")


def estimated_tokens(prompt: Prompt) -> int:
    """About the length of a prompt, before it is tokenized."""
    if isinstance(prompt, str):
        return len(prompt) // 4 + 1
    return prompt.num_tokens if isinstance(prompt, TokenIds) else len(msgspec.json.encode((prompt.messages, prompt.tools))) // 4 + 1
