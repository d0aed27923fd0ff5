"""A real Prometheus scrapes `flowrt serve` as docs/operate.md says: each query of the dashboard has data. Skipped where there is none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from serving.server_process import ROOT, SECONDS, Server
from serving.test_exposition import VLLM_SERIES

KEY = "change-me"
PAUSE_SECONDS = 0.2


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[Any]:
        """The series of an instant query."""
        with urllib.request.urlopen(f"{self._url}/api/v1/query?{urlencode({'query': expression})}", timeout=SECONDS) as response:
            answer = json.load(response)
        assert answer["status"] == "success", (expression, answer)
        result: list[Any] = answer["data"]["result"]
        return result


@contextmanager
def prometheus(config: str, folder: Path) -> Iterator[Prometheus]:
    (folder / "prometheus.yml").write_text(config)
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--web.listen-address=127.0.0.1:0"]
    process = subprocess.Popen(["prometheus", *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = ""
        while "Server is ready" not in lines or (address := re.search(r'msg="Listening on" address=(\S+)', lines)) is None:
            line = process.stderr.readline()
            assert line, lines
            lines += line
        yield Prometheus(f"http://{address[1]}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def expressions() -> list[str]:
    dashboard = json.loads((ROOT / "examples" / "grafana-dashboard.json").read_text())
    return [target["expr"].replace("$__rate_interval", "60s") for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt install prometheus")
def test_each_query_of_the_dashboard_has_data(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operate.md").read_text()
    (documented,) = re.findall(r"<!-- file: prometheus.yml -->\n```yaml\n(.*?)```", page, re.DOTALL)
    with closing(Server("--set", "serving.vllm_metrics=true", key=KEY)) as server:
        config = f"global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\n{documented.replace('8000', str(server.port))}"
        with prometheus(config, tmp_path) as found:
            server.kill("experts.0")
            server.wait_back("experts.0")
            vllm = [f'{{__name__=~"vllm:{name}(_count)?"}}' for name in VLLM_SERIES]
            left = ["up{job='flowrt'} == 1", *vllm, *expressions()]
            for _ in range(int(SECONDS / PAUSE_SECONDS)):
                server.json("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4})
                if not (left := [each for each in left if not found.query(each)]):
                    break
                time.sleep(PAUSE_SECONDS)
            assert not left, "queries without data"
