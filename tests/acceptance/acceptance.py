"""Acceptance by clients that others wrote: `make acceptance`. Each client has an environment of its own, under build/.

It starts `flowrt serve` and runs the checks of openai_client.py; then, with a model that is a script, those of an agent of LangChain and
of LiteLLM; then what GuideLLM, lm-eval, Continue and a page in Chromium from another origin send by default (other_clients.py); then a load
of AIPerf, whose counts it compares with /metrics. Then AIPerf sends the same prompts while expert servers and
groups are killed: no request may fail, and no text may change.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from other_clients import NPM_CLIENT, run_browser, run_continue, run_guidellm, run_lm_eval
from serving.server_process import ROOT, SECONDS, Server, metrics_of

CLIENTS = {
    "openai": "openai==3.57.0",
    "langchain": "langchain==1.5.2 langchain-openai==1.7.4",
    "litellm": "litellm==1.110.2",
    "guidellm": "guidellm==0.8.1",
    "lm_eval": "lm_eval[api]==0.4.13 transformers==5.24.0",
    "aiperf": "aiperf==0.13.0",
}
MODEL = ROOT / "examples" / "tiny-moe"
KEY = "a-key-of-letters"
# Strict numerics, because texts of two runs are compared; a process may be restarted as often as it is killed.
GRAPH = ("--set", "numerics=strict", "--set", "reliability.restarts=1000")
PAUSE_SECONDS = 0.2  # between the return of a process and the next kill


def environment(folder: Path, name: str) -> Path:
    """The programs of a client's environment, which is made when it is missing."""
    place = folder / name
    if not (place / "installed").exists():
        print(f"installing {CLIENTS[name]} in {place}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(place / "bin" / "pip"), "install", "--quiet", *CLIENTS[name].split()], check=True)
        (place / "installed").touch()
    return place / "bin"


def run_client(name: str, programs: Path, url: str, key: str, model: str) -> list[str]:
    """The names of the checks that passed, which are all of them."""
    script = Path(__file__).with_name(f"{name}_client.py")
    words = [str(programs / "python"), str(script), f"{url}/v1", key, model]
    variables = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network at its import
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=variables).stdout.split()


@contextmanager
def scripted_server(folder: Path) -> Iterator[str]:
    """The URL of a server whose model calls tools."""
    words = [sys.executable, str(Path(__file__).with_name("scripted_server.py")), str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


class AiperfRun:
    """The records of a run of AIPerf, and the text that each prompt got."""

    def __init__(self, programs: Path, server: Server, folder: Path, num_requests: int, options: argparse.Namespace) -> None:
        fields = {
            "--model": MODEL.name,
            "--url": f"http://127.0.0.1:{server.port}",
            "--api-key": KEY,
            "--endpoint-type": "completions",
            "--tokenizer": str(MODEL),
            "--concurrency": str(options.concurrency),
            "--request-count": str(num_requests),
            "--num-dataset-entries": str(options.requests),
            "--isl": "24",
            "--osl": str(options.new_tokens),
            "--random-seed": "7",
            "--artifact-dir": str(folder),
            "--export-level": "raw",
            "--ui": "none",
            "--extra-inputs": '{"temperature": 0, "ignore_eos": true}',
        }
        words = [
            str(programs / "aiperf"),
            "profile",
            "--streaming",
            "--use-server-token-count",
            *(word for pair in fields.items() for word in pair),
        ]
        with open(folder.with_name(f"{folder.name}.log"), "w", encoding="utf-8") as log:
            subprocess.run(words, check=True, stdout=log, stderr=log, cwd=folder.parent)
        self.records = read_lines(folder / "profile_export.jsonl")
        self.errors = [record["error"] for record in self.records if record.get("error")]
        self.texts: dict[str, set[str]] = {}
        for each in read_lines(folder / "profile_export_raw.jsonl"):
            self.texts.setdefault(each["payload"]["prompt"], set()).add(text_of(each["responses"]))

    def total(self, metric: str) -> int:
        return sum(int(record["metrics"][metric]["value"]) for record in self.records if not record.get("error"))


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def text_of(responses: list[Any]) -> str:
    """The text of the events of a stream."""
    events = [packet["value"] for response in responses for packet in response["packets"] if packet["name"] == "data"]
    return "".join(choice["text"] for event in events if event != "[DONE]" for choice in json.loads(event)["choices"])


class Killer:
    """Kills one process after another, each when all are back. `names`: whom, in this order."""

    def __init__(self, server: Server, names: list[str]) -> None:
        self._server, self._names = server, names
        self._is_over = threading.Event()
        self.num_killed: dict[str, int] = {}
        self.is_done = False

    @contextmanager
    def beside(self) -> Any:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _run(self) -> None:
        for name in self._names:
            if self._is_over.wait(PAUSE_SECONDS):
                return
            self._server.kill(name)
            self._server.wait_back(name)
            role = name.partition(".")[0]
            self.num_killed[role] = self.num_killed.get(role, 0) + 1
        self.is_done = True


def kill_plan(options: argparse.Namespace) -> list[str]:
    """Names of processes: kills of groups spread evenly among those of expert servers."""
    experts = [(number / options.expert_kills, f"experts.{number % 3}") for number in range(options.expert_kills)]
    groups = [((number + 0.5) / options.group_kills, f"attention.{number % 2}") for number in range(options.group_kills)]
    return [name for _, name in sorted(experts + groups)]


def counts(server: Server) -> dict[str, float]:
    """Once no request is active."""
    end = time.monotonic() + SECONDS
    while (found := metrics_of(server))["flowrt_requests_active"]:
        assert time.monotonic() < end, "requests are left"
        time.sleep(0.1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "acceptance")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--expert-kills", type=int, default=50)
    parser.add_argument("--group-kills", type=int, default=20)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    programs = {name: environment(folder, name) for name in CLIENTS}
    failed = False

    def report(what: str, is_right: bool, found: str) -> None:
        nonlocal failed
        failed = failed or not is_right
        print(f"| {what} | {found} | {'yes' if is_right else 'NO'} |", flush=True)

    with socket.socket() as found:  # a page is served there later
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    origin = f"http://localhost:{port}"
    server = Server(*GRAPH, "--allowed-origins", json.dumps([origin]), key=KEY)
    try:
        print("| what | seen | met |\n|---|---|---|", flush=True)
        check_defaults(server, programs, folder, origin, report)
        load = check_clients(server, programs, folder, options, report)
        check_kills(server, programs, folder, options, load.texts, report)
    finally:
        server.close()
    return int(failed)


def check_defaults(server: Server, programs: dict[str, Path], folder: Path, origin: str, report: Callable[[str, bool, str], None]) -> None:
    """Clients with the requests that they send by default."""
    checks = {
        CLIENTS["guidellm"]: lambda: run_guidellm(programs["guidellm"], server, folder, KEY, MODEL),
        CLIENTS["lm_eval"]: lambda: run_lm_eval(programs["lm_eval"], server, folder, KEY, MODEL),
        NPM_CLIENT: lambda: run_continue(folder, server, KEY, MODEL.name),
        "Chromium": lambda: run_browser(server, KEY, MODEL.name, origin, folder),
    }
    for name, check in checks.items():
        try:
            report(f"`{name}`", True, check())
        except AssertionError as error:
            report(f"`{name}`", False, str(error))


def check_clients(
    server: Server, programs: dict[str, Path], folder: Path, options: argparse.Namespace, report: Callable[[str, bool, str], None]
) -> AiperfRun:
    passed = run_client("openai", programs["openai"], f"http://127.0.0.1:{server.port}", KEY, MODEL.name)
    report(f"`{CLIENTS['openai']}`: {', '.join(passed)}", True, f"{len(passed)} checks passed")
    with scripted_server(folder / "model") as url:
        for name in ("langchain", "litellm"):
            passed = run_client(name, programs[name], url, KEY, "tiny")
            report(f"`{CLIENTS[name]}`: {', '.join(passed)}", True, f"{len(passed)} checks passed")
    before = counts(server)
    load = AiperfRun(programs["aiperf"], server, folder / "load", options.requests, options)
    after = counts(server)
    num_done = len(load.records) - len(load.errors)
    what = f"`{CLIENTS['aiperf']}`: {options.requests} requests at concurrency {options.concurrency}"
    report(f"{what}: errors", num_done == options.requests and not load.errors, f"{len(load.errors)} of {len(load.records)}")
    for name, metric in (
        ("flowrt_prompt_tokens_total", "input_sequence_length"),
        ("flowrt_generation_tokens_total", "output_sequence_length"),
    ):
        grown, own = int(after[name] - before[name]), load.total(metric)
        report(f"`{name}` and AIPerf's `{metric}`", grown == own, f"{grown} and {own}")
    ended = 'flowrt_requests_total{finish_reason="length"}'
    report(
        f"`{ended}` and AIPerf's requests", after[ended] - before[ended] == num_done, f"{after[ended] - before[ended]:.0f} and {num_done}"
    )
    return load


def check_kills(
    server: Server,
    programs: dict[str, Path],
    folder: Path,
    options: argparse.Namespace,
    expected: dict[str, set[str]],
    report: Callable[[str, bool, str], None],
) -> None:
    """AIPerf sends the prompts of the first load again and again until all kills have happened."""
    killer = Killer(server, kill_plan(options))
    num_requests = num_errors = num_changed = 0
    with killer.beside():
        while not killer.is_done:
            load = AiperfRun(programs["aiperf"], server, folder / "kills", options.requests, options)
            num_requests += len(load.records)
            num_errors += len(load.errors)
            num_changed += sum(bool(texts - expected[prompt]) for prompt, texts in load.texts.items())
    kills = ", ".join(f"{number} of {role}" for role, number in sorted(killer.num_killed.items()))
    report(f"{kills} killed during {num_requests} requests: errors", not num_errors, str(num_errors))
    report(
        "prompts whose text changed",
        not num_changed and all(len(each) == 1 for each in expected.values()),
        f"{num_changed} of {len(expected)}",
    )


if __name__ == "__main__":
    sys.exit(main())
