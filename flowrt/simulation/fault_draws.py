"""Draws the faults of a case: which fault hits which process, when, and for how long. cases.py draws the rest of a case."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from flowrt.graph.model import FIRST_HOST, FORK_SERVER, GATEWAY, MONITOR, Graph
from flowrt.graph.recovery import expert_servers, is_watched, pipelines
from flowrt.reliability import scenario as kinds
from flowrt.reliability.scenario import PERMANENT_SECONDS, AnyFault
from flowrt.simulation.invariants import mortal as mortal_workers

_KINDS = {
    "crash": 5, "pause": 10, "stall": 8, "hang": 8, "slow": 8, "slow_link": 8, "cut": 12, "reset": 8, "duplicate": 6, "skew": 4,
    "tiny_queues": 6, "swizzle": 5, "roll_back": 8, "deaths": 36, "slow_servers": 20, "fork_server": 9, "permanent": 8, "group_deaths": 24,
    "lost_links": 6,
}  # fmt: skip

BROKEN_SHARE = 0.15  # of the seeds with prefill workers


def _draw_time(chance: random.Random, highest_exponent: float = -0.5) -> float:
    """Seconds from the first request, between 0.5 ms and a power of ten; early times are as likely as late ones."""
    return float(10 ** chance.uniform(-3.3, highest_exponent))


def draw_faults(chance: random.Random, graph: Graph) -> list[AnyFault]:
    count = chance.choice((0, 1, 2, 2, 3, 3, 5))
    names = list(graph.process_names())
    mortal = sorted(mortal_workers(graph))
    process_of = {node.name: node.process for node in graph.nodes.values()}
    pairs = {(process_of[edge.source], process_of[edge.target]) for edge in graph.edges.values()}
    links = sorted({(min(pair), max(pair)) for pair in pairs if len(set(pair)) == 2}) * 2 + [(GATEWAY, name) for name in names]
    if mortal and graph.reliability.detector:
        names.append(MONITOR)
    between = [link for link in links if GATEWAY not in link]
    servers = sorted(expert_servers(graph))
    faults: list[AnyFault] = []
    for kind in chance.choices(list(_KINDS), list(_KINDS.values()), k=count):
        if kind == "deaths":
            faults += _draw_deaths(chance, graph, mortal, names) if mortal else _draw_fault(chance, "reset", names, between or links)
        elif kind == "group_deaths":
            faults += _draw_group_deaths(chance, graph, mortal)
        elif kind == "slow_servers":
            faults += _draw_slow_servers(chance, servers, mortal)
        elif kind == "fork_server":
            faults += _draw_fork_server(chance, graph, mortal)
        elif kind == "permanent":
            faults += _draw_permanent(chance, graph)
        elif kind == "lost_links":
            faults += _draw_lost_link(chance, between)
        else:
            faults += _draw_fault(chance, kind, names, links)
    return faults


def _draw_deaths(chance: random.Random, graph: Graph, mortal: list[str], names: list[str]) -> list[AnyFault]:
    """Crashes of several servers one after another or at once, or of one server repeatedly; sometimes all other processes are slow,
    so that several crashes fall within one call. Sometimes a group was rolled back just before, so that its parts wait for credits."""
    at, apart = _draw_time(chance), chance.choice((0.0, 1e-3, 30e-3, 0.3, 2.0))
    victims = chance.choice((mortal, chance.choices(mortal, k=4), [chance.choice(mortal)] * chance.randint(1, 7), [chance.choice(mortal)]))
    faults: list[AnyFault] = [
        kinds.Crash(at_seconds=at + apart * place * chance.random(), process=name) for place, name in enumerate(victims)
    ]
    if chance.random() < 0.6:
        factor, lasts = chance.choice((20.0, 50.0, 200.0)), 10 ** chance.uniform(-1, 0.4)
        faults += [
            kinds.Slow(at_seconds=at * chance.random(), process=name, for_seconds=lasts, factor=factor)
            for name in names
            if name not in victims
        ]
    if chance.random() < 0.3:
        group = chance.choice(_groups_of(graph))
        faults += [kinds.RollBack(at_seconds=at * chance.random(), process=group) for _ in range(3)]
    return faults


def _draw_group_deaths(chance: random.Random, graph: Graph, mortal: list[str]) -> list[AnyFault]:
    """Crashes or permanent standstills of groups: one, all, one repeatedly, or one and another process, such as the one that its requests
    move to. The later ones may fall into the replay or the restart. Sometimes all servers are slow, so that requests of a dead group
    wait there, or the launcher is reached over a slow link, so that the last messages of a dead group come after notices of its death, and
    requests wait to be sent there."""
    groups = [name for name in _groups_of(graph) if name in mortal]
    if not groups:
        return _draw_permanent(chance, graph)
    at, apart, group = _draw_time(chance), chance.choice((0.0, 1e-3, 10e-3, 0.1, 1.0)), chance.choice(groups)
    victims = chance.choice(([group], groups, [group] * chance.randint(2, 5), [group, chance.choice(mortal)], groups * 2))
    faults = [
        _draw_death(chance, graph, name, at + apart * place * chance.random(), 0.25 if place == 0 else 0.1)
        for place, name in enumerate(victims)
    ]
    if chance.random() < 0.25:
        begin, lasts = at * chance.choice((0.0, chance.random())), 10 ** chance.uniform(-1, 0)
        faults.append(kinds.SlowLink(at_seconds=begin, between=(GATEWAY, group), for_seconds=lasts, factor=100.0))
        if chance.random() < 0.5:
            faults.append(kinds.TinyQueues(process=group))
    if chance.random() < 0.4:
        factor, lasts = chance.choice((20.0, 50.0, 200.0)), 10 ** chance.uniform(-1, 0.4)
        slow = sorted({*expert_servers(graph)} - set(groups))
        faults += [kinds.Slow(at_seconds=at * chance.random(), process=name, for_seconds=lasts, factor=factor) for name in slow]
    return faults


def _draw_death(chance: random.Random, graph: Graph, name: str, at_seconds: float, standstill_share: float) -> AnyFault:
    if graph.processes != "many" or not is_watched(graph) or chance.random() >= standstill_share:
        return kinds.Crash(at_seconds=at_seconds, process=name)
    return chance.choice((kinds.Pause, kinds.Stall, kinds.Hang))(at_seconds=at_seconds, process=name, for_seconds=PERMANENT_SECONDS)


def _groups_of(graph: Graph) -> list[str]:
    return sorted(pipelines(graph))


def draw_early_deaths(chance: random.Random, graph: Graph, servers: list[str]) -> list[AnyFault]:
    """The crash of a server, most likely while it loads. In half of the cases it crashes later, while a group connects that the launcher
    reaches over a slow link: the server may be back before the group can receive a notice."""
    process = chance.choice(servers)
    if chance.random() < 0.5:
        return [kinds.Crash(at_seconds=chance.uniform(0.0, 0.2), process=process)]
    group = chance.choice(_groups_of(graph))
    return [
        kinds.SlowLink(between=(GATEWAY, group), for_seconds=5.0, factor=300.0),
        kinds.Crash(at_seconds=chance.uniform(0.0, 1.5), process=process),
    ]


def draw_early_stop(chance: random.Random, servers: list[str]) -> list[AnyFault]:
    """The permanent stop of a process, most likely while it loads, and nothing else."""
    return [kinds.Pause(at_seconds=chance.uniform(0.0, 0.15), process=chance.choice(servers), for_seconds=PERMANENT_SECONDS)]


def draw_standby_faults(chance: random.Random, graph: Graph) -> list[AnyFault]:
    """Crashes and standstills of standby processes, most of them close to a death of a process that they stand in for. Two deaths of one
    process, so that the second one hits a former standby process. A standby process that is ready late, while there is no fork server."""
    mortal = sorted(mortal_workers(graph))
    if not graph.reliability.standby or graph.processes != "many" or not mortal or chance.random() < 0.3:
        return []
    at, victim = chance.uniform(0.0, 4.0), chance.choice(mortal)
    faults: list[AnyFault] = [kinds.Crash(at_seconds=at, process=victim)]
    name = f"standby.{chance.randrange(graph.reliability.standby)}"
    near = at + chance.choice((-1e-3, 0.0, 1e-3, 10e-3, 0.1, 1.0)) * chance.random()
    match chance.choice(("crash", "crash", "pause", "hold", "again", "late", "none")):
        case "crash":
            faults.append(kinds.Crash(at_seconds=max(0.0, near), process=name))
        case "pause":
            faults.append(kinds.Pause(at_seconds=max(0.0, near), process=name, for_seconds=10 ** chance.uniform(-2, 0.7)))
        case "hold":
            lasts = PERMANENT_SECONDS if is_watched(graph) else 10.0  # nothing but the detector notices one that is in use by then
            faults.append(kinds.Pause(at_seconds=max(0.0, near), process=name, for_seconds=lasts))
        case "again":
            faults.append(kinds.Crash(at_seconds=at + chance.uniform(0.0, 3.0), process=victim))
        case "late":  # it becomes ready while there is no fork server
            faults.append(kinds.SlowLink(between=(GATEWAY, name), for_seconds=10.0, factor=300.0))
            faults += [kinds.Crash(at_seconds=0.05 * number, process=FORK_SERVER) for number in range(1, 4)]
            faults[0] = kinds.Crash(at_seconds=chance.uniform(0.0, 1.0), process=victim)
    return faults


def draw_host_faults(chance: random.Random, graph: Graph) -> list[AnyFault]:
    """The end of a host, once or twice; its partition from the launcher, or from all processes of other hosts, in one direction or both; a
    stop of its host server."""
    hosts = sorted(set(graph.process_hosts.values()) - {FIRST_HOST})
    if not hosts:
        return []
    at, host, lasts = _draw_time(chance, 0.0), chance.choice(hosts), 10 ** chance.uniform(-1, 1)
    direction: Literal["both", "there", "back"] = chance.choice(("both", "there", "back"))
    match chance.choice(("crash", "crash", "twice", "cut", "cut", "partition", "partition", "stop", "none")):
        case "crash":
            return [kinds.Crash(at_seconds=at, process=host)]
        case "twice":
            return [kinds.Crash(at_seconds=at + each, process=host) for each in (0.0, chance.uniform(0.0, 5.0))]
        case "cut":
            return [kinds.Cut(at_seconds=at, between=(GATEWAY, host), for_seconds=lasts, direction=direction)]
        case "partition":
            ends = {tuple(sorted(graph.ends_of(edge), key=lambda end: graph.host_of(end) == host)) for edge in graph.edges.values()}
            links = sorted((there, back) for there, back in ends if graph.host_of(there) != host == graph.host_of(back))
            return [kinds.Cut(at_seconds=at, between=link, for_seconds=lasts, direction=direction) for link in [(GATEWAY, host), *links]]
        case "stop":
            return [kinds.Pause(at_seconds=at, process=host, for_seconds=lasts)]
    return []


def draw_broken_link(chance: random.Random, graph: Graph) -> list[AnyFault]:
    """In some cases nothing passes between a group and a prefill worker any more, in one direction or in both, and neither dies. Probes
    of the link notice it."""
    processes = {node.name: node.process for node in graph.nodes.values()}
    links = sorted({(processes[edge.source], processes[edge.target]) for edge in graph.edges.values() if edge.source_port == "chunk"})
    if not links or graph.processes != "many" or graph.emulation is not None or chance.random() >= BROKEN_SHARE:
        return []
    direction: Literal["both", "there", "back"] = chance.choice(("both", "there", "back"))
    return [kinds.Cut(at_seconds=_draw_time(chance), between=chance.choice(links), for_seconds=PERMANENT_SECONDS, direction=direction)]


def draw_change_faults(chance: random.Random, graphs: Sequence[Graph], at_seconds: float) -> list[AnyFault]:
    """Crashes of processes that join or leave when the graph changes, and of others, from shortly before it to after the join of some."""
    names = [{*graph.process_names()} for graph in graphs]
    changing = sorted(name for name in set[str]().union(*names) if any(name not in each for each in names))
    mortal = sorted(frozenset[str]().union(*map(mortal_workers, graphs)))
    faults: list[AnyFault] = []
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
        victim, at = (
            chance.choice(chance.choice((changing, changing, mortal))),
            at_seconds * chance.uniform(0.8, 1.2) + _draw_time(chance, 0.3),
        )
        match chance.choice(("crash", "crash", "pause", "slow_link", "slow")):
            case "crash":
                faults.append(kinds.Crash(at_seconds=at, process=victim))
            case "pause":
                faults.append(kinds.Pause(at_seconds=at, process=victim, for_seconds=10 ** chance.uniform(-2, 0.7)))
            case "slow_link":
                faults.append(kinds.SlowLink(at_seconds=at * chance.random(), between=(GATEWAY, victim), for_seconds=5.0, factor=300.0))
            case "slow":
                faults.append(kinds.Slow(at_seconds=at * chance.random(), process=victim, for_seconds=1.0, factor=50.0))
    return faults


def draw_front_end_faults(chance: random.Random, graph: Graph, names: Sequence[str]) -> list[AnyFault]:
    """Crashes, standstills and slow links of front ends, most of them while clients are served."""
    at, name, lasts = _draw_time(chance), chance.choice(names), 10 ** chance.uniform(-3, 0.7)
    if is_watched(graph) and chance.random() < 0.2:
        lasts = PERMANENT_SECONDS
    match chance.choice(("crash", "crash", "all", "again", "stop", "stop", "slow", "late", "reset", "none")):
        case "crash":
            return [kinds.Crash(at_seconds=at, process=name)]
        case "all":
            return [kinds.Crash(at_seconds=at * chance.uniform(0.5, 1.0), process=each) for each in names]
        case "again":
            return [kinds.Crash(at_seconds=at * 3.0**number, process=name) for number in range(chance.randint(2, 4))]
        case "stop":
            return [chance.choice((kinds.Pause, kinds.Stall))(at_seconds=at, process=name, for_seconds=lasts)]
        case "slow":
            return [kinds.TinyQueues(process=name), kinds.Pause(at_seconds=at, process=name, for_seconds=min(lasts, 1.0))]
        case "late":  # its last messages come after notices of its death
            slow = kinds.SlowLink(at_seconds=at * chance.random(), between=(GATEWAY, name), for_seconds=min(lasts, 1.0), factor=100.0)
            return [slow, kinds.Crash(at_seconds=at, process=name)]
        case "reset":
            return [kinds.Reset(at_seconds=at, between=(GATEWAY, name))]
    return []


def _draw_fork_server(chance: random.Random, graph: Graph, mortal: list[str]) -> list[AnyFault]:
    """Pauses the fork server, sometimes permanently, or lets it die, sometimes several times, while a process dies. Where a monitor samples
    it, it often stops for ever and no other process dies."""
    if graph.processes == "one":
        return []
    at = _draw_time(chance)
    if is_watched(graph) and chance.random() < 0.6:
        return [kinds.Pause(at_seconds=at, process=FORK_SERVER, for_seconds=PERMANENT_SECONDS)]
    victims = [chance.choice(mortal)] if mortal else []
    faults: list[AnyFault] = [kinds.Crash(at_seconds=at + chance.uniform(-0.5, 0.5) * at, process=name) for name in victims]
    if chance.random() < 0.5:
        times = (at * 2.0**number for number in range(chance.choice((1, 1, 2, 5))))
        return [*(kinds.Crash(at_seconds=each, process=FORK_SERVER) for each in times), *faults]
    lasts = chance.choice((0.1, 1.0, 30.0, PERMANENT_SECONDS))
    return [kinds.Pause(at_seconds=at, process=FORK_SERVER, for_seconds=lasts), *faults]


def _draw_permanent(chance: random.Random, graph: Graph) -> list[AnyFault]:
    """A pause, stall or hang of a process, permanent or until after it was marked dead; only the detector notices it."""
    servers = set(expert_servers(graph))
    names = sorted(mortal_workers(graph) | (set(graph.process_names()) - servers))  # a run waits for a server that must not die
    if graph.processes != "many" or not is_watched(graph) or not names:
        return []
    kind = chance.choice((kinds.Pause, kinds.Stall, kinds.Hang))
    name = chance.choice([*names, MONITOR]) if kind is not kinds.Hang else chance.choice(names)
    lasts = 4.0 if chance.random() < 0.4 else PERMANENT_SECONDS
    return [kind(at_seconds=_draw_time(chance), process=name, for_seconds=lasts)]


def _draw_lost_link(chance: random.Random, between: list[tuple[str, str]]) -> list[AnyFault]:
    """Resets of one link until no transport is left to carry on. Sometimes one of its ends dies soon after."""
    if not between:
        return []
    at, link, apart = _draw_time(chance), chance.choice(between), chance.choice((10e-3, 0.1))
    faults: list[AnyFault] = [kinds.Reset(at_seconds=at + apart * number, between=link) for number in range(4)]
    if chance.random() < 0.3:
        faults.append(kinds.Crash(at_seconds=at + chance.choice((1e-3, 30e-3)) * chance.random(), process=chance.choice(link)))
    return faults


def _draw_slow_servers(chance: random.Random, servers: list[str], mortal: list[str]) -> list[AnyFault]:
    """Slow faults on most servers from early on, each with its own factor, so that parts are late and hedged; sometimes a server dies
    meanwhile, so that a slow one is the only replica left."""
    lasts = 10 ** chance.uniform(-1, 0.4)
    slow = [name for name in servers if chance.random() < 0.7]
    faults: list[AnyFault] = [
        kinds.Slow(at_seconds=_draw_time(chance, -1.5), process=name, for_seconds=lasts, factor=chance.choice((3.0, 10.0, 30.0, 200.0)))
        for name in slow
    ]
    if (victims := sorted({*servers} & {*mortal})) and chance.random() < 0.4:
        faults.append(kinds.Crash(at_seconds=_draw_time(chance), process=chance.choice(victims)))
    return faults


# Parameters of a kind beyond its target, time and duration; one of the values is drawn.
_PARAMETERS: dict[str, dict[str, tuple[object, ...]]] = {
    "slow": {"factor": (2.0, 5.0, 50.0, 500.0)},
    "slow_link": {"factor": (3.0, 30.0, 300.0)},
    "cut": {"direction": ("both", "there", "back")},
    "duplicate": {"one_in": (1, 2, 5)},
    "skew": {"rate": (0.5, 0.95, 1.05, 2.0)},
}


def _draw_fault(chance: random.Random, kind: str, names: list[str], links: list[tuple[str, str]]) -> list[AnyFault]:
    """One fault of a kind; several rollbacks or cuts for `roll_back` and `swizzle`."""
    name, between = chance.choice(names), chance.choice(links)
    at, lasts = _draw_time(chance, -0.8), 10 ** chance.uniform(-3, 0.7)
    if kind == "roll_back":
        group = chance.choice([each for each in names if each.startswith("attention")] or names)
        return [kinds.RollBack(at_seconds=at * place, process=group) for place in range(1, chance.randint(2, 5))]
    if kind == "swizzle":  # links of one process are cut one after another and heal in another order
        own = [link for link in links if name in link]
        return [
            kinds.Cut(at_seconds=at + 1e-3 * place, between=link, for_seconds=chance.uniform(5e-3, lasts + 5e-3))
            for place, link in enumerate(chance.sample(own, len(own)))
        ]
    if kind in ("pause", "stall"):
        name = chance.choice([name, name, GATEWAY])
    values = {"at_seconds": at, "process": name, "between": between, "for_seconds": lasts}
    values |= {key: chance.choice(choices) for key, choices in _PARAMETERS.get(kind, {}).items()}
    (fault_class,) = (each for each in AnyFault.__args__ if each.__struct_config__.tag == kind)
    fault: AnyFault = fault_class(**{key: values[key] for key in fault_class.__struct_fields__ if key in values})
    return [fault]
