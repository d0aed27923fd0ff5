"""Reads a request log back: the requests of an earlier launcher, with all that was committed of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flowrt.actors.outputs import ChoiceEvent, ClientEvent, EndEvent, TokenEvent
from flowrt.errors import UserError, shown
from flowrt.gateway.log_records import FoundFrames, LogHeader, Record, Submitted, VersionError, read_frames
from flowrt.system.log_files import LogFolder


@dataclass
class LoggedRequest:
    """A request, and what the log has of its output, in order. `end` None: it is open. `segment`: the one that has its `submitted`."""

    submitted: Submitted
    segment: str
    output: list[TokenEvent | ChoiceEvent] = field(default_factory=list)
    end: EndEvent | None = None

    def __post_init__(self) -> None:
        self._num_tokens = [0] * self.submitted.params.n
        self._ended: set[int] = set()

    def add(self, record: ClientEvent) -> None:
        """Raises ValueError for a record that cannot follow."""
        which = f"request {record.request}"
        if self.end is not None:
            raise ValueError(f"{which} goes on after its end")
        if isinstance(record, EndEvent):
            self.end = record
            return
        if record.choice >= len(self._num_tokens) or record.choice in self._ended:
            raise ValueError(f"{which} has no open choice {record.choice}")
        if isinstance(record, ChoiceEvent):
            self._ended.add(record.choice)
        elif record.index != self._num_tokens[record.choice]:
            raise ValueError(f"token {record.index} of {which} follows {self._num_tokens[record.choice]} tokens")
        else:
            self._num_tokens[record.choice] += len(record.token_ids)
        self.output.append(record)


@dataclass
class LogContents:
    """`requests`: by number; those whose beginning was removed are left out. `next_number`: of the next frame. `torn`: the last segment,
    and the number of its bytes that are valid, where its writer died within a frame."""

    requests: dict[int, LoggedRequest] = field(default_factory=dict)
    segments: list[str] = field(default_factory=list)
    identity: dict[str, str] = field(default_factory=dict)
    next_number: int = 0
    torn: tuple[str, int] | None = None

    @property
    def num_open(self) -> int:
        return sum(request.end is None for request in self.requests.values())

    def add(self, records: Iterable[Record], segment: str) -> None:
        """Raises ValueError for records that cannot follow."""
        for record in records:
            match record:
                case LogHeader(identity):
                    self.identity = identity
                case Submitted(request):
                    if request in self.requests:
                        raise ValueError(f"request {request} was submitted twice")
                    self.requests[request] = LoggedRequest(record, segment)
                case TokenEvent() | ChoiceEvent() | EndEvent():
                    if (known := self.requests.get(record.request)) is not None:
                        known.add(record)


def read_log(folder: LogFolder) -> LogContents:
    """Read all segments. Raises UserError when one is damaged or of another version, and OSError.

    Only the last segment may end within a frame: its writer died there, and nothing of that frame was sent to a client.
    """
    contents = LogContents()
    names = folder.names()
    for name in names:
        try:
            found = read_frames(folder.read(name))
        except VersionError as error:
            todo = "resume it with that version, or remove the folder, which drops its open requests"
            raise UserError(f"the request log {folder.path} cannot be read: {error}; {todo}") from None
        is_last = name == names[-1]
        if found.problem is not None:
            if not (is_last and found.is_torn):
                raise _damaged(folder, name, found.num_valid, found.problem)
            contents.torn = name, found.num_valid
        elif found.first is None:
            if not is_last:
                raise _damaged(folder, name, 0, "it is empty, and others follow")
            contents.torn = name, 0
        _add_segment(contents, folder, name, found)
    return contents


def _add_segment(contents: LogContents, folder: LogFolder, name: str, found: FoundFrames) -> None:
    if found.first is not None:
        if contents.segments and found.first != contents.next_number:
            raise _damaged(folder, name, 0, f"its first frame is {found.first}, the segment before ends with {contents.next_number - 1}")
        if not found.records[0] or not isinstance(found.records[0][0], LogHeader):
            raise _damaged(folder, name, 0, "it begins without a header")
        contents.next_number = found.first + len(found.records)
    contents.segments.append(name)
    try:
        for records in found.records:
            contents.add(records, name)
    except ValueError as error:
        raise _damaged(folder, name, 0, str(error)) from None


def _damaged(folder: LogFolder, name: str, at: int, problem: str) -> UserError:
    todo = "put a copy in its place, or remove the folder, which drops its open requests"
    return UserError(f"the request log {folder.path} is damaged: {name} at byte {at}: {problem}; {todo}")


def unfit(submitted: Submitted, reason: str) -> UserError:
    """The error for an open request that the graph cannot continue."""
    name = f"request {submitted.request}" if submitted.origin is None else f"request {shown(submitted.origin.id)}"
    return UserError(f"{name} of the request log is open, and does not fit: {reason}; resume with limits that it fits")
