"""Renders public chat templates with many conversations, and compares the texts with those of transformers (`make templates`).

The templates are those of Python packages, which are downloaded into build/templates. A conversation is compared as docs/http-api.md has
it: `developer` as `system` where a template has no `developer`, arguments of calls as objects, parts joined where a template writes a list
as it is, texts as parts where it takes only these, and "" for a missing content where it needs one. A refusal of a message that the
template leaves out counts only if transformers' text is the same with another message in its place.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from flowrt.serving.chat import Chat, ChatError
from flowrt.serving.chat_template import ChatTemplate

PACKAGES = ("trl", "axolotl", "llama-cpp-python")
FOLDER = Path("build/templates")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
Messages = list[dict[str, Any]]
_SHOWN_PART = re.compile(r"""['"]type['"]: ?['"]text['"]""")  # of a list that is written as it is


def message(role: str, content: Any = None, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def text_part(text: str, kind: str = "text", **keys: Any) -> dict[str, Any]:
    return {"type": kind, "text": text, **keys}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Ort, z.B. Köln"}}, "required": ["city"]}
FORECAST = {"type": "function", "function": {"name": "weather", "description": "The weather of a city", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "description": "Now", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_0001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'}}
SECOND = {"id": "call_0002", "type": "function", "function": {"name": "time", "arguments": ""}}
SYSTEM, USER, ANSWER, MORE = (
    message("system", "Be terse."),
    message("user", "Hi!"),
    message("assistant", "Hello."),
    message("user", "And now?"),
)
CALLING = message("assistant", None, tool_calls=[CALL])
RESULT = message("tool", '{"degrees": 4}', tool_call_id="call_0001", name="weather")
THOUGHT = message("assistant", "Hello.", reasoning_content="A greeting.")
TWO_PARTS = message("user", [text_part("What is"), text_part("1 + 2?")])
DOCUMENTS = [{"title": "A page", "text": "Some text.", "doc_id": 0}]
CONVERSATIONS: dict[str, tuple[Messages, dict[str, Any]]] = {
    "user": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "developer": ([message("developer", "Be terse."), USER], {}),
    "turns": ([USER, ANSWER, MORE], {}),
    "system and turns": ([SYSTEM, USER, ANSWER, MORE], {}),
    "without a generation prompt": ([USER, ANSWER], {"add_generation_prompt": False}),
    "late system": ([USER, ANSWER, SYSTEM, MORE], {}),
    "two systems": ([SYSTEM, message("system", "Write German."), USER], {}),
    "two users": ([USER, MORE], {}),
    "unknown role": ([USER, message("critic", "No."), MORE], {}),
    "names": ([USER | {"name": "ann"}, ANSWER, MORE | {"name": "bob"}], {}),
    "unicode and marks": ([message("user", " <b>ü 你好 {{ x }}</b>\n\n")], {}),
    "tools": ([USER], {"tools": [FORECAST]}),
    "system and tools": ([SYSTEM, USER], {"tools": [FORECAST, TIME]}),
    "call": ([USER, CALLING, RESULT], {"tools": [FORECAST]}),
    "call without tools": ([USER, CALLING, RESULT], {}),
    "call with text": ([USER, CALLING | {"content": "I look."}, RESULT], {"tools": [FORECAST]}),
    "two calls": (
        [USER, message("assistant", "", tool_calls=[CALL, SECOND]), RESULT, RESULT | {"tool_call_id": "call_0002", "name": "time"}],
        {"tools": [FORECAST, TIME]},
    ),
    "call and answer": ([SYSTEM, USER, CALLING, RESULT, ANSWER, MORE], {"tools": [FORECAST]}),
    "function": (
        [USER, message("assistant", None, function_call={"name": "f", "arguments": "{}"}), message("function", "4", name="f")],
        {},
    ),
    "parts": ([TWO_PARTS], {}),
    "one part": ([message("system", [text_part("Be terse.")]), message("user", [text_part("Hi!")])], {}),
    "parts of all roles": (
        [message("system", [text_part("Be"), text_part("terse.")]), TWO_PARTS, message("assistant", [text_part("3")]), MORE],
        {},
    ),
    "parts of clients": ([message("user", [text_part("Hi", "input_text", cache_control={"type": "ephemeral"}), text_part("!")])], {}),
    "documents": ([USER], {"documents": DOCUMENTS}),
    "thinking off": ([USER], {"kwargs": {"enable_thinking": False, "thinking": False}}),
    "thinking on": ([SYSTEM, USER], {"kwargs": {"enable_thinking": True, "thinking": True}}),
    "reasoning effort": ([USER], {"kwargs": {"reasoning_effort": "low"}}),
    "reasoning": ([USER, THOUGHT, MORE], {}),
    "reasoning before a call": ([USER, CALLING | {"reasoning": "I must look."}, RESULT], {"tools": [FORECAST]}),
    "thought in the text": ([USER, message("assistant", "<think>\nA greeting.\n</think>\n\nHello."), MORE], {}),
    "keys of clients": (
        [
            USER | {"id": "m1", "cache_control": None},
            ANSWER | {"refusal": None, "annotations": [], "audio": None, "tool_calls": None},
            MORE,
        ],
        {},
    ),
    "empty answer": ([USER, message("assistant", ""), MORE], {}),
    "continued": ([USER, message("assistant", "It is")], {"add_generation_prompt": False, "continue_final_message": True}),
    "continued with space": (
        [SYSTEM, USER, message("assistant", "It is ")],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
    "continued parts": (
        [USER, message("assistant", [text_part("It"), text_part("is")])],
        {"add_generation_prompt": False, "continue_final_message": True},
    ),
}


def download(folder: Path) -> None:
    """The templates of PACKAGES as folder/PACKAGE/NAME.jinja."""
    for package in PACKAGES:
        if (folder / package).is_dir():
            continue
        files = folder / "packages"
        source = ["--no-binary", package] if package == "llama-cpp-python" else []  # its wheels have no templates
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", files, *source, package], check=True)
        (archive,) = files.glob(f"{package.replace('-', '_')}-*")
        (folder / package).mkdir(parents=True)
        for name, content in _members(archive):
            if name.endswith(".jinja"):
                (folder / package / Path(name).name).write_bytes(content)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
    else:
        with tarfile.open(archive) as source:
            yield from ((each.name, file.read()) for each in source if (file := source.extractfile(each)) is not None)


class Truth:
    """transformers' text of a conversation, as flowrt passes it on."""

    def __init__(self, source: str) -> None:
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **TOKENS)
        self._source, self._has_developer = source, re.search(r"['\"]developer['\"]", source) is not None

    def text(self, messages: Messages, names: dict[str, Any]) -> str:
        """Raises what transformers and the template raise."""
        passed = [self._passed(each) for each in messages]
        joined = [each | {"content": _joined(each["content"])} if each.get("content") else each for each in passed]
        filled = [each if each.get("content") else each | {"content": ""} for each in joined]
        parts = [each | {"content": [text_part(each["content"])]} if each.get("content") else each for each in joined]
        texts = [text.strip() for each in passed if not each.get("tool_calls") for text in _texts(each.get("content") or "")]
        error: Exception | None = None
        first: str | None = None
        for form in ([passed] if joined != passed else []) + [joined, filled, parts]:
            try:
                text = self._render(form, names)
            except Exception as raised:
                error = error or raised
                continue
            if not _SHOWN_PART.search(text):
                first = first if first is not None else text
                if all(each in text for each in texts):
                    return text
        if first is None:
            raise error or ValueError("no form of the conversation is a text")
        return first

    def depends_on(self, messages: Messages, index: int, names: dict[str, Any]) -> bool:
        """Whether the text is another one without the calls of a message or, if it has none, with another content."""
        calls = [name for name in ("tool_calls", "function_call") if messages[index].get(name)]
        changed = {name: value for name, value in messages[index].items() if name not in calls}
        changed |= {} if calls else {"content": "Something else."}
        return self.text([*messages[:index], changed, *messages[index + 1 :]], names) != self.text(messages, names)

    def _passed(self, given: dict[str, Any]) -> dict[str, Any]:
        new = json.loads(json.dumps(given))
        if new["role"] == "developer" and not self._has_developer:
            new["role"] = "system"
        for call in new.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        if isinstance(new["content"], list):
            new["content"] = [part | {"type": "text"} for part in new["content"]]
        return new

    def _render(self, messages: Messages, names: dict[str, Any]) -> str:
        given = (
            {"add_generation_prompt": True} | {name: value for name, value in names.items() if name != "kwargs"} | names.get("kwargs", {})
        )
        return str(self._tokenizer.apply_chat_template(messages, chat_template=self._source, tokenize=False, **given))


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def compare(template: ChatTemplate, truth: Truth, messages: Messages, names: dict[str, Any]) -> tuple[str, str]:
    """The verdict, and both texts or errors."""
    expected = error = found = refusal = None
    try:
        expected = truth.text(messages, names)
    except Exception as raised:
        error = raised
    try:
        found = template.render(Chat(messages, **names))
    except Exception as raised:
        refusal = raised
    shown = f"transformers {expected if error is None else error!r}\n    flowrt       {found if refusal is None else refusal!r}"
    if refusal is not None and error is not None:
        return "refused by both", shown
    if found is not None and found == expected:
        return "equal", shown
    if isinstance(refusal, ChatError) and (place := re.match(r"messages\[(\d+)\]", refusal.path)) and expected is not None:
        return "different" if truth.depends_on(messages, int(place[1]), names) else "left out", shown
    return "different", shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the folder of the templates; those of PyPI are downloaded there")
    parser.add_argument("--only", default="", help="templates whose path has this text")
    arguments = parser.parse_args()
    download(arguments.folder)
    by_source = {path.read_text(): path for path in sorted(arguments.folder.glob("*/*.jinja"), reverse=True) if arguments.only in str(path)}
    counts, num_templates = Counter[str](), 0
    for source, path in sorted(by_source.items(), key=lambda each: each[1]):
        truth = Truth(source)
        try:
            template = ChatTemplate(source, TOKENS)
        except Exception as error:
            print(f"{path}: not a template: {error}")
            continue
        num_templates += 1
        for name, (messages, names) in CONVERSATIONS.items():
            verdict, shown = compare(template, truth, messages, names)
            counts[verdict] += 1
            if verdict == "different" or arguments.only:
                print(f"{path} | {name} | {verdict}\n    {shown}")
    print(
        f"{num_templates} templates x {len(CONVERSATIONS)} conversations: "
        + ", ".join(f"{count} {name}" for name, count in counts.most_common())
    )
    sys.exit(bool(counts["different"]) or num_templates < 60)


if __name__ == "__main__":
    main()
