"""What tests start is a fork, also after transformers was imported, and /proc shows what it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pytest
import zygote

from flowrt.processes.import_path import import_path
from flowrt.processes.leftover import MARKER


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")
@pytest.mark.parametrize("words", zygote.INTERNAL)
def test_a_command_is_a_fork_with_its_own_command_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    zygote.start_early()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/where/transformers/sets/it")
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    fork, forked = zygote.Shared.fork, list[int]()

    def note(shared: zygote.Shared, what: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        forked.append(fork(shared, what, descriptors))
        return forked[-1]

    monkeypatch.setattr(zygote.Shared, "fork", note)
    environment = {**os.environ, "PYTHONPATH": import_path(), MARKER: "a run"}
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, *words], env=environment, **streams) as process:
        assert forked == [process.pid]
        found = psutil.Process(process.pid)
        while found.cmdline()[1:4] != words:
            assert process.poll() is None
            time.sleep(0.001)
        assert found.environ()[MARKER] == "a run"
