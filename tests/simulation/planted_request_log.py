"""Lists planted bugs of the request log and of the launcher that resumes from it. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, body, bug

WRITER = "flowrt.gateway.log_writer"
CONTENTS = "flowrt.gateway.log_contents"
RECORDS = "flowrt.gateway.log_records"
GATEWAY = "flowrt.gateway.gateway"
REQUESTS = "flowrt.gateway.requests"
LOGS = "flowrt.gateway.request_log"

REQUEST_LOG_BUGS: tuple[Bug, ...] = (
    bug("log-released-early", "clients get events before they are in the request log", (
        WRITER, "LogWriter._write", "if records:", "self.on_written(events)\n    events = []\n    if records:")),
    body("log-held-not", "events are visible to a client that reads before they are in the request log", LOGS, "RequestLogs.events",
         "return self._logs[index].events[start:]"),
    body("log-unsynced", "a synced request log is not synced", WRITER, "LogWriter._append_synced", "self._segment.append(data)"),
    bug("log-torn-kept", "a frame that a death has cut off stays in the request log", (
        WRITER, "LogWriter.__init__", "folder.truncate(name, num_valid)", "pass")),
    bug("log-torn-cut-short", "with a torn frame, a whole one before it is cut off", (
        RECORDS, "read_frames", "return FoundFrames(records, first, at, str(error), is_torn)", "return FoundFrames(records[:max(1, len(records) - 1)], first, at, str(error), is_torn)"), graphs="2x3.yaml"),
    bug("log-removed-early", "a segment is removed while requests in it are open", (
        WRITER, "LogWriter._begin_segment", "min(self._submitted_in.values(), default=name)", "name")),
    bug("log-resumed-removed", "segments of resumed requests are removed", (
        WRITER, "LogWriter.__init__", "{number: request.segment for number, request in contents.requests.items()}", "{number: self._segments[-1] for number in contents.requests}")),
    bug("log-frame-number-repeats", "a new launcher repeats the number of the last frame", (
        CONTENTS, "_add_segment", "contents.next_number = found.first + len(found.records)", "contents.next_number = found.first + len(found.records) - 1")),
    bug("log-end-lost", "the end of a request is not in the request log", (
        WRITER, "LogWriter.add", "if event.request in self._submitted_in", "if event.request in self._submitted_in and type(event).__name__ != 'EndEvent'")),
    bug("log-scores-lost", "logprobs are not in the request log", (
        WRITER, "LogWriter.add", "[event for event in events if event.request in self._submitted_in]", "[__import__('msgspec').structs.replace(each, logprobs=()) if hasattr(each, 'logprobs') else each for each in events if each.request in self._submitted_in]")),
    bug("resume-without-seed", "a resumed request draws with another seed", (
        GATEWAY, "Gateway.restore", "given.seed", "given.seed + 1")),
    bug("resume-without-tokens", "a resumed request has lost its last token", (
        GATEWAY, "Gateway.restore", "logged.output", "logged.output[:-1]")),
    bug("resume-same-attempt", "a resumed request continues as its former attempt", (
        GATEWAY, "Gateway.restore", "log.attempt += 1", "pass")),
    bug("resume-choice-goes-on", "a choice that has ended goes on in a resumed request", (
        GATEWAY, "Gateway.restore", "decisions += self._end_choice(log, choice, record.finish_reason)", "pass")),
    bug("resume-renumbered", "resumed requests get other numbers", (
        GATEWAY, "Gateway.restore", "self._num_requests = max(self._num_requests, given.request)", "pass")),
    bug("resume-forgets-ended", "a new launcher does not know the requests that have ended", (
        REQUESTS, "Requests.begin_log", "self._keep_unread(index)", "self._let_go(index)")),
    bug("resume-not-placed", "resumed requests wait until another one is placed", (
        REQUESTS, "Requests.begin_log", "self._carry_out(decisions)", "pass")),
)  # fmt: skip
