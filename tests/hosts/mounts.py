"""Starts the host servers of the local engine with an empty folder in place of one of this machine, as on a machine without it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

MOUNT = ("unshare", "--mount", "sh", "-c")


def can_mount() -> bool:
    try:
        return subprocess.run([*MOUNT, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def hide(folder: Path, monkeypatch: pytest.MonkeyPatch, also: Path | None = None) -> None:
    """For every host server that starts from now on, `folder` is an empty file system, and `also` one with room for hardly anything."""
    mounts = [f"mount -t tmpfs none {folder}", *([f"mount -t tmpfs -o size=4k none {also}"] if also is not None else [])]
    start = subprocess.Popen

    def hidden(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if "flowrt.hosts.server" in command:
            command = [*MOUNT, " && ".join([*mounts, 'exec "$@"']), "sh", *command]
        return start(command, **options)

    monkeypatch.setattr(subprocess, "Popen", hidden)
