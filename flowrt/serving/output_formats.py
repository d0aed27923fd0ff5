"""The forms in which models write tool calls and reasoning, as data. output_parser.py reads outputs by them.

A form is a sequence of markers (texts) and slots (what the model fills in). White space between them is free, but for values. The names
are those of vLLM's `--tool-call-parser` and `--reasoning-parser`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum, auto


class Slot(Enum):
    """What a model fills in.

    NAME: of the function. ID: of the call, which also has the name, "functions.NAME:0". CALL_ID: of the call alone, which is dropped.
    KEY, VALUE: a parameter and its text. LINES: a value between line ends of its own. JSON: the arguments, an object. OBJECT: an object
    with the name and the arguments. PYTHON: a call in Python's notation."""

    NAME = auto()
    ID = auto()
    CALL_ID = auto()
    KEY = auto()
    VALUE = auto()
    LINES = auto()
    JSON = auto()
    OBJECT = auto()
    PYTHON = auto()


@dataclass(frozen=True, init=False)
class Many:
    """A sequence that is repeated, or left out."""

    elements: tuple[Element, ...]
    is_repeated = True

    def __init__(self, *elements: Element) -> None:
        object.__setattr__(self, "elements", elements)


class Maybe(Many):
    """A sequence that may be left out."""

    is_repeated = False


@dataclass(frozen=True)
class Either:
    """`first` if the text begins as it does, else `second`."""

    first: tuple[Element, ...]
    second: tuple[Element, ...]


Element = str | Slot | Many | Either


@dataclass(frozen=True)
class ToolFormat:
    """`calls`: begins with a marker; one may be anywhere in an answer. `bare`: calls without one, which an answer begins with; only
    functions that the request names are called so. `is_whole`: the bare calls are the whole output, which has no content. `excerpts`: the
    texts of a chat template that has this form, all of one of the lists. `id_length`: of the ids that the template takes; 0: any."""

    calls: tuple[Element, ...] = ()
    bare: tuple[Element, ...] = ()
    is_whole: bool = False
    excerpts: tuple[tuple[str, ...], ...] = ()
    id_length: int = 0


@dataclass(frozen=True)
class ReasoningFormat:
    """`ends`: further texts that end the reasoning; they belong to what follows."""

    begin: str
    end: str
    ends: tuple[str, ...] = ()


def _deepseek(*call: Element) -> tuple[Element, ...]:
    calls = Many("<｜tool▁call▁begin｜>", *call, "<｜tool▁call▁end｜>")
    return (Maybe("<｜tool▁calls▁begin｜>"), calls, Maybe("<｜tool▁calls▁end｜>"))


def _functions(begin: str, end: str) -> tuple[Element, ...]:
    parameters = Many("<parameter=", Slot.KEY, ">", Slot.LINES, "</parameter>")
    return (Maybe(begin), "<function=", Slot.NAME, ">", parameters, "</function>", Maybe(end))


_OBJECTS = ("[", Many(Slot.OBJECT, Maybe(",")), "]")
_PYTHON = ("[", Many(Slot.PYTHON, Maybe(",")), "]")

# The first one whose excerpts a template has is that of the template.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "minimax_m2": ToolFormat(
        (
            "<minimax:tool_call>",
            Many('<invoke name="', Slot.NAME, '">', Many('<parameter name="', Slot.KEY, '">', Slot.VALUE, "</parameter>"), "</invoke>"),
            "</minimax:tool_call>",
        ),
        excerpts=(("<minimax:tool_call>",),),
    ),
    "seed_oss": ToolFormat(_functions("<seed:tool_call>", "</seed:tool_call>"), excerpts=(("<seed:tool_call>",),)),
    "qwen3_coder": ToolFormat(_functions("<tool_call>", "</tool_call>"), excerpts=(("<function=", "<parameter="),)),
    "glm45": ToolFormat(
        ("<tool_call>", Slot.NAME, Many("<arg_key>", Slot.KEY, "</arg_key>", "<arg_value>", Slot.VALUE, "</arg_value>"), "</tool_call>"),
        excerpts=(("<arg_key>", "<arg_value>"),),
    ),
    "kimi_k2": ToolFormat(
        (
            Maybe("<|tool_calls_section_begin|>"),
            Many("<|tool_call_begin|>", Slot.ID, "<|tool_call_argument_begin|>", Slot.JSON, "<|tool_call_end|>"),
            Maybe("<|tool_calls_section_end|>"),
        ),
        excerpts=(("<|tool_call_begin|>",), ("<|im_system|>tool_declare",)),
    ),
    "deepseek_v3": ToolFormat(
        _deepseek("function", "<｜tool▁sep｜>", Slot.NAME, "```json", Slot.JSON, "```"), excerpts=(("<｜tool▁call▁begin｜>", "```json"),)
    ),
    "deepseek_v31": ToolFormat(_deepseek(Slot.NAME, "<｜tool▁sep｜>", Slot.JSON), excerpts=(("<｜tool▁call▁begin｜>",),)),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]", Either(_OBJECTS, (Slot.NAME, Maybe("[CALL_ID]", Slot.CALL_ID), Maybe("[ARGS]"), Slot.JSON))),
        excerpts=(("[TOOL_CALLS]",),),
        id_length=9,
    ),
    "hermes": ToolFormat(("<tool_call>", Slot.OBJECT, "</tool_call>"), excerpts=(("<tool_call>", "arguments"),)),
    "pythonic": ToolFormat(
        ("<|python_start|>", *_PYTHON, Maybe("<|python_end|>")), _PYTHON, excerpts=(("<|python_start|>",), ("[func_name1(",))
    ),
    "llama3_json": ToolFormat(
        ("<|python_tag|>", Slot.OBJECT, Many(";", Slot.OBJECT)),
        (Slot.OBJECT, Many(";", Slot.OBJECT)),
        excerpts=(("<|python_tag|>",), ('{"name": function name, "parameters":',)),
    ),
}
REQUIRED_CALLS = ToolFormat(bare=_OBJECTS, is_whole=True)  # the output of a request that must call tools (tool_choice.py)

_THINK = ReasoningFormat("<think>", "</think>")
# Whether a template opens the reasoning, closes it, or leaves that to the model is read from the prompt.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "minimax_m2", "olmo3"), _THINK),
    "kimi_k2": ReasoningFormat("<think>", "</think>", ("<|tool_calls_section_begin|>",)),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}
NO_PARSER, AUTO_PARSER = "none", "auto"


@dataclass(frozen=True)
class OutputFormats:
    """Of the outputs of one model. "": none."""

    tools: str = ""
    reasoning: str = ""

    @property
    def tool_format(self) -> ToolFormat | None:
        return TOOL_FORMATS.get(self.tools)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        return REASONING_FORMATS.get(self.reasoning)


NO_FORMATS = OutputFormats()


def find_formats(template: str) -> OutputFormats:
    """The forms that a chat template shows."""
    tools = next(
        (
            name
            for name, each in TOOL_FORMATS.items()
            if any(all(excerpt in template for excerpt in excerpts) for excerpts in each.excerpts)
        ),
        "",
    )
    named = [tools] if tools in REASONING_FORMATS else []
    reasoning = next((name for name in (*named, *REASONING_FORMATS) if REASONING_FORMATS[name].end in template), "")
    return OutputFormats(tools, reasoning)


def markers(form: ToolFormat | ReasoningFormat | None) -> set[str]:
    """All texts of a form. Where one is a special token, the parser must see it."""
    if isinstance(form, ReasoningFormat):
        return {form.begin, form.end, *form.ends}
    return set() if form is None else set(_texts((*form.calls, *form.bare)))


def _texts(elements: Collection[Element]) -> Iterator[str]:
    for element in elements:
        match element:
            case str():
                yield element
            case Many():
                yield from _texts(element.elements)
            case Either():
                yield from _texts((*element.first, *element.second))


def beginnings(elements: tuple[Element, ...]) -> tuple[str, ...]:
    """The texts that a sequence can begin with; a slot that begins with no particular text has none."""
    found: list[str] = []
    for element in elements:
        match element:
            case Slot.JSON | Slot.OBJECT:
                return (*found, "{")
            case Slot():
                return tuple(found)
            case str():
                return (*found, element)
            case Many():
                found += beginnings(element.elements)
            case Either():
                return (*found, *beginnings(element.first), *beginnings(element.second))
    return tuple(found)
