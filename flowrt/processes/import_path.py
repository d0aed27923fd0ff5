"""The import path of this interpreter, for the environment of another one that it starts."""

from __future__ import annotations

import os
import sys


def import_path() -> str:
    """PYTHONPATH for an interpreter that is to import what this one can; the current directory has its name there."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
