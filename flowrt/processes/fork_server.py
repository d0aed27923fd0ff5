"""The fork server: a small process that imports torch once, starts no thread, and forks the workers.

It runs as `python -m flowrt.processes.fork_server` and serves the requests of fork_server_client.py. A worker is any "module:function" by
name; this file imports nothing of flowrt/workers. The fork server has one thread, blocking calls and no event loop, so that a fork never
copies a process with other work under way.

Lifetimes: the kernel kills the fork server and every worker when the launcher dies (PDEATHSIG), also one that is stopped or blocked. The
end of the fork server ends no worker: it forks a short-lived process that forks the workers, so they are orphans that the launcher adopts
as a subreaper and reaps (adopted_processes.py). Only where the system has no subreapers, the fork server is their parent. Then it reports
their exits, and kills them when the launcher closes the connection. Ctrl-C reaches none of them: they are a session of their own and
ignore SIGINT; the launcher handles it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import msgspec

from flowrt.errors import TORCH_REMEDY, UserError, error_text
from flowrt.observe import set_log_level
from flowrt.processes.adopted_processes import CAN_ADOPT
from flowrt.processes.exit_lock import hold
from flowrt.processes.frames import Exited, Forked, ForkRequest, Frame, FrameReader, Loaded, NotForked, send_blocking
from flowrt.seams import Seams
from flowrt.system.process_backend import CONTROL_LIMITS
from flowrt.system.signals import end_with_parent
from flowrt.transports.contract import Channel, Identity
from flowrt.transports.stream import StreamChannel

WorkerMain = Callable[[Channel, Seams], Awaitable[None]]

ORIGINAL_PATH = "FLOWRT_PYTHONPATH"  # the user's PYTHONPATH while ours carries the launcher's sys.path
_PR_SET_NAME = 15
_POLL_SECONDS = 0.05  # poll interval for exits of children
_ADOPTION_POLL_SECONDS = 0.001  # poll interval of a worker until the launcher is its parent


def load_worker(name: str) -> WorkerMain:
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return cast("WorkerMain", getattr(importlib.import_module(module), function))


@dataclass
class _ForkServer:
    connection: socket.socket
    launcher_pid: int
    library_fds: frozenset[int]  # opened by imported libraries for their own use: children keep them
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    children: dict[int, int] = field(default_factory=dict)  # pid -> start number; empty where the launcher adopts the workers

    def serve(self) -> None:
        """Fork until the launcher closes the connection. Requests that have arrived together are forked together."""
        reader = FrameReader(self.connection, msgspec.msgpack.Decoder(ForkRequest))
        self.selector.register(self.connection, selectors.EVENT_READ)
        while True:
            ready = self.selector.select(_POLL_SECONDS if self.children else None)
            while self.children and self.reap():
                pass
            requests: list[tuple[ForkRequest, list[int]]] = []
            while ready:
                if not reader.feed():
                    return
                requests += [(request, reader.take_fds(request.num_fds)) for request in reader.frames()]
                ready = self.selector.select(0)
            if requests:
                self.fork_all(requests)

    def fork_all(self, requests: Sequence[tuple[ForkRequest, list[int]]]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            if not CAN_ADOPT:
                for request, fds in requests:
                    self.fork(request, fds)
            elif (pid := os.fork()) == 0:
                self.fork_orphans(requests)
            else:
                os.waitpid(pid, 0)
        except OSError as error:
            for request, _ in requests:
                self.report(NotForked(number=request.number, error=f"{type(error).__name__}: {error}"))
        finally:
            for _, fds in requests:
                for fd in fds:
                    os.close(fd)

    def fork_orphans(self, requests: Sequence[tuple[ForkRequest, list[int]]]) -> NoReturn:
        """Fork the workers in a process that then exits, so that the launcher adopts them. Even if the fork server is killed meanwhile, the
        launcher learns of each worker before the connection ends."""
        status = 1
        try:
            for request, fds in requests:
                self.fork(request, fds)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def fork(self, request: ForkRequest, fds: list[int]) -> None:
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self.report(NotForked(number=request.number, error=f"{type(error).__name__}: {error}"))
            return
        if pid == 0:
            self.become_worker(request, fds, parent_pid)
        if not CAN_ADOPT:
            self.children[pid] = request.number
        try:
            pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # the system has none, or no descriptor is free
            self.report(Forked(number=request.number, pid=pid))
            return
        self.report(Forked(number=request.number, pid=pid, num_fds=1), [pidfd])
        os.close(pidfd)

    def reap(self, options: int = os.WNOHANG) -> bool:
        """Reap one ended child and report it. False: no child has ended, or none is left."""
        try:
            pid, status = os.waitpid(-1, options)
        except ChildProcessError:
            return False
        if (number := self.children.pop(pid, None)) is not None:
            self.report(Exited(number=number, status=os.waitstatus_to_exitcode(status)))
        return pid != 0

    def report(self, frame: Frame, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(ConnectionError):  # the launcher is gone: the next read of the connection ends `serve`
            send_blocking(self.connection, frame, fds)

    def end_all(self) -> None:
        """Kill and reap every child."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        while self.children and self.reap(options=0):
            pass

    def become_worker(self, request: ForkRequest, fds: list[int], parent_pid: int) -> NoReturn:
        """Run the workers of `request` in the forked child and exit. Never returns into the fork server's stack frames."""
        status = 1
        try:
            if CAN_ADOPT:
                while os.getppid() == parent_pid:
                    time.sleep(_ADOPTION_POLL_SECONDS)
                _die_with(self.launcher_pid)
            os.dup2(fds[0], 1)
            os.dup2(fds[0], 2)
            self.selector.close()
            self.connection.close()
            _close_all_but({0, 1, 2, *fds[1:], *self.library_fds})
            if request.holds_exit_lock:
                hold(fds.pop())
            # The last two stay ignored: the calls return errors instead.
            unchanged = {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}
            for number in signal.valid_signals() - unchanged:
                if signal.getsignal(number) is not None:  # None: reserved by the C library
                    with contextlib.suppress(OSError):
                        signal.signal(number, signal.SIG_DFL)
            faulthandler.enable(file=2)  # a crash in native code leaves its output tail too
            _name_process(request.host)
            _set_threads(request.threads)
            set_log_level(request.log_level)
            _, *rest = fds
            controls = [(name, socket.socket(fileno=rest.pop(0))) for name in request.workers]
            descriptors = dict(zip(request.descriptors, rest, strict=True))
            host_address = request.host_address
            seams = Seams(own_loop=len(controls) == 1, descriptors=descriptors, host_address=host_address, name_process=_name_process)
            run_loop(_host(load_worker(request.worker), controls, seams))
            status = 0
        except BaseException as error:
            if (fault := fault_of(error)) is not None:
                traceback.print_exception(_only(fault))
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)  # no atexit, no joining of threads: an ended worker must not hang in them


async def _host(worker: WorkerMain, controls: list[tuple[str, socket.socket]], seams: Seams) -> None:
    """Run one worker per control connection. The first worker that fails ends the others, since they share the process."""

    async def run_one(control: socket.socket) -> None:
        channel = await StreamChannel.from_socket(control, CONTROL_LIMITS, Identity("gateway"))
        async with channel:
            await worker(channel, seams)

    async with asyncio.TaskGroup() as group:
        for name, control in controls:
            group.create_task(run_one(control), name=name)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def fault_of(error: BaseException) -> BaseException | None:
    """`error` without its UserErrors, which the launcher receives and reports in one line. None when nothing else is left."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(UserError)[1]
    return None if isinstance(error, UserError) else error


def _only(error: BaseException) -> BaseException:
    """The error inside nested groups of one, so that the output tail is not filled with the frames around it."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends. Exit at once if the parent has ended already."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def shown_name(host: str) -> str:
    """Name of a host in `ps`: "fr:attention.0". The kernel keeps 15 characters; a longer name is cut to its beginning and its number."""
    return f"fr:{host}" if len(host) <= 12 else f"fr:{host[:7]}~{host[-4:]}"


def _name_process(host: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, shown_name(host).encode(), 0, 0, 0)


def _set_threads(count: int) -> None:
    """Bound the compute threads of this process, whether torch is imported already or later."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)


def _open_fds() -> frozenset[int]:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return frozenset(int(name) for name in os.listdir(folder))


def _close_all_but(kept: set[int]) -> None:
    for fd in _open_fds() - kept:
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
            os.close(fd)


def import_all(modules: Sequence[str]) -> str:
    """Import modules. Returns the text for the user when torch cannot be imported; "" when all are. Raises what other modules raise."""
    for module in modules:
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:  # OSError: a library that does not load
            if module != "torch":
                raise
            limit, _ = resource.getrlimit(resource.RLIMIT_AS)
            first = "" if limit == resource.RLIM_INFINITY else f"raise the memory limit (ulimit -v is {limit >> 10}), or "
            return f"torch cannot be imported: {error_text(error)}; {first}{TORCH_REMEDY} (flowrt doctor checks it)"
    return ""


def main(arguments: Sequence[str]) -> None:
    """Run the fork server. `arguments`: the connection's descriptor, the launcher's pid, modules to import before the first fork."""
    connection_fd, launcher_pid, *preload = arguments
    _die_with(int(launcher_pid))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is inherited as ignored, the kernel reaps children before `waitpid`
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the launcher's thread may have blocked some
    os.environ.pop("PYTHONPATH", None)
    if (path := os.environ.pop(ORIGINAL_PATH, None)) is not None:
        os.environ["PYTHONPATH"] = path
    connection = socket.socket(fileno=int(connection_fd))
    connection.set_inheritable(False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    before = _open_fds()
    gc.disable()  # imports create little garbage, and collecting it takes a tenth of their time
    with contextlib.suppress(ImportError):
        importlib.import_module("uvloop")  # which each worker uses
    if error := import_all(preload):
        send_blocking(connection, Loaded(num_threads=0, error=error))
        sys.exit(1)
    library_fds = _open_fds() - before
    gc.freeze()  # collections in workers do not touch the imported objects, so their pages stay shared
    gc.enable()
    num_threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    fork_server = _ForkServer(connection, int(launcher_pid), library_fds)
    fork_server.report(Loaded(num_threads=num_threads))
    try:
        fork_server.serve()
    except Exception:
        traceback.print_exc()  # print it now: end_all may end this process too
    finally:
        fork_server.end_all()


if __name__ == "__main__":
    main(sys.argv[1:])
