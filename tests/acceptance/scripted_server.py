"""A server whose model is a script that calls tools, for clients that run agents: python scripted_server.py FOLDER.

The small models of the examples were not trained to call tools. All but the model is real: template, tokenizer, gateway, HTTP. It prints
its URL, and ends when standard input closes. FOLDER: for the files of the model.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from serving.served_app import MODEL, ServedApp, served_app

from flowrt.actors.control import Request
from flowrt.serving.output_formats import find_formats

TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Call: <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
VALUES: dict[str, Any] = {"integer": 2, "number": 2, "string": "Paris", "boolean": True, "array": [], "object": {}}


def answer_to(prompt: str) -> str:
    """Calls the first tool once, and then repeats what it has returned."""
    role, _, text = prompt.rpartition("<|im_start|>assistant")[0].rpartition("<|im_start|>")[2].partition("\n")
    if role == "tool":
        return f"<think>Now I know.</think>\n\nIt is {text.removesuffix('<|im_end|>' + chr(10))}."
    if "<tools>" not in prompt:
        return "<think>No tools.</think>\n\nHello."
    function = json.JSONDecoder().raw_decode(prompt.partition("<tools>")[2].lstrip())[0]["function"]
    arguments = {name: VALUES[each["type"]] for name, each in function["parameters"]["properties"].items()}
    call = json.dumps({"name": function["name"], "arguments": arguments})
    return f"<think>I call {function['name']}.</think>\n\n<tool_call>\n{call}\n</tool_call>"


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(MODEL / "tokenizer.json", folder)
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


async def respond(app: ServedApp, request: Request) -> None:
    token_ids = app.tokenizer.encode(answer_to(app.tokenizer.decode(request.prompt_token_ids)))
    for index, token_id in enumerate(token_ids):
        app.emit_token(request, token_id, index, 0)
        await asyncio.sleep(0)
    app.finish(request)


async def main(folder: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 4096, "max_tokens": 1024, "formats": find_formats(TEMPLATE)}
    async with served_app(model_dir=make_model(folder), **options) as app, asyncio.TaskGroup() as tasks:
        print(app.listener.url, flush=True)
        end = tasks.create_task(asyncio.to_thread(sys.stdin.read))
        while not end.done():
            submitted = tasks.create_task(app.submitted.get())
            await asyncio.wait((end, submitted), return_when=asyncio.FIRST_COMPLETED)
            if submitted.done():
                tasks.create_task(respond(app, submitted.result()))
            else:
                submitted.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
