"""Cross-origin requests: which pages of other origins may call the API from a browser, and the headers that tell the browser so. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flowrt.errors import UserError, shown
from flowrt.serving.api_errors import INVALID, ApiError

ANY = "*"
_ALWAYS_ALLOWED = ("accept", "accept-language", "content-language", "content-type")
_METHODS = "GET, HEAD, OPTIONS, POST"
MAX_AGE_SECONDS = 600  # for which a browser keeps the response to a preflight


class CorsRules(msgspec.Struct, frozen=True, kw_only=True):
    """`origins`: such as "http://localhost:3000"; (): no page of another origin. "*" allows any. `methods` and `headers` of requests.
    `allows_credentials`: a browser may send cookies and keys of its own."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = (ANY,)
    headers: tuple[str, ...] = (ANY,)
    allows_credentials: bool = False

    def response_headers(self, given: Mapping[bytes, bytes]) -> dict[str, str]:
        """The headers of every response to a request with these headers, an error too."""
        if not self.origins:
            return {}
        is_same_for_all = ANY in self.origins and not self.allows_credentials
        vary = {} if is_same_for_all else {"vary": "Origin"}
        origin = given.get(b"origin", b"").decode("latin-1")
        if not origin or not self._allows(self.origins, origin):
            return vary
        found = {"access-control-allow-origin": ANY if is_same_for_all else origin, **vary}
        if self.allows_credentials:
            found["access-control-allow-credentials"] = "true"
        return found | {"access-control-expose-headers": "x-request-id, retry-after"}

    def is_preflight(self, method: str, given: Mapping[bytes, bytes]) -> bool:
        """Whether a browser wants to know if it may send a request: this one has no key."""
        return bool(self.origins) and method == "OPTIONS" and b"origin" in given and b"access-control-request-method" in given

    def preflight_headers(self, given: Mapping[bytes, bytes]) -> dict[str, str]:
        """The further headers of the response to a preflight. Raises ApiError when the browser must not send the request."""
        wanted = {name: given.get(name, b"").decode("latin-1").strip() for name in (b"access-control-request-headers", b"origin")}
        headers, method = wanted[b"access-control-request-headers"], given[b"access-control-request-method"].decode("latin-1").strip()
        names = [name.strip().lower() for name in headers.split(",") if name.strip()]
        allowed = {*_ALWAYS_ALLOWED, *(name.lower() for name in self.headers)}
        if not self._allows(self.origins, wanted[b"origin"]):
            raise ApiError(INVALID, f"the origin {shown(wanted[b'origin'])} is not among --allowed-origins")
        if not self._allows(self.methods, method):
            raise ApiError(INVALID, f"the method {shown(method)} is not among --allowed-methods")
        if ANY not in allowed and (refused := [name for name in names if name not in allowed]):
            raise ApiError(INVALID, f"the header {shown(refused[0])} is not among --allowed-headers")
        return {
            "access-control-allow-methods": _METHODS if ANY in self.methods else ", ".join(self.methods),
            "access-control-allow-headers": headers or "*" if ANY in self.headers else ", ".join(sorted(allowed)),
            "access-control-max-age": str(MAX_AGE_SECONDS),
        }

    @staticmethod
    def _allows(allowed: tuple[str, ...], value: str) -> bool:
        return ANY in allowed or value in allowed


def read_list(option: str, text: str) -> tuple[str, ...]:
    """The values of an option: a JSON list, as vLLM's take it, or texts with commas between them. Raises UserError."""
    try:
        values = msgspec.json.decode(text, type=list[str]) if text.lstrip().startswith("[") else text.split(",")
    except msgspec.DecodeError:
        raise UserError(
            f'{option} {shown(text)} is not a JSON list of texts; write ["http://localhost:3000"], or texts with commas'
        ) from None
    found = tuple(value.strip().rstrip("/") for value in values if value.strip())
    if not found:
        raise UserError(f"{option} names nothing; leave it out, or write * for any")
    for value in found:
        if not (value.isascii() and value.isprintable()) or " " in value or "," in value:
            raise UserError(f"{option}: {shown(value)} cannot be in a header; write letters, digits and signs without spaces")
    return found


def read_origins(option: str, text: str) -> tuple[str, ...]:
    """Reads a list of origins. Raises UserError."""
    found = read_list(option, text)
    for origin in found:
        scheme, separator, host = origin.partition("://")
        if origin not in (ANY, "null") and (not (scheme and separator and host) or "/" in host):
            raise UserError(f"{option}: {shown(origin)} is not an origin; write it as http://localhost:3000, without a path")
    return found
