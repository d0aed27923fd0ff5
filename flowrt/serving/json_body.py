"""Reads the JSON body of a request field by field, each with a bound on the time that decoding it takes. Pure.

JSON of many small values decodes slowly, seconds for 16 MiB, and meanwhile a front end serves no other client. So a field is decoded when
it is read, lists end at the first item too many, and token ids are counted before they are decoded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from flowrt.errors import shown
from flowrt.sampling_params import MAX_CHOICES, PARAMETER_TYPES
from flowrt.serving.api_errors import INVALID, NO_MODEL, UNSUPPORTED, ApiError
from flowrt.serving.tokenizer_process import MAX_TEXT_CHARACTERS

MAX_MESSAGES, MAX_PARTS = 4096, 1024  # parts: of the content of one message
MAX_FIELD_BYTES = 256 << 10  # but for prompts, messages and token ids
_LABELS = ("user", "safety_identifier", "metadata")  # for the caller's own books; they change no output
# Fields that ask for what flowrt does not do, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "use_beam_search": (False,),
    "min_p": (0,),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "priority": (0,),
}
_OTHER = ("model", "messages", "prompt", "tokens", "stream", "stream_options", "max_completion_tokens", "top_logprobs", "echo")
_FIELDS = {*_OTHER, *PARAMETER_TYPES, *_LABELS, *_UNSUPPORTED, "return_token_ids", "return_tokens_as_token_ids"}
_Body = msgspec.defstruct("Body", [(name, Raw | UnsetType, UNSET) for name in _FIELDS])
_StrictBody = msgspec.defstruct("StrictBody", [], bases=(_Body,), forbid_unknown_fields=True)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


def _list_of(kind: Any, most: int) -> Any:
    """A type of lists of at most `most` items. Unlike that of Meta(max_length), its decoding ends at the first item too many."""
    items = [(f"item_{index}", kind | UnsetType, UNSET) for index in range(most)]
    return msgspec.defstruct("List", items, array_like=True, forbid_unknown_fields=True)


def _items(values: msgspec.Struct) -> list[Any]:
    return [item for item in msgspec.structs.astuple(values) if item is not UNSET]


_Part = msgspec.defstruct("Part", [("type", Literal["text"]), ("text", str)], forbid_unknown_fields=True)
_Parts, _NoItems = _list_of(_Part, MAX_PARTS), _list_of(Raw, 0)
_Message = msgspec.defstruct(
    "Message",
    [
        ("role", Literal["system", "developer", "user", "assistant"]),
        ("content", str | _Parts),
        ("name", str | None, None),
        # Of messages that servers return; they must be empty.
        *((name, _NoItems | None, None) for name in ("tool_calls", "annotations")),
        *((name, None, None) for name in ("tool_call_id", "function_call", "refusal", "audio", "reasoning", "reasoning_content")),
    ],
    forbid_unknown_fields=True,
)
_Messages, _Prompts = _list_of(Raw, MAX_MESSAGES), _list_of(Raw, MAX_CHOICES)
_TokenIds = tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...]
_IS_TOKEN_IDS = re.compile(rb"\[\s*[^\s\"\[]")  # also an empty list
# Of a message that may not be as it is; all other errors are about what is possible elsewhere.
_WRONG_MESSAGE = re.compile(r"Expected `object`, got `\w+`|Object missing required field `\w+`|.* - at `\$\.(role|content|name)`")
_MESSAGE_LIST = f"must be a list of at most {MAX_MESSAGES} messages, such as {{'role': 'user', 'content': 'Hello'}}"


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


Messages = list[dict[str, Any]]
Prompt = str | TokenIds | Messages


class Fields:
    """The fields of a JSON object that no reader has taken yet. The error of a value names its field."""

    def __init__(self, body: bytes) -> None:
        self._unknown: str | None = None
        try:
            try:
                read = msgspec.json.decode(body, type=_StrictBody)
            except msgspec.ValidationError as error:
                if (unknown := _UNKNOWN.fullmatch(str(error))) is None:
                    raise ApiError(INVALID, "the body is not a JSON object") from None
                self._unknown = unknown[1]
                read = msgspec.json.decode(body, type=_Body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ApiError(INVALID, f"the body is not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
        given = {name: bytes(json) for name in _FIELDS if (json := getattr(read, name)) is not UNSET}
        self.nulls = {name for name, json in given.items() if json == b"null"}  # as not given
        self._values = {name: json for name, json in given.items() if name not in self.nulls}
        self._known: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        json = self._take_json(name)
        if json is None:
            return default
        if len(json) > MAX_FIELD_BYTES:
            raise invalid(name, f"is longer than {MAX_FIELD_BYTES >> 10} KiB")
        try:
            return _decode(json, name)
        except msgspec.ValidationError:  # numbers are read here for the first time, too
            raise invalid(name, "holds a number that is out of range") from None

    def take_bool(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(name, f"is {shown(value)}, it must be true or false")
        return value

    def take_checked(self, name: str, check: Callable[[Any], Any]) -> Any:
        """`check` raises ValueError of one line that does not name the field."""
        value = self.take(name)
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
        read = tuple(_read_prompt(each) for each in prompts)
        _check_length("prompt", sum(len(each) for each in read if isinstance(each, str)))
        return read

    def take_messages(self) -> tuple[Messages, ...]:
        """The messages of a chat, with their contents as texts; () when there are none."""
        listed = _split_list(self._take_json("messages") or b"[]", MAX_MESSAGES, _Messages)
        if listed is None:
            raise invalid("messages", _MESSAGE_LIST)
        messages = [_read_message(json, f"messages[{index}]") for index, json in enumerate(listed)]
        _check_length("messages", sum(len(message["content"]) for message in messages))
        return (messages,) if messages else ()

    def check_model(self, served: str) -> None:
        model = self.take("model", served)
        if model != served:
            raise ApiError(NO_MODEL, f"there is no model {shown(model)}; this server has {served}", "model")

    def refuse_rest(self) -> None:
        """Refuse the fields that no reader took, except those without an effect."""
        for name in _LABELS:
            self._take_json(name)
        for name in (*self._values, *([] if self._unknown is None else [self._unknown])):
            if name not in _UNSUPPORTED:
                near = difflib.get_close_matches(name[:80], [*self._known, *_UNSUPPORTED], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ApiError(UNSUPPORTED, f"there is no field {shown(name)}{hint}", name[:80])
            if self.take(name) not in _UNSUPPORTED[name]:
                raise ApiError(UNSUPPORTED, f"{name} is not supported", name)

    def _take_json(self, name: str) -> bytes | None:
        self._known.append(name)
        return self._values.pop(name, None)


def invalid(name: str, text: str) -> ApiError:
    return ApiError(INVALID, f"{name} {text}", name)


def _split_list(json: bytes, most: int, bounded: Any) -> list[bytes] | None:
    """The JSON of each item; None for more than `most`, and for what is not a list."""
    try:
        items = (
            msgspec.json.decode(json, type=list[Raw]) if len(json) < MAX_FIELD_BYTES else _items(msgspec.json.decode(json, type=bounded))
        )
    except msgspec.ValidationError:
        return None
    return [bytes(item) for item in items] if len(items) <= most else None


def _decode(json: bytes, name: str, kind: Any = Any) -> Any:
    """`json` is JSON, but for its texts, which are decoded here for the first time."""
    try:
        return msgspec.json.decode(json, type=kind)
    except UnicodeDecodeError:
        raise invalid(name, "holds bytes that are not UTF-8") from None


def _read_message(json: bytes, where: str) -> dict[str, Any]:
    """With its content as one text."""
    try:
        message = _decode(json, where, _Message)
    except msgspec.ValidationError as error:
        is_wrong = _WRONG_MESSAGE.fullmatch(str(error))
        text = f"{where} {'is wrong' if is_wrong else 'has something that is not supported'}: {str(error).replace('`', '')}"
        raise ApiError(INVALID if is_wrong else UNSUPPORTED, text, where) from None
    content = message.content if isinstance(message.content, str) else "".join(part.text for part in _items(message.content))
    return {"role": message.role, "content": content} | ({} if message.name is None else {"name": message.name})


def _read_prompt(json: bytes) -> str | TokenIds:
    if json.startswith(b"["):
        return TokenIds("prompt", json)
    if json.startswith(b'"'):
        return str(_decode(json, "prompt"))
    raise invalid("prompt", "must be a text, a list of token ids, or a list of these")


def _check_length(name: str, num_characters: int) -> None:
    if num_characters > MAX_TEXT_CHARACTERS:
        raise invalid(name, f"has {num_characters} characters, at most {MAX_TEXT_CHARACTERS} are possible")


def estimated_tokens(prompt: Prompt) -> int:
    """About the length of a prompt, before it is tokenized."""
    if isinstance(prompt, str):
        return len(prompt) // 4 + 1
    return prompt.num_tokens if isinstance(prompt, TokenIds) else sum(len(message["content"]) // 4 + 4 for message in prompt)
