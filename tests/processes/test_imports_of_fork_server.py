"""What the fork server reports of packages that cannot be imported."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zygote

from flowrt.errors import UserError
from flowrt.processes import fork_server_process
from flowrt.processes.fork_server import import_all


def test_torch_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert import_all(["json", "torch"]) == ""
    monkeypatch.setitem(sys.modules, "torch", None)
    text = import_all(["json", "torch"])
    assert text.startswith("torch cannot be imported: ModuleNotFoundError: ")
    assert "pip install --force-reinstall torch" in text
    monkeypatch.setitem(sys.modules, "flowrt.errors", None)
    with pytest.raises(ModuleNotFoundError):  # a bug, or a module of the user
        import_all(["flowrt.errors"])


async def test_its_text_is_the_error_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libgomp.so.1: cannot open shared object file')\n")
    monkeypatch.setattr(fork_server_process, "import_path", lambda: f"{tmp_path}:{Path(__file__).parents[2]}:{':'.join(sys.path)}")
    monkeypatch.setattr(subprocess.Popen, "_execute_child", zygote._original)  # a new interpreter, which has not imported torch
    lines: list[str] = []

    def end(reason: object) -> None:
        raise AssertionError(reason)

    run_id = f"imports of {os.getpid()}"  # a backend that closes kills every process with its run id, also of another test
    server = fork_server_process.ForkServerProcess(run_id, ["torch"], lambda _, line: lines.append(line), lambda *_: None, end)
    try:
        with pytest.raises(UserError, match="torch cannot be imported: OSError: libgomp"):
            await server.load(60.0)
        await asyncio.sleep(0)
    finally:
        server.close()
    assert lines == []
