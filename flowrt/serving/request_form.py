"""What a front end keeps of an HTTP request in the request log, so that it can write the response again (Origin.form)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from flowrt.sampling_params import SamplingParams
from flowrt.serving.api_request import CompletionRequest

_NAMES = tuple(each.name for each in fields(CompletionRequest) if each.name not in ("prompts", "params"))


class RequestForm(msgspec.Struct, frozen=True):
    """`created`, `model`: of the response. `text`: of the prompt, where it is repeated. `flags`: the other fields of CompletionRequest."""

    created: int
    model: str
    text: str
    params: SamplingParams
    flags: dict[str, Any]

    @property
    def request(self) -> CompletionRequest:
        """The request without its prompts. Raises TypeError for the form of another version."""
        return CompletionRequest(prompts=(), params=self.params, **self.flags)


def form_of(request: CompletionRequest, created: int, model: str, text: str) -> bytes:
    flags = {name: getattr(request, name) for name in _NAMES}
    return msgspec.msgpack.encode(RequestForm(created, model, text, request.params, flags))


def read_form(form: bytes) -> RequestForm:
    """Raises msgspec.MsgspecError for the form of another version."""
    return msgspec.msgpack.decode(form, type=RequestForm)
