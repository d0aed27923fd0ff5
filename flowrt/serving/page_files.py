"""The files of the live page: HTML, styles and scripts that need nothing from elsewhere. They hold no data of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "page"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",  # the dashboard for Grafana
}
# The page may load and call this server alone, runs no script that is not one of these files, and is not shown within other pages.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    kind: str
    content: bytes


def read_page_files() -> dict[bytes, PageFile]:
    """path -> file. The page itself is at /."""
    files = {path.name: PageFile(_KINDS[path.suffix], path.read_bytes()) for path in sorted(_FOLDER.iterdir()) if path.suffix in _KINDS}
    return {b"/" if name == "index.html" else b"/page/" + name.encode(): file for name, file in files.items()}
