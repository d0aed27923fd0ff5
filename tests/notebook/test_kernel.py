"""The cells of a notebook, run by a real ipykernel; `make notebook` installs it. Skipped where it is not installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from left_processes import left_processes

pytest.importorskip("ipykernel")
jupyter_client = pytest.importorskip("jupyter_client")

ROOT = Path(__file__).parents[2]
SECONDS = 120.0  # for one cell, on a busy machine


class Notebook:
    """A kernel and its client. `run` executes a cell and returns what it prints and shows."""

    def __init__(self, folder: Path) -> None:
        self.manager = jupyter_client.KernelManager(connection_file=str(folder / "kernel.json"))
        self.manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)}
        self.manager.start_kernel(env=environment, cwd=str(ROOT))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def run(self, cell: str, fails: bool = False) -> str:
        texts: list[str] = []

        def note(message: dict[str, Any]) -> None:
            content = message["content"]
            texts.append(content.get("text") or content.get("data", {}).get("text/plain", ""))
            if "interrupt me" in texts[-1]:
                self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(cell, timeout=SECONDS, output_hook=note)["content"]
        text = "".join(texts)
        assert (reply["status"] == "error") == fails, f"{cell}\n{text}\n{reply}"
        return reply["ename"] if fails else text

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Replaces the suite's check: jupyter_client keeps descriptors of this process. The test checks the processes itself."""


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    opened = Notebook(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


def pids(text: str) -> list[int]:
    return [int(pid) for pid in text.split()]


@pytest.mark.slow
def test_cells_call_a_model_and_nothing_is_left_when_the_kernel_ends(notebook: Notebook) -> None:
    run = notebook.run
    assert run("import flowrt\nflowrt.generate('examples/tiny-moe', 'What is 347 + 285?', max_tokens=8)[0].text") == "' 632'"
    assert run("llm = flowrt.start('examples/quickstart.yaml')") == ""
    processes = pids(run("print(*set(llm._graph.pids.values()))"))
    assert len(processes) >= 5
    assert run("llm.complete('What is 5 + 2?', max_tokens=8).text") == "' 7'"
    assert run("[each.text for each in llm.generate(['What is 6 + 2?', 'What is 7 + 2?'], max_tokens=8)]") == "[' 8', ' 9']"
    assert run("llm.complete('What is 5 + 2?', max_token=8)", fails=True) == "ArgumentError"

    interrupted = "print('interrupt me', flush=True)\nwhile True:\n    llm.complete([1, 2, 3], max_tokens=64, ignore_eos=True)"
    assert run(interrupted, fails=True) == "KeyboardInterrupt"
    assert run("llm.complete('What is 8 + 2?', max_tokens=8).text") == "' 10'"

    opened = (
        "async with flowrt.open('examples/quickstart.yaml', overrides=['deploy.processes=one']) as graph:\n"
        "    async for event in graph.generate('What is 9 + 2?', max_tokens=8):\n"
        "        print(event.text, end='')"
    )
    assert run(opened) == " 11"
    tensors = "with flowrt.start('examples/two_actors/graph.yaml') as graph:\n    print(graph.call(x=torch.ones(2, 64)).shape)"
    assert run(f"import torch\n{tensors}") == "torch.Size([2, 64])\n"

    assert run("llm.close()") == ""
    assert not left_processes(processes)
    assert run("llm.complete('text')", fails=True) == "NotRunningError"

    run("llm = flowrt.start('examples/quickstart.yaml')")
    processes = pids(run("print(*set(llm._graph.pids.values()))"))
    assert len(processes) >= 5
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel()
    assert not left_processes(processes)
