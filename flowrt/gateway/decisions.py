"""The decisions of the gateway: messages for workers, and events for clients. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from flowrt.actors.control import Cancel, KvCompleted, Request
from flowrt.actors.outputs import ClientEvent


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Decision: send `request` to the group, or prefill worker, as a Submit."""

    group: str
    request: Request


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Decision: send `cancel` to the group, or prefill worker."""

    group: str
    cancel: Cancel


@dataclass(frozen=True, slots=True)
class SendCompleted:
    """Decision: send `completed` to the group, which has the request."""

    group: str
    completed: KvCompleted


ForWorker = SendRequest | SendCancel | SendCompleted
Decision = ClientEvent | ForWorker
