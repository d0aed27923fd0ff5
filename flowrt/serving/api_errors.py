"""The errors of the HTTP API: a fixed list, in the shape that OpenAI's clients read.

No text of an internal exception reaches a client.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class ErrorKind:
    """`type` and `code` are fields of the body. `retry_seconds`: sent as Retry-After."""

    status: int
    type: str
    code: str
    retry_seconds: int | None = None


INVALID = ErrorKind(400, "invalid_request_error", "invalid_value")
TOO_LONG = ErrorKind(400, "invalid_request_error", "context_length_exceeded")
UNSUPPORTED = ErrorKind(400, "invalid_request_error", "unsupported_parameter")
UNAUTHORIZED = ErrorKind(401, "invalid_request_error", "invalid_api_key")
FORBIDDEN = ErrorKind(403, "invalid_request_error", "unknown_host")
NO_MODEL = ErrorKind(404, "invalid_request_error", "model_not_found")
NO_ROUTE = ErrorKind(404, "invalid_request_error", "unknown_url")
NO_REQUEST = ErrorKind(404, "invalid_request_error", "request_not_found")
WRONG_METHOD = ErrorKind(405, "invalid_request_error", "method_not_allowed")
SLOW_REQUEST = ErrorKind(408, "invalid_request_error", "request_timeout")
LARGE_BODY = ErrorKind(413, "invalid_request_error", "request_too_large")
WRONG_TYPE = ErrorKind(415, "invalid_request_error", "unsupported_media_type")
LARGE_HEADERS = ErrorKind(431, "invalid_request_error", "headers_too_large")
OVERLOADED = ErrorKind(429, "rate_limit_error", "rate_limit_exceeded", retry_seconds=1)
INTERNAL = ErrorKind(500, "server_error", "internal_error")
UNAVAILABLE = ErrorKind(503, "server_error", "service_unavailable", retry_seconds=1)


class ApiError(Exception):
    """An error to send to the client. `param`: the field of the body that is wrong. `allow`: the methods that the path has."""

    def __init__(self, kind: ErrorKind, message: str, param: str | None = None, *, allow: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.param, self.allow = kind, message, param, allow

    @property
    def body(self) -> bytes:
        fields = {"message": self.message, "type": self.kind.type, "param": self.param, "code": self.kind.code}
        return msgspec.json.encode({"error": fields})


def internal_error(request_id: str) -> ApiError:
    return ApiError(INTERNAL, f"the server failed at this request; its log has the reason under request id {request_id}")
