"""Load generators, evaluators and agents' clients that others wrote, with the requests that they send by default. Not a test itself.

Each function calls a server and returns a line that says what came out; `assert` is its verdict.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from serving.browser import is_installed, open_browser
from serving.server_process import SECONDS, Server

HERE = Path(__file__).resolve().parent
NUM_SUMS = 24
NPM_CLIENT = "@continuedev/openai-adapters@1.37.0"
_PAGE = """<!doctype html><script type="module">
const response = await fetch("%s/chat/completions", {
  method: "POST", headers: {"content-type": "application/json", authorization: "Bearer %s"},
  body: JSON.stringify({model: "%s", messages: [{role: "user", content: "What is 347 + 285?"}], stream: true, temperature: 0}),
});
const lines = (await response.text()).split("\\n").filter((line) => line.startsWith("data: {"));
document.title = lines.map((line) => JSON.parse(line.slice(6)).choices[0]?.delta?.content ?? "").join("");
</script>"""


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def run(command: list[str], folder: Path, log: str, **variables: str) -> str:
    """What a client printed, which is also in folder/log. Raises when it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, **variables}, check=False)
    (folder / log).write_text(done.stdout + done.stderr, encoding="utf-8")
    assert done.returncode == 0, f"exit code {done.returncode}, see {folder / log}"
    return done.stdout


def run_guidellm(programs: Path, server: Server, folder: Path, key: str, model: Path) -> str:
    """A sweep of rates over the chat endpoint, with a stream and `continuous_usage_stats` in each request."""
    output = folder / "guidellm.json"
    backend = f"kind=openai_http,target=http://127.0.0.1:{server.port},model={model.name},api_key={key}"
    command = [
        *(str(programs / "guidellm"), "run", "--backend", backend, "--tokenizer", f"kind=huggingface_auto,model={model}"),
        *("--profile", "kind=sweep,sweep_size=4", "--constraint", "kind=max_duration,seconds=10", "--disable-console"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=16", "--output", f"kind=json,path={output}"),
    ]
    run(command, folder, "guidellm.log", HF_HUB_OFFLINE="1")
    benchmarks = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    totals = [each["metrics"]["request_totals"] for each in benchmarks]
    num_done, num_failed = (sum(each[name] for each in totals) for name in ("successful", "errored"))
    assert num_done > 0
    assert num_failed == 0, f"{num_failed} of {num_done + num_failed} requests failed"
    return f"{num_done} requests in {len(totals)} runs, 0 errors"


def run_lm_eval(programs: Path, server: Server, folder: Path, key: str, model: Path) -> str:
    """Logprobs of given texts over /v1/completions, and answers over /v1/chat/completions."""
    tasks = folder / "tasks"
    tasks.mkdir(exist_ok=True)
    for file in (HERE / "lm_eval_tasks").glob("*.yaml"):
        (tasks / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    draw = random.Random(7)
    numbers = [(draw.randrange(100, 1000), draw.randrange(100, 1000)) for _ in range(NUM_SUMS)]
    lines = [{"question": f"What is {a} + {b}?", "answer": str(a + b), "wrong": str(a + b + 111)} for a, b in numbers]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = []
    for kind, path, task, more in (
        ("local-completions", "completions", "sums_choice", []),
        ("local-chat-completions", "chat/completions", "sums_generate", ["--apply_chat_template"]),
    ):
        url = f"http://127.0.0.1:{server.port}/v1/{path}"
        values = f"model={model.name},base_url={url},num_concurrent=4,tokenized_requests=False,tokenizer={model}"
        command = [
            *(str(programs / "lm_eval"), "--model", kind, "--model_args", values, "--tasks", task, "--include_path", str(tasks)),
            *("--output_path", str(folder / task), *more),
        ]
        run(command, folder, f"{task}.log", OPENAI_API_KEY=key, HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(folder / "datasets"))
        report = max((folder / task).rglob("results*.json"), key=lambda file: file.stat().st_mtime)
        results: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["results"][task]
        score = next(value for name, value in results.items() if name.startswith(("acc,", "exact_match,")))
        assert score >= 0.9, f"{kind}: {score}: the model answers these sums"
        found.append(f"{kind} {score:.2f}")
    return f"{NUM_SUMS} sums each: {', '.join(found)} right"


def run_continue(folder: Path, server: Server, key: str, model: str) -> str:
    """The adapter package of Continue, installed by npm in `folder`, with the body of its chat."""
    place = folder / "continue"
    if not (place / "node_modules").exists():
        place.mkdir(exist_ok=True)
        (place / "package.json").write_text("{}")
        run(["npm", "install", "--silent", NPM_CLIENT], place, "install.log")
    (place / "client.mjs").write_text((HERE / "continue_client.mjs").read_text(encoding="utf-8"), encoding="utf-8")
    answer = run(["node", "client.mjs", f"http://127.0.0.1:{server.port}/v1/", key, model], place, "client.log").strip()
    assert answer == "632", answer
    return f"its chat with max_tokens 4096 answers {answer}"


def run_browser(server: Server, key: str, model: str, origin: str, folder: Path) -> str:
    """A page in Chromium that is served at `origin`, which the server allows."""
    if not is_installed():
        return "skipped: needs Chromium and its driver: apt install chromium chromium-driver"
    (folder / "page.html").write_text(_PAGE % (f"http://127.0.0.1:{server.port}/v1", key, model), encoding="utf-8")
    port = int(origin.rpartition(":")[2])
    with ThreadingHTTPServer(("127.0.0.1", port), partial(_QuietHandler, directory=str(folder))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            with open_browser() as browser:
                browser.open(f"{origin}/page.html")
                title = browser.wait("document.title")
        finally:
            http.shutdown()
            thread.join(SECONDS)
    assert title.strip() == "632", title
    return f"a page of another origin got {title.strip()}"
