"""Lists the planted bugs in the recovery of attention groups: moved requests, suspects, credits and rows of dead clients. See planted.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, body, bug

GATEWAY = "flowrt.gateway.gateway"
REQUEST_LOG = "flowrt.gateway.request_log"
ROUTER = "flowrt.gateway.router"
REQUESTS = "flowrt.gateway.requests"
GROUP_CHANGES = "flowrt.launcher.run"
DEATHS = "flowrt.launcher.deaths"
RUN_TABLE = "flowrt.launcher.run_table"
RUN_STATE = "flowrt.launcher.run_state"
RUNNER = "flowrt.dataflow.runner"
MEMBERSHIP = "flowrt.workers.membership"
GROUP = "flowrt.workers.group"
SCHEDULER = "flowrt.engine.scheduler"
SEQUENCE = "flowrt.engine.sequence"

GROUP_BUGS: tuple[Bug, ...] = (
    # the loss of a group is noticed and announced
    body("loss-unannounced", "the loss of a worker is never announced", DEATHS, "Deaths.fence", "pass"),
    bug("lost-twice", "the loss of one incarnation is announced twice", (
        DEATHS, "Deaths.fence", "process.is_fenced or ", "")),
    bug("marked-dead-keeps-requests", "a group that is marked dead and must not be killed keeps its requests", (
        GROUP_CHANGES, "apply_group_change", "requests.lose_group(name, f'was marked dead: {why}', may_recur=may_recur, is_alive=True)", "pass")),
    bug("peers-name-dead", "a new incarnation is told to link with a peer that has died", (
        RUN_STATE, "RunState._send_peers", "WorkerState.LINKING <= each.state <= WorkerState.STOPPING", "each.addresses")),
    bug("earlier-loss-kills", "the loss of a link to an earlier incarnation ends a living process", (
        DEATHS, "Deaths.on_link_lost", "lost.incarnation not in ('', peer.incarnation)", "False")),
    bug("both-reports-wait", "a link that both living ends have lost is decided as late as one that a death may explain", (
        DEATHS, "Deaths.on_link_lost", "self._table.set_timer(0.0, self.on_unexplained_loss, subject)", "pass")),
    # requests move as new attempts
    bug("requests-stay", "requests of a lost group stay there", (
        GATEWAY, "Gateway.lose_group", "logs = [log for log in self._active.values() if not set(lost).isdisjoint(self._stages.workers_of(log))]", "logs = []")),
    bug("attempt-kept", "a moved request keeps its attempt", (
        GATEWAY, "Gateway._move", "log.attempt += 1", "pass")),
    bug("old-attempts-count", "tokens of any attempt and group are committed", (
        GATEWAY, "Gateway.on_token", "if log is None or log.end is not None or tokens.attempt != log.attempt or (self._stages.sender_of(log, tokens.index) != group):", "if log is None or log.end is not None:"), (
        RUN_STATE, "RunState.accepts_messages", "self.is_current(worker, incarnation) and (not self.table.workers[worker].process.is_fenced)", "self.is_current(worker, incarnation)")),
    bug("old-ends-count", "ends of any attempt and group are accepted", (
        GATEWAY, "Gateway.on_ended", "if log is None or ended.attempt != log.attempt or group not in (self._stages.worker_of(log), self._stages.group_of(log)):", "if log is None:"), (
        RUN_STATE, "RunState.accepts_messages", "self.is_current(worker, incarnation) and (not self.table.workers[worker].process.is_fenced)", "self.is_current(worker, incarnation)")),
    body("stale-submit", "a request that was moved is still sent to its old group", GATEWAY, "Gateway.is_placed", "return True"),
    bug("placed-in-lost-group", "requests are placed in lost groups", (
        ROUTER, "Router._open_groups", "name not in self._lost", "True")),
    body("readmission-forgotten", "a restarted group gets no requests", ROUTER, "Router.readmit", "pass"),
    bug("readmitted-requests-wait", "requests that wait when a group returns are not placed", (
        GATEWAY, "Gateway.readmit_group", "return self._place_waiting()", "return []")),
    bug("room-ignored", "a group is sent any number of sequences", (
        ROUTER, "Router._open_groups", "status.num_sequences + num_more <= max_sequences_at(status.max_num_seqs, len(statuses))", "True")),
    bug("load-kept", "the load of a lost group is not reset", (
        ROUTER, "Router.remove", "self._placed.pop(log.index, None)", "self._placed.get(log.index)")),
    body("never-given-up", "requests wait for ever when no group is left", ROUTER, "Router.expired", "return []"),
    bug("given-up-early", "requests wait for half the time when no group is left", (
        ROUTER, "Router.__init__", "self._lost_group_seconds, self._now = (lost_group_seconds, now)", "self._lost_group_seconds, self._now = (lost_group_seconds / 2, now)")),
    bug("given-up-with-a-group", "requests are given up although a group is left", (
        ROUTER, "Router._note_groups", "not self._lost.keys() >= self._idle.keys()", "not self._lost")),
    bug("drained-early", "a drain does not wait for requests that move", (
        REQUESTS, "Requests._note_drained", "not self.gateway.num_unfinished", "not sum(worker.num_sequences for worker in self.gateway.workers.values())")),
    # what a moved request continues from
    bug("tokens-not-replayed", "a moved request begins without its committed tokens", (
        REQUEST_LOG, "request_of", "if log.attempt or log.kv else ()", "if log.attempt < 0 else tuple((() for choice in log.choices))")),
    bug("replayed-as-prompt", "replayed tokens count as prompt tokens", (
        SEQUENCE, "Sequence.__post_init__", "self.num_prompt_tokens = len(request.prompt_token_ids)", "self.num_prompt_tokens = len(self.tokens)")),
    bug("last-token-replayed-twice", "the last committed token is replayed twice", (
        SEQUENCE, "Sequence.__post_init__", "*committed]", "*committed, *committed[-1:]]")),
    bug("replay-of-first-choice", "each choice replays the tokens of the first", (
        SEQUENCE, "Sequence.__post_init__", "request.committed(self.choice)", "request.committed(0)")),
    bug("penalties-lost", "penalties do not count replayed tokens", (
        SEQUENCE, "Sequence.__post_init__", "**Counter(committed)", "**{}")),
    bug("seed-redrawn", "each attempt draws with another seed", (
        REQUEST_LOG, "request_of", "seed=log.seed", "seed=log.seed + log.attempt")),
    # suspects
    bug("alone-unreported", "a group does not report that it computes a suspect alone", (
        GROUP, "Group._start_steps", "self._send(report)", "pass")),
    bug("step-before-tokens", "a group begins a step before its last tokens have left", (
        GROUP, "Group._carry_out", "self._when_sent(self._start_steps)", "self._start_steps()")),
    bug("trial-before-report", "a group begins to compute a suspect alone before its report has left", (
        GROUP, "Group._start_steps", "self._when_sent(self._start_steps)", "self._start_steps()")),
    bug("suspect-in-company", "a suspect is computed beside other requests", (
        SEQUENCE, "Sequence.runs_alone", "return self.is_suspect or (self.is_on_trial and self.num_computed_tokens >= self.num_proven_tokens)", "return self.is_suspect")),
    bug("proven-by-one-choice", "a suspect is cleared by the token of one of its choices", (
        ROUTER, "Router.prove", "if not log.unproven:", "if True:")),
    bug("latest-token-proven", "a suspect computes its latest token beside others", (
        SEQUENCE, "Sequence.__post_init__", "len(self.tokens) - 1 if", "len(self.tokens) if")),
    bug("replay-goes-on", "the replay of a suspect goes on behind the tokens that were computed before", (
        SCHEDULER, "Scheduler._chunk", "if sequence.is_on_trial and (not sequence.runs_alone):", "if False:")),
    bug("restart-forgets-crash", "a policy that restarts the groups with a crashed server restarts what crashed it, too", (
        GROUP_CHANGES, "apply_group_change", "if may_recur and event.ends_groups:", "if False:"), graphs="2x3.yaml"),
    bug("trial-never-over", "a suspect that has got a token is blamed for the next crash of its group", (
        "flowrt.gateway.stages", "Stages.note_progress", "log.runs_alone = False", "pass"), (
        ROUTER, "Router.prove", "log.num_crashes = 0", "pass")),
    bug("innocent-counted", "each request of a crashed group is counted, whether or not it ran alone", (
        REQUEST_LOG, "RequestLog.count_crash", "self.num_crashes += self.runs_alone", "self.num_crashes += 1"), (
        GATEWAY, "Gateway._redo", "other.runs_alone or other.num_crashes", "False")),
    bug("crash-uncounted", "no crash counts", (
        REQUEST_LOG, "RequestLog.count_crash", "self.num_crashes += self.runs_alone", "pass")),
    bug("coincidence-counted", "requests that ran alone, each in its group, are all blamed for one crash, and again at once", (
        GATEWAY, "Gateway._redo", "other.runs_alone or other.num_crashes", "False"), (
        "flowrt.gateway.stages", "Stages._is_held", "if log.num_crashes else []", "if False else []")),
    body("kill-blames", "a suspect whose group is killed from outside is blamed", RUN_TABLE, "ProcessRecord.may_recur", "return True"),
    bug("crash-blames-none", "requests of a crashed group are not suspected", (
        RUN_TABLE, "ProcessRecord.may_recur", "self.cause is None and is_crash", "False")),
    bug("crash-taken-for-kill", "an exit status that is known before the reap counts as a kill from outside", (
        DEATHS, "Deaths.on_dying", "process.how = process.how or how", "process.how = process.how or (how and 'was killed by SIGKILL')")),
    bug("moved-before-drained", "requests of a dead group move before its last messages are read", (
        DEATHS, "Deaths.on_dying", "process.phase = ProcessPhase.ENDED", "process.phase = ProcessPhase.ENDED; process.can_restart and self.fence(name)")),
    bug("hang-blames-none", "requests of a hung group are not suspected", (
        DEATHS, "Deaths._note_dying", "process.has_failed |= worker.marked_dead is not None and (not worker.marked_dead.is_stopped)", "pass")),
    # what others keep of a dead client
    bug("ended-source-unfenced", "a server does not fence the tags of a dead client", (
        RUNNER, "Runner.end_peer", "self._fences.end_source(source)", "pass")),
    bug("rows-of-dead-kept", "a server keeps the rows and firings of a dead client", (
        RUNNER, "Runner.end_peer", "self._drop_stale()", "pass")),
    bug("inbound-not-renewed", "a server expects the credits of a dead client back", (
        RUNNER, "Runner.end_peer", "self._inbound.renew(peer)", "pass")),
    bug("credits-to-successor", "a firing of a dead client returns its credits to the next incarnation", (
        "flowrt.dataflow.inbound_edges", "InboundEdges.consume_firing", "[edge for edge in firing.via if (edge, firing.tag) not in orphans]", "firing.via")),
    bug("response-to-successor", "the response to a dead client goes to its next incarnation", (
        RUNNER, "Runner._finish", "if fences.is_active and fences.is_stale(output.tag):", "if False:")),
    bug("absent-peers-open", "edges to peers that are down at the start are open", (
        MEMBERSHIP, "Membership.__init__", "self._lose(process, incarnations.get(process, ''))", "pass")),
)  # fmt: skip
