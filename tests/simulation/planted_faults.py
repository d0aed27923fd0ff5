"""Lists the planted bugs in what is redone after a fault: steps, sequences, and the parts of a server that crashed. See planted.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, body, bug

ENGINE = "flowrt.engine.engine"
SCHEDULER = "flowrt.engine.scheduler"
SEQUENCE = "flowrt.engine.sequence"
GROUP = "flowrt.workers.group"
DATA_PATH = "flowrt.workers.data_path"
MEMBERSHIP = "flowrt.workers.membership"
CLIENT = "flowrt.exchange.expert_client"
FAILOVER = "flowrt.exchange.failover"
SELECTION = "flowrt.dataflow.selection"
DEATHS = "flowrt.launcher.deaths"

FAULT_BUGS: tuple[Bug, ...] = (
    # steps that failed
    body("failed-step-ignored", "a step that failed is not rolled back", DATA_PATH, "DataPath._on_failed", "pass"),
    bug("failed-step-ends-requests", "a step that fails once ends its requests", (
        ENGINE, "Engine.fail_steps", "STEP_AGAIN[sequence.is_suspect]", "STEP_AGAIN[1]")),
    bug("suspects-together", "the sequences of a failed step run together", (
        SEQUENCE, "Sequence.runs_alone", "return self.is_suspect or (self.is_on_trial and self.num_computed_tokens >= self.num_proven_tokens)", "return self.is_on_trial")),
    bug("suspect-for-ever", "a suspect whose step commits still ends with its next failure, and runs alone", (
        ENGINE, "Engine.step_done", "sequence.is_suspect = False", "pass")),
    bug("failed-epoch-kept", "the rows of a failed step stay in the runner", (
        GROUP, "Group._begin_epoch", "self._runner.roll_back(self._source, self._engine.epoch)", "pass")),
    # sequences without finite logits
    bug("not-finite-at-once", "a sequence ends when its logits are not finite for the first time", (
        ENGINE, "Engine._redo_sequence", "sequence.num_redone)", "1)")),
    bug("not-finite-for-ever", "a sequence whose logits are never finite is computed again for ever", (
        ENGINE, "Engine._redo_sequence", "sequence.num_redone += 1", "pass")),
    bug("not-finite-not-redone", "a sequence without finite logits keeps its rows", (
        ENGINE, "Engine._redo_sequence", "self._scheduler.recompute(sequence)", "pass")),
    bug("redone-keeps-rows", "a sequence that is computed again keeps its computed rows, and loses their pages", (
        SCHEDULER, "Scheduler.recompute", "sequence.num_computed_tokens = 0", "pass"), (
        SCHEDULER, "Scheduler._admit", "sequence.num_computed_tokens = len(shared) * self._limits.page_size",
        "sequence.num_computed_tokens = max(sequence.num_computed_tokens, len(shared) * self._limits.page_size)")),
    bug("redone-shares-pages", "a sequence without finite logits shares a sibling's pages again", (
        SCHEDULER, "Scheduler._shared_pages", "if sequence.computes_whole_prompt:", "if sequence.scores_prompt:")),
    # parts of a server that crashed
    bug("cause-not-awaited", "the parts of a dead server go to replicas before it is known how it died", (
        FAILOVER, "Failover.mark_lost", "self._unsettled.add(process)", "self._unsettled.add(process)\n        self.settle(process, None)")),
    bug("cause-unsent", "clients do not learn how a server died", (
        DEATHS, "Deaths.fence", "table.notify(worker, DeathCause(worker.name, worker.incarnation, how, process.may_recur, alone.tag, alone.part))", "pass")),
    bug("never-settled", "the parts of a dead server wait for ever", (
        MEMBERSHIP, "Membership._settle", "self._failover.settle(process, cause)", "pass")),
    bug("crash-suspects-none", "steps with parts at a crashed server are not suspected", (
        FAILOVER, "Failover.settle", "may_recur = cause is not None and cause.may_recur", "may_recur = False")),
    bug("part-not-alone", "parts of a suspect are not marked", (
        CLIENT, "ExpertClient._request", "self.computes_alone or bool(entry.hedges)", "bool(entry.hedges)")),
    bug("part-alone-unreported", "a server does not report that it computes a suspect's part", (
        DATA_PATH, "DataPath._report_alone", "self._send(ComputesAlone(tag, part))", "pass")),
    bug("part-before-report", "a server computes a part alone before its report has left", (
        DATA_PATH, "DataPath._report_alone", "await sent.wait()", "pass")),
    bug("part-in-company", "a suspect's part is computed together with others", (
        SELECTION, "BoundedWait.select", "self._is_alone(firing)", "False")),
    bug("waiting-suspect-blamed", "a suspect whose part waits at a crashed server is blamed", (
        FAILOVER, "Failover.settle", " and (part != self.client.in_flight(tag))", "")),
    bug("suspect-not-blamed", "a suspect whose part crashed a server alone is computed again", (
        FAILOVER, "Failover.settle", "self._steps.fail_steps([named[0]], alone)", "self._redispatch(*named)")),
    bug("next-part-unsent", "the second part of a suspect is never sent", (
        FAILOVER, "Failover._send_next", "self._runner.emit(self._dispatch, tag, requests)", "pass")),
    # hedges of parts at a server that hangs
    bug("hedge-of-several", "a hedge has the rows of all sequences of the late part", (
        CLIENT, "ExpertClient.hedge", "self._split(tag, entry, number, others, counts)", "self._split(tag, entry, number, others, [sum(counts)])")),
    bug("hedge-not-alone", "hedges are not marked", (
        CLIENT, "ExpertClient._request", "self.computes_alone or bool(entry.hedges)", "self.computes_alone")),
    bug("hedge-not-blamed", "a request whose hedge ended a server alone is computed again", (
        FAILOVER, "Failover.settle", "self.client.hedged_row(*named)", "None")),
    bug("hedges-not-awaited", "all requests of a late server that crashed are suspects before their hedges have responded", (
        FAILOVER, "Failover._fail_after_hedges", "parts and self._awaits_hedges(frozenset(self._servers[process]))", "False")),
    bug("hedge-blames-first", "the first sequence of the step is blamed for the hedge that ended a server", (
        FAILOVER, "Failover.settle", "self._steps.fail_row(named[0], row, alone)", "self._steps.fail_row(named[0], 0, alone)")),
)  # fmt: skip
