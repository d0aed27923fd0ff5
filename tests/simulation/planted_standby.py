"""Lists planted bugs of standby processes. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, bug

STARTS = "flowrt.launcher.starts"
POOL = "flowrt.launcher.worker_pool"
CONNECTION = "flowrt.launcher.control_connection"
PROCESS = "flowrt.workers.process"
DATA_PATH = "flowrt.workers.data_path"
RUN_STATE = "flowrt.launcher.run_state"

STANDBY_BUGS: tuple[Bug, ...] = (
    bug("standby-used-twice", "a standby process that was taken stays in the table", (
        STARTS, "Starts.start_next", "table.remove(standby)", "pass")),
    bug("standby-taken-unready", "a standby process is taken while it loads", (
        STARTS, "Starts._ready_for", "each.phase == ProcessPhase.UP and each.is_open", "each.is_open")),
    bug("standby-other-experts", "a standby process uses the weights of one server for every other", (
        STARTS, "_operator_of", "node.options", "{}")),
    bug("standby-not-replaced", "no standby process follows one that was taken", (
        STARTS, "Starts.start_standbys", "if name not in processes", "if name not in processes and not any(each.num_restarts for each in processes.values())")),
    bug("ready-standby-ignored", "a process that waits for the fork server does not take a standby process that becomes ready", (
        STARTS, "Starts.start_standbys", "self.start_next(able[0])", "pass")),
    bug("standby-keeps-nodes", "the operators of a standby process keep the node names that they were loaded for", (
        DATA_PATH, "LoadedOperators.renamed", "names[node]: function for", "node: function for")),
    bug("standby-old-incarnation", "the messages of a standby process that was taken count as those of its former incarnation", (
        CONNECTION, "ControlConnection.assign", "worker.name, worker.incarnation, Statistics()", "worker.name, self.incarnation, Statistics()")),
    bug("standby-not-renamed", "the backend reports the end of a standby process that was taken under its former name", (
        POOL, "WorkerPool._use_standby", "backend.rename(started, action.process, action.workers)", "pass")),
    bug("standby-ignores-name", "a standby process does not become the process whose name it gets", (
        PROCESS, "Worker._load_operators", "self._apply_start(start)", "pass")),
)  # fmt: skip
