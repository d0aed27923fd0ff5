"""Writes the request log on disk: what the gateway commits is in the log before any client gets it.

Events wait here until their records are written, all of one turn of the loop in one frame and one write (several where many requests are
submitted at once). Data that was written survives this process, however it ends: the kernel has it. With `compute` each write is followed
by fdatasync in a thread, so that it also survives a power loss of the host; what is committed meanwhile is the next frame.

A segment is removed when all requests that were submitted in it or before have been forgotten, the oldest first. So no end of a request
is removed before its beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from flowrt.actors.outputs import ClientEvent
from flowrt.errors import UserError
from flowrt.gateway.log_contents import LogContents, read_log
from flowrt.gateway.log_records import LogHeader, Record, frame_of, framed, payloads_of, submitted_of
from flowrt.gateway.request_log import RequestLog
from flowrt.seams import Compute
from flowrt.system.log_files import LogFolder, LogSegment

MAX_SEGMENT_BYTES = 16 << 20
SYNC_SECONDS = 60.0  # of a disk that works


class LogWriter:
    """`on_written` is called with events, in their order, once they are in the log. `on_failure` is called once, when the log
    cannot be written: no event reaches `on_written` from then on. `compute`: for the thread that syncs; None: nothing is synced."""

    def __init__(
        self,
        folder: LogFolder,
        contents: LogContents,
        identity: Mapping[str, str],
        compute: Compute | None = None,
        segment_bytes: int = MAX_SEGMENT_BYTES,
    ) -> None:
        """Raises UserError. `contents`: of the folder; the writer begins a segment behind them, and another one after `segment_bytes`."""
        self.on_written: Callable[[Sequence[ClientEvent]], None] = lambda events: None
        self.on_failure: Callable[[Exception], None] = lambda error: None
        self._folder, self._identity, self._compute, self._segment_bytes = folder, dict(identity), compute, segment_bytes
        self._number, self._segments = contents.next_number, list(contents.segments)
        self._submitted_in = {number: request.segment for number, request in contents.requests.items()}
        self._records: list[Record] = []
        self._bounds: list[int] = []  # where the records of a decision begin
        self._events: list[ClientEvent] = []
        self._wake, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_idle.set()
        self._is_closing = self._has_failed = False
        self._task: asyncio.Task[None] | None = None
        try:
            match contents.torn:
                case (_, 0):
                    folder.remove(self._segments.pop())
                case (name, num_valid):
                    folder.truncate(name, num_valid)
            self._segment = self._begin_segment()
        except OSError as error:
            raise unusable(folder, error) from None

    def begin(self) -> None:
        """Start the task that writes. `aclose` ends it."""
        self._task = asyncio.get_running_loop().create_task(self._write_all(), name="request log")

    async def aclose(self) -> None:
        """Write what is left, and let other processes have the log."""
        self._is_closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._segment.close()
        self._folder.close()
        if self._compute is not None:
            await self._compute.aclose()

    async def wait_written(self) -> None:
        """Wait until all that was added is written, or cannot be."""
        await self._is_idle.wait()

    def submit(self, log: RequestLog, has_text: bool) -> None:
        """Add a request that was admitted."""
        self._submitted_in[log.index] = self._segments[-1]
        self._bounds.append(len(self._records))
        self._records.append(submitted_of(log, has_text))
        self._note_added()

    def add(self, events: Sequence[ClientEvent]) -> None:
        """Add the events of a decision. Those of a request that was not submitted wait for their turn, and are not in the log."""
        self._bounds.append(len(self._records))
        self._records += [event for event in events if event.request in self._submitted_in]
        self._events += events
        self._note_added()

    def forget(self, request: int) -> None:
        """The request has ended, and need not be known to a later launcher."""
        self._submitted_in.pop(request, None)

    def _note_added(self) -> None:
        if self._has_failed:  # nothing is written any more
            return
        self._is_idle.clear()
        self._wake.set()

    async def _write_all(self) -> None:
        try:
            while not self._is_closing or not self._is_idle.is_set():
                await self._wake.wait()
                self._wake.clear()
                await self._write()
                if not self._records and not self._events:
                    self._is_idle.set()
        except Exception as error:
            self.on_failure(unusable(self._folder, error) if isinstance(error, OSError) else error)
        finally:
            self._has_failed = not self._is_closing
            self._is_idle.set()

    async def _write(self) -> None:
        """Write what has come, then release its events. Raises OSError."""
        records, bounds, events = self._records, self._bounds, self._events
        self._records, self._bounds, self._events = [], [], []
        if records:
            for payload in payloads_of(records, bounds):
                await self._append(framed(self._number, payload))
        self.on_written(events)

    async def _append(self, data: bytes) -> None:
        """Append a frame. Raises OSError."""
        if self._compute is None:
            self._segment.append(data)
        else:
            await self._compute.run("write the request log", partial(self._append_synced, data), SYNC_SECONDS)
        self._number += 1
        self._num_bytes += len(data)
        if self._num_bytes > self._segment_bytes:
            full, self._segment = self._segment, self._begin_segment()
            full.close()

    def _append_synced(self, data: bytes) -> None:
        self._segment.append(data)
        self._segment.sync()

    def _begin_segment(self) -> LogSegment:
        """Raises OSError."""
        name = f"{self._number:020d}.log"
        segment = self._folder.create(name)
        data = frame_of(self._number, [LogHeader(self._identity)])
        try:
            segment.append(data)
            if self._compute is not None:
                segment.sync()
        except OSError:
            segment.close()
            raise
        self._number += 1
        self._segments.append(name)
        self._num_bytes = len(data)
        oldest = min(self._submitted_in.values(), default=name)
        while self._segments[0] < oldest:
            self._folder.remove(self._segments.pop(0))
        return segment


def unusable(folder: LogFolder, error: OSError) -> UserError:
    hint = "mend this, then flowrt up --resume continues its open requests"
    return UserError(f"the request log {folder.path} cannot be used ({error.strerror}); {hint}")


def open_log(
    folder: LogFolder,
    identity: Mapping[str, str],
    resumes: bool,
    compute: Compute | None = None,
    segment_bytes: int = MAX_SEGMENT_BYTES,
    first_number: int = 0,
) -> tuple[LogWriter, LogContents]:
    """The writer of a log, and what an earlier launcher left there. Raises UserError, and then closes the folder. `first_number`: of the
    frames of a new log (log_records.py).

    Requests that are open are refused unless `resumes`, and if they are of another `identity`: their tokens would not be the same.
    """
    try:
        try:
            contents = read_log(folder)
        except OSError as error:
            raise unusable(folder, error) from None
        if not contents.next_number:  # no frame was found
            contents.next_number = first_number
        if contents.num_open and not resumes:
            hint = "flowrt up --resume NAME continues them; remove the folder to drop them"
            raise UserError(f"the request log {folder.path} holds {contents.num_open} open requests of a launcher that died; {hint}")
        if contents.identity != dict(identity):
            if contents.num_open:
                differ = (name for name in {**identity, **contents.identity} if identity.get(name) != contents.identity.get(name))
                raise UserError(_other_identity(folder, next(differ), identity, contents.identity))
            contents.requests.clear()
        return LogWriter(folder, contents, identity, compute, segment_bytes), contents
    except BaseException:
        folder.close()
        raise


def _other_identity(folder: LogFolder, name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    both = f"{name} {theirs.get(name, 'none')}, this graph has {ours.get(name, 'none')}"
    return (
        f"the request log {folder.path} has open requests of {both}; resume with the graph, the model and the packages that they began with"
    )
