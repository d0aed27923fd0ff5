"""Applies the events of a run to the requests of its groups: a lost group's requests move, and a returned group gets new ones."""

from __future__ import annotations

from flowrt.gateway.requests import Requests
from flowrt.launcher import events


def apply_group_change(event: events.Event, requests: Requests) -> None:
    """Call this with every event of the launcher."""
    match event:
        case events.WorkerLost(name, how, while_loading=False, may_recur=may_recur, alone_for=alone_for):
            is_innocent = alone_for not in ("", name)  # a group that is a server too: it computed nothing of its own
            requests.lose_group(name, how, may_recur=may_recur and not is_innocent, is_restarting=event.is_restarting)
            if may_recur and event.ends_groups:  # otherwise the groups know whose parts it had
                requests.lose_server(name, how, alone_for, event.alone_part, event.is_colocated)
        case events.WorkerGivenUp(name):
            requests.give_up_group(name)
        case events.WorkerMarkedDead(name, why, is_killed, may_recur) if not is_killed:
            requests.lose_group(name, f"was marked dead: {why}", may_recur=may_recur, is_alive=True)
        case events.WorkerRestarted(name) | events.WorkerCleared(name):
            requests.readmit_group(name)
        case events.RunFailed(error):
            requests.fail(error)
