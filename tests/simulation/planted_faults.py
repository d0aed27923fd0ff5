"""Lists the planted bugs in what is redone after a fault: steps, sequences, and the parts of a server that crashed. See planted.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, body, bug

ENGINE = "flowrt.engine.engine"
MEMORY = "flowrt.engine.group_memory"
SCHEDULER = "flowrt.engine.scheduler"
SEQUENCE = "flowrt.engine.sequence"
GROUP = "flowrt.workers.group"
DATA_PATH = "flowrt.workers.data_path"
CLIENT = "flowrt.exchange.expert_client"
FAILOVER = "flowrt.exchange.failover"
DEATHS = "flowrt.launcher.deaths"

FAULT_BUGS: tuple[Bug, ...] = (
    # steps that failed
    body("failed-step-ignored", "a step that failed is not rolled back", DATA_PATH, "DataPath.on_failed", "pass"),
    bug("failed-step-ends-requests", "a step that fails once ends its requests", (
        ENGINE, "Engine.fail_steps", "STEP_AGAIN[sequence.is_suspect]", "STEP_AGAIN[1]")),
    bug("suspects-together", "the sequences of a failed step run together", (
        SEQUENCE, "Sequence.runs_alone", "return self.is_suspect or (self.is_on_trial and self.num_computed_tokens >= self.num_proven_tokens)", "return self.is_on_trial")),
    bug("suspect-for-ever", "a suspect that has a token still ends with its next failure, and runs alone", (
        SEQUENCE, "Sequence.append", "self.is_on_trial = self.is_suspect = False", "self.is_on_trial = False")),
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
        SCHEDULER, "Scheduler._admit", "sequence.num_computed_tokens = reuse.num_tokens",
        "sequence.num_computed_tokens = max(sequence.num_computed_tokens, reuse.num_tokens)")),
    bug("redone-shares-pages", "a sequence without finite logits shares a sibling's pages again", (
        MEMORY, "GroupMemory._shared_pages", "if sequence.computes_whole_prompt:", "if sequence.scores_prompt:")),
    # parts of a server that crashed
    bug("cause-not-awaited", "the parts of a dead server go to replicas before it is known how it died", (
        FAILOVER, "Failover.mark_lost", "self.client.servers.lose(process, awaits_cause=True)", "self.client.servers.lose(process, awaits_cause=True)\n        self.settle(process, None)")),
    bug("cause-unsent", "clients do not learn how a server died", (
        DEATHS, "Deaths.fence", "table.notify(worker, DeathCause(worker.name, worker.incarnation, how, process.may_recur, process.is_killed_on_purpose))", "pass")),
    body("never-settled", "the parts of a dead server wait for ever", FAILOVER, "Failover.settle", "pass"),
    bug("crash-suspects-none", "steps with parts at a crashed server are not suspected", (
        FAILOVER, "Failover.settle", "cause is not None and cause.may_recur", "False")),
    bug("next-part-unsent", "the second part of a suspect is never sent", (
        FAILOVER, "Failover.on_response", "self._runner.emit(self._dispatch, tag, requests)", "pass")),
    bug("waiting-suspect-counted", "a suspect counts whose part waits its turn for a server that crashes", (
        CLIENT, "ExpertClient.parts_at", " and number not in entry.unsent", "")),
    bug("suspect-not-counted", "a suspect that runs alone while a server crashes is computed again, without end", (
        ENGINE, "Engine.fail_steps", "int(sequence.runs_alone and counts)", "0")),
)  # fmt: skip
