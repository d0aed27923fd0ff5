"""Rules beyond the linters: modules and calls that only the seams may use, and some that are used nowhere."""

from __future__ import annotations

import ast
import functools
from itertools import pairwise

from repository.source_tree import Source, sources

MAX_LINES = 600  # a file is split where it holds a second idea, not to meet this number
LONG_FILES: dict[str, str] = {}  # path: why it is longer

# Time, random numbers, threads and processes come through flowrt/seams.py, so that the simulation can replace them.
SEAM_MODULES = {"time", "random", "uuid", "secrets", "threading", "subprocess", "_thread", "sched"}
SEAM_FILES = {
    "flowrt/seams.py": "the seams themselves",
    "flowrt/timer.py": "the clock of the seams, finer than the loop's",
    "flowrt/simulation/": "the other form of the seams",
    "flowrt/processes/fork_server.py": "starts processes",
    "flowrt/hosts/local_engine.py": "starts host servers",
    "flowrt/serving/tokenizer_process.py": "starts the process that tokenizes text",
    "flowrt/processes/fork_server_process.py": "starts the fork server",
    "flowrt/launcher/launcher.py": "makes the run's key",
    "flowrt/processes/exit_lock.py": "a thread waits for the end of a process",
    "flowrt/bench": "measures the real world",
    "flowrt/cli/graph.py": "runs Graphviz",
    "flowrt/launcher/start_check_process.py": "starts the process that checks devices before a run",
    "flowrt/chaos/worker.py": "injects faults into a real process",
    "flowrt/chaos/cells.py": "draws the processes to kill from a seed",
    "transports/conformance/suite.py": "times the checks, and waits for what ends by itself",
    "transports/channel/bulk_copy.py": "measures the cost of a copy on this machine",
    "transports/wire/handshake.py": "draws nonces, which must be unpredictable",
    "transports/channel/rendezvous.py": "draws socket names, which must be unpredictable",
    "operators/library_interfaces.py": "a lock around a library that replaces functions of its own",
    "transports/zeromq": "draws socket names, which must be unpredictable",
}
NOWHERE = {"pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve", "multiprocessing", "imp"}
UNPICKLERS = ("torch.load", "torch.save", "numpy.load", "np.load", "torch.multiprocessing", "joblib.load")
EXECUTOR_FILES = (
    "flowrt/seams.py",
    "flowrt/simulation/",
    "flowrt/bench",
)
# Tasks have owners: a task group, or one of these, which keep, await and cancel what they start.
TASK_OWNERS: dict[str, str] = {
    "flowrt/api/running_graph.py": "the window of a stream: ends where the generator ends",
    "flowrt/seams.py": "what a loop in a thread holds: left or cancelled, and awaited, by close",
    "flowrt/gateway/requests.py": "the cancels of a run: ended by aclose",
    "flowrt/gateway/front_ends.py": "what is sent to front ends: ended by aclose",
    "flowrt/gateway/log_writer.py": "the task that writes: ended and awaited by aclose",
    "flowrt/actors/lazy_opener.py": "the call, and channels that come too late: ended by aclose",
    "transports/conformance/channel_checks.py": "a kit for tests: each check cancels and awaits what it starts",
    "transports/conformance/connection_checks.py": "the same",
    "transports/conformance/kit.py": "the same",
    "transports/conformance/process_checks.py": "the same",
    "flowrt/launcher/served_requests.py": "requests statistics: cancelled and awaited by aclose",
    "flowrt/serving/http_server.py": "accepts connections: cancelled and awaited by close",
    "flowrt/launcher/launcher.py": "the run: ended by stop, or by leaving `async with`",
    "flowrt/simulation/world.py": "simulated processes, which are cut off without being awaited; the run fails when one is left",
    "flowrt/simulation/launchers.py": "the simulated launcher: awaited, or cut off by its death",
    "flowrt/simulation/front_ends.py": "the clients of a simulated front end: ended by close or end, or cut off with it",
    "transports/emulation/channel.py": "the reader of a channel: ended and awaited by its aclose",
}
SLEEPERS = ("flowrt/actors/lazy_opener.py", "flowrt/seams.py", "flowrt/simulation/", "flowrt/bench")
BAD_WORDS_IN_CLASSES = ("Manager", "Impl", "Helper", "Utils")
BAD_FILE_NAMES = {"utils", "util", "helpers", "helper", "core", "base", "common", "misc"}


def place(source: Source, node: ast.AST) -> str:
    return f"{source.path}:{getattr(node, 'lineno', 0)}"


def test_time_randomness_threads_and_processes_come_through_the_seams() -> None:
    wrong = [
        f"{source.path}:{entry.line}: {entry.target}"
        for source in sources()
        if not source.path.startswith(tuple(SEAM_FILES))
        for entry in source.imports
        if entry.target.split(".")[0] in SEAM_MODULES
    ]
    assert not wrong, "\n".join(wrong)


def test_interpreters_do_not_import_from_the_current_directory() -> None:
    """Else a command in a checkout would start processes of its tree, beside those of the installed package."""
    found = [
        (place(source, node), before)
        for source in sources()
        for node in ast.walk(source.tree)
        for words in [node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])]
        for before, word in pairwise(words)
        if isinstance(word, ast.Constant) and word.value in ("-m", "-c")
    ]
    assert len(found) > 5
    assert not [at for at, before in found if not (isinstance(before, ast.Constant) and before.value == "-P")]


def test_executors_belong_to_the_compute_seam() -> None:
    wrong = [
        f"{source.path}:{entry.line}: {entry.target}"
        for source in sources()
        if not source.path.startswith(EXECUTOR_FILES)
        for entry in source.imports
        if entry.target.startswith("concurrent.futures")
    ]
    for source in sources():
        if not source.path.startswith(EXECUTOR_FILES):
            wrong += [place(source, call) for call, name in calls(source) if name.endswith(("run_in_executor", "asyncio.to_thread"))]
    assert not wrong, "\n".join(wrong)


def test_nothing_executes_what_it_receives() -> None:
    wrong = [
        f"{s.path}:{e.line}: {e.target}"
        for s in sources()
        for e in s.imports
        if e.target.split(".")[0] in NOWHERE or e.target in UNPICKLERS
    ]
    for source in sources():
        for call, name in calls(source):
            if name.removeprefix("builtins.") in ("eval", "exec", "compile", "__import__") or name in UNPICKLERS:
                wrong.append(f"{place(source, call)}: {name}")
            if name.endswith((".recv_pyobj", ".send_pyobj")):
                wrong.append(f"{place(source, call)}: {name}")
    assert not wrong, "\n".join(wrong)


@functools.cache
def calls(source: Source) -> list[tuple[ast.Call, str]]:
    return [(node, ast.unparse(node.func)) for node in source.nodes() if isinstance(node, ast.Call)]


def test_no_wait_for() -> None:
    """asyncio.wait_for can swallow a cancellation on Python 3.11; asyncio.timeout cannot."""
    wrong = [place(source, call) for source in sources() for call, name in calls(source) if name.split(".")[-1] == "wait_for"]
    wrong += [f"{s.path}:{e.line}" for s in sources() for e in s.imports if e.target == "asyncio.wait_for"]
    assert not wrong, "\n".join(wrong)


def test_every_task_has_an_owner() -> None:
    wrong = []
    for source in sources():
        if source.path in TASK_OWNERS:
            continue
        wrong += [f"{source.path}:{e.line}" for e in source.imports if e.target in ("asyncio.create_task", "asyncio.ensure_future")]
        for call, name in calls(source):
            owner, _, verb = name.rpartition(".")
            if verb == "ensure_future" or (verb == "create_task" and (owner == "asyncio" or "loop" in owner.lower())):
                wrong.append(f"{place(source, call)}: {name}")
    assert not wrong, "tasks without an owner:\n" + "\n".join(wrong)


def test_waiting_for_a_time_goes_through_the_clock() -> None:
    """asyncio.sleep(0) gives way to others and is fine anywhere; a real wait uses the seams' clock."""
    wrong = []
    for source in sources():
        if source.path.startswith("flowrt/") and not source.path.startswith(SLEEPERS):
            for call, name in calls(source):
                if name == "asyncio.sleep" and not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0):
                    wrong.append(place(source, call))
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_docstring() -> None:
    wrong = []
    for source in sources():
        text = ast.get_docstring(source.tree) or ""
        enough = 20 if source.path.endswith("__init__.py") else 40
        if len(text) < enough:
            wrong.append(f"{source.path}: {len(text)} characters")
    assert not wrong, "files without an opening docstring:\n" + "\n".join(wrong)


def test_no_file_is_too_long() -> None:
    wrong = [
        f"{source.path}: {source.text.count(chr(10))} lines"
        for source in sources()
        if source.text.count("\n") > MAX_LINES and source.path not in LONG_FILES
    ]
    assert not wrong, "\n".join(wrong)


def test_names_are_specific() -> None:
    wrong = [source.path for source in sources() if source.path.rsplit("/", 1)[-1].removesuffix(".py") in BAD_FILE_NAMES]
    for source in sources():
        for node in source.nodes():
            if isinstance(node, ast.ClassDef) and node.name.endswith(BAD_WORDS_IN_CLASSES):
                wrong.append(f"{place(source, node)}: {node.name}")
    assert not wrong, "\n".join(wrong)


def test_exemptions_are_still_needed() -> None:
    """An exemption for a file that is gone would let a new file of that name slip through."""
    paths = [source.path for source in sources()]
    stale = [entry for entry in (*LONG_FILES, *TASK_OWNERS) if entry not in paths]
    assert not stale
