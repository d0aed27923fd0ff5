"""Structured output for the schemas of the JSON Schema test suite: `make schemas`. Each output is valid, or the schema a 400.

The suite and the validator are those of the package jsonschema, which this installs in build/. `flowrt serve` answers with the example's
model at temperature 2, which writes anything that the grammar allows. An output that `max_tokens` cuts is requested again with further
seeds. One that is still cut proves nothing, and is counted apart.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving.server_process import CLOSING, ROOT, Server

PACKAGE = "jsonschema==4.26.0"
DRAFTS = ("draft2020-12", "draft7")
SEEDS = 2  # tries of an output that is cut
NEW_TOKENS = 300
CLIENTS = 16
SECONDS = 600.0  # for one answer; the machine may be busy
_CHECK = """
import decimal, json, sys, jsonschema
for line in sys.stdin:
    exact = {"parse_float": decimal.Decimal} if "multipleOf" in line else {}  # 8.8272 is a multiple of 0.0001
    schema, text, draft = json.loads(line, **exact)
    kind = {"draft7": jsonschema.Draft7Validator}.get(draft, jsonschema.Draft202012Validator)
    try:
        kind(schema).validate(json.loads(text, **exact))
        print("")
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
"""


def schemas_of_suite(folder: Path, number: int) -> list[tuple[str, dict[str, Any]]]:
    """Different schemas, each with its draft, in an order that is always the same."""
    archives = [*folder.glob("jsonschema-*.tar.gz")]
    if not archives:
        words = ["download", "--quiet", "--no-deps", "--no-binary", "jsonschema", "--dest", str(folder), PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        archives = [*folder.glob("jsonschema-*.tar.gz")]
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    with tarfile.open(archives[0]) as archive:
        for name in sorted(archive.getnames()):
            for draft in DRAFTS:
                if f"/json/tests/{draft}/" in name and name.endswith(".json") and "/optional/" not in name:
                    groups = json.load(archive.extractfile(name))  # type: ignore[arg-type]
                    found |= {
                        json.dumps(group["schema"]): (draft, group["schema"]) for group in groups if isinstance(group["schema"], dict)
                    }
    schemas = list(found.values())
    random.Random("schemas").shuffle(schemas)
    return schemas[:number]


def request_output(server: Server, schema: dict[str, Any], seed: int) -> tuple[str, str, float]:
    """The finish reason and the text; or "400" and the error. Then the seconds."""
    body = {"prompt": "Once upon a time", "temperature": 2, "seed": seed, "max_tokens": NEW_TOKENS}
    body |= {"structured_outputs": {"json": schema}}
    began, connection = time.monotonic(), server.connect()
    connection.timeout = SECONDS
    connection.request("POST", "/v1/completions", json.dumps(body), CLOSING)
    with connection.getresponse() as response:
        answer = json.loads(response.read())
    seconds = time.monotonic() - began
    if response.status != 200:
        return str(response.status), answer["error"]["message"], seconds
    return answer["choices"][0]["finish_reason"], answer["choices"][0]["text"], seconds


def answer_of(server: Server, schema: dict[str, Any]) -> tuple[str, str, float]:
    for seed in range(SEEDS):
        answer = request_output(server, schema, seed)
        if answer[0] != "length":
            break
    return answer


def errors_of(programs: Path, lines: list[str]) -> Iterator[str]:
    checked = subprocess.run([programs / "python", "-c", _CHECK], input="\n".join(lines), stdout=subprocess.PIPE, text=True, check=True)
    return iter(checked.stdout.split("\n"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="schemas.py", description=__doc__)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "schemas")
    parser.add_argument("--show", action="store_true", help="print each schema and what came of it")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    schemas = schemas_of_suite(options.folder, options.schemas)
    environment = options.folder / "environment"
    if not (environment / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        subprocess.run([environment / "bin" / "pip", "install", "--quiet", PACKAGE], check=True)
        (environment / "installed").touch()
    server = Server("--set", f"limits.max_tokens={NEW_TOKENS}")
    try:
        request_output(server, {"type": "null"}, 0)  # the process that compiles has started
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = list(threads.map(lambda pair: answer_of(server, pair[1]), schemas))
    finally:
        server.process.terminate()
        server.process.wait()
    whole = [at for at, (reason, _, _) in enumerate(answers) if reason == "stop"]
    errors = errors_of(environment / "bin", [json.dumps((schemas[at][1], answers[at][1], schemas[at][0])) for at in whole])
    wrong = [(at, error) for at, error in zip(whole, errors, strict=False) if error]
    if options.show:
        for (draft, schema), (reason, text, _) in zip(schemas, answers, strict=True):
            print(f"{reason:6} {draft} {json.dumps(schema)[:150]} -> {text[:100]!r}")
    for at, error in wrong:
        print(f"invalid: {json.dumps(schemas[at][1])} gave {answers[at][1]!r}: {error}")
    counts = Counter(reason for reason, _, _ in answers)
    refused = sorted(seconds for reason, _, seconds in answers if reason == "400")
    valid = counts["stop"] - len(wrong)
    print(f"{len(schemas)} schemas: {valid} valid, {counts['400']} refused, {len(wrong)} invalid, {counts['length']} cut")
    print(f"refused after {refused[len(refused) // 2] * 1e3:.0f} ms (median), {refused[-1] * 1e3:.0f} ms (latest)" if refused else "")
    return 1 if wrong or not valid or counts["stop"] + counts["400"] + counts["length"] < len(schemas) else 0


if __name__ == "__main__":
    sys.exit(main())
