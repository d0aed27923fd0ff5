"""Lists planted bugs of front ends and their requests at the gateway. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, body, bug

FRONT_ENDS = "flowrt.gateway.front_ends"
REQUESTS = "flowrt.gateway.requests"
CLIENT = "flowrt.serving.gateway_client"
SERVED = "flowrt.launcher.served_requests"

FRONT_END_BUGS: tuple[Bug, ...] = (
    body("front-end-goes-on", "the requests of a dead front end go on", FRONT_ENDS, "FrontEnds.lose", "pass"),
    bug("front-end-death-unnoticed", "the gateway does not learn of the death of a front end", (
        SERVED, "ServedRequests.note", "self.front_ends.lose(event.name)", "pass")),
    bug("front-end-takes-others", "the death of a front end cancels the requests of all", (
        FRONT_ENDS, "FrontEnds.lose", "for number in list(front_end.requests):\n            self._close(front_end, number)",
        "for each in self.queues.values():\n            for number in list(each.requests):\n                self._close(each, number)")),
    bug("front-end-cancel-ignored", "the gateway ignores that a client has left", (
        FRONT_ENDS, "FrontEnds.on_control", "self._close(front_end, number)", "pass")),
    bug("front-end-cancel-unsent", "a front end does not say that a client has left", (
        CLIENT, "OpenRequest.close", "self._client.send(CancelRequest(self.number, is_invalid))", "pass")),
    bug("front-end-keeps-ended", "the gateway keeps the request of a front end that has ended", (
        FRONT_ENDS, "FrontEnds._take_outputs", "self._close(front_end, number)", "pass")),
    bug("front-end-named-cancelled", "a named request ends with its front end although there is a request log", (
        REQUESTS, "Requests.place", "if origin.is_named:", "if False:")),
    bug("front-end-return-late", "a client that comes back does not get the first events again", (
        FRONT_ENDS, "FrontEnds._attach", "_FollowedRequest(index, on_change)", "_FollowedRequest(index, on_change, 2)")),
    bug("front-end-asleep", "new outputs do not wake the task that sends them", (
        FRONT_ENDS, "FrontEnds._note_change", "front_end.wake.set()", "pass")),
    bug("front-end-choice-mixed", "tokens of all choices are sent as those of the first", (
        FRONT_ENDS, "FrontEnds._take_outputs", "tuple(events)", "tuple([__import__('msgspec').structs.replace(each, choice=0) if isinstance(each, TokenEvent) else each for each in events])")),
)  # fmt: skip
