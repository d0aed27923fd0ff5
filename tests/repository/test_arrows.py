"""Which room may import which: the table of the design, held against the imports of every file.

`cli, chaos, bench, api -> simulation -> serving, planning -> cluster -> workers -> engine, exchange -> dataflow -> actors -> transports`: a
room may import any room to its right, never one beside it or to its left. Leaves, graph and reliability stand below all.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest
from repository.source_tree import PACKAGES, ROOT, Import, Source, module_of, modules, room_of, sources

LEAVES = ("flowrt.config", "flowrt.errors", "flowrt.seams", "flowrt.observe", "flowrt.timer", "flowrt.emulation")
BELOW_ALL = (*LEAVES, "flowrt.graph", "flowrt.reliability")
# What users get from `import flowrt`; loaded on first use.
FRONT_MAY = ("flowrt.api", "flowrt.cluster.gateway", *LEAVES)
# From the top down. Rooms of one row do not import each other.
ROWS: tuple[tuple[str, ...], ...] = (
    ("flowrt.cli",),
    ("flowrt.doctor",),
    ("flowrt.chaos",),
    ("flowrt.bench",),
    ("flowrt.api",),
    ("flowrt.simulation",),
    ("flowrt.serving", "flowrt.planning"),
    ("flowrt.cluster",),
    ("flowrt.workers",),
    ("flowrt.engine", "flowrt.exchange"),
    ("flowrt.dataflow",),
    ("flowrt.actors",),
    ("transports",),
)
# Where the rows say more than is meant.
FORBIDDEN = {
    ("flowrt.cluster", "flowrt.workers"): "workers are started by module name, so that the launching process stays free of torch",
    ("flowrt.serving", "flowrt.workers"): "HTTP talks to the gateway",
    ("flowrt.planning", "flowrt.workers"): "planning is pure",
    ("flowrt.planning", "flowrt.cluster"): "planning is pure",
    ("flowrt.planning", "flowrt.actors"): "planning is pure",
    ("flowrt.engine", "flowrt.actors"): "the engine is pure decisions: it knows requests and tokens, no mailbox",
    ("flowrt.engine", "transports"): "the engine is pure decisions",
}
EXCEPT = {("flowrt.engine", "flowrt.actors.control")}
# The bench times operators one by one, and what each costs beside its limit.
OPERATORS_FOR = ("flowrt.workers", "flowrt.exchange", "flowrt.dataflow", "flowrt.bench")
# Facts of a model without torch: what a room that runs in the launching process may read.
PLAIN_OPERATORS = ("operators.model_config", "operators.families")
PLAIN_OPERATORS_FOR = (
    "flowrt.planning",
    "flowrt.cluster",
    "flowrt.api",
    "flowrt.cli",
    "flowrt.cli_graph",
    "flowrt.chaos",
    "flowrt.doctor",
    "flowrt.simulation",
)
MESSAGE_TYPES = ("transports.message", "transports.errors")
SEAMS_MAY = ("transports.contract", "transports.registry")
# The bench measures torch and the wire libraries themselves; it loads them when it does, not before.
LATER_FOR = ("flowrt.bench",)
# Of the bench: what workers import by name, and what a benchmark of operators loads when it begins.
TORCH_FILES = ("flowrt/bench/operators.py", "flowrt/bench/operator_cases.py", "flowrt/bench/random_weights.py")
TORCH_FOR = ("operators", "flowrt.dataflow", "flowrt.exchange", "flowrt.workers")
CHANNELS_FOR = ("flowrt.actors", "flowrt.bench", "flowrt.simulation", "flowrt.cluster", "flowrt.seams", "flowrt.doctor", "transports")
SCHEMES = {"inproc", "shm", "zmq", "ucx"}
SCHEMES_FOR = ("transports/", "flowrt/graph/", "flowrt/cluster/choose.py")
WIRE_LIBRARIES = {"zmq": "transports/zeromq", "ucxx": "transports/ucx_link.py"}

ROW_OF = {room: number for number, row in enumerate(ROWS) for room in row}


def refusal(source: Source, target: str) -> str | None:
    """Why `source` may not import `target`, a module of ours; None when it may."""
    room, other = source.room, room_of(target)
    if room == other:
        return None
    if room == "flowrt":
        return None if target in FRONT_MAY else "flowrt/__init__.py gives out the api and its types only"
    if other == "flowrt":
        return None if room == "flowrt.cli" else "import the module itself, not the package's front"
    if other == "operators":
        if room in OPERATORS_FOR or (room in PLAIN_OPERATORS_FOR and target.startswith(PLAIN_OPERATORS)):
            return None
        return "operators are for workers, exchange, dataflow and the bench; others may read " + ", ".join(PLAIN_OPERATORS)
    if room == "operators":
        return "operators import nothing of ours"
    if room == "transports":
        return "transports import nothing of ours"
    if other == "transports" and room in BELOW_ALL:
        return (
            None if target in MESSAGE_TYPES or (room == "flowrt.seams" and target in SEAMS_MAY) else "only the types of messages and errors"
        )
    if other in BELOW_ALL:
        if room in LEAVES and other not in LEAVES:
            return "a leaf imports leaves only"
        return None
    if room in BELOW_ALL:
        return "stands below all rooms of the chain"
    if room not in ROW_OF or other not in ROW_OF:
        return "not in the table of rooms: add it to tests/repository/test_arrows.py and to the design"
    if (room, other) in FORBIDDEN and (room, target) not in EXCEPT:
        return FORBIDDEN[room, other]
    return None if ROW_OF[other] > ROW_OF[room] else "an arrow to the left"


def at(path: str, line: int) -> str:
    return f"{path}:{line}"


def is_later(source: Source, entry: Import) -> bool:
    return source.room in LATER_FOR and not entry.at_load


def ours(source: Source) -> list[tuple[str, int, bool]]:
    """(module of ours, line, at load) for each import of one."""
    found = []
    for entry in source.imports:
        if entry.target.split(".")[0] in PACKAGES:
            module = module_of(entry.target)
            assert module is not None, f"{at(source.path, entry.line)}: imports {entry.target}, which is not in the tree"
            found.append((module, entry.line, entry.at_load))
    return found


def test_every_import_follows_the_arrows() -> None:
    wrong = [
        f"{at(source.path, line)}: {source.room} may not import {module}: {reason}"
        for source in sources()
        for module, line, _ in ours(source)
        if (reason := refusal(source, module)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_every_room_is_in_the_table() -> None:
    known = {"flowrt", "operators", *ROW_OF, *BELOW_ALL}
    unknown = sorted({source.room for source in sources()} - known)
    assert not unknown, f"rooms that no row names: {unknown}"


def test_no_two_rooms_import_each_other() -> None:
    pairs = {(source.room, room_of(module)) for source in sources() for module, _, _ in ours(source)}
    mutual = sorted((a, b) for a, b in pairs if a < b and (b, a) in pairs)
    assert not mutual


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {source.module: {module for module, _, at_load in ours(source) if at_load} - {source.module} for source in sources()}
    for module, needs in graph.items():
        # Importing a name from a package's front is not a circle for the package's own files.
        graph[module] = {need for need in needs if not module.startswith(f"{need}.")}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(error.args[1])}")


def test_torch_is_imported_only_where_tensors_are_computed() -> None:
    wrong = [
        f"{at(source.path, entry.line)}: torch in {source.room}"
        for source in sources()
        for entry in source.imports
        if entry.target.split(".")[0] == "torch"
        and not source.room.startswith(TORCH_FOR)
        and source.path not in TORCH_FILES
        and not is_later(source, entry)
    ]
    plain = [source for source in sources() if source.module.startswith(PLAIN_OPERATORS)]
    wrong += [f"{at(s.path, e.line)}: torch in a torch-free file" for s in plain for e in s.imports if e.target.split(".")[0] == "torch"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "room", ["flowrt", "flowrt.api", "flowrt.cli", "flowrt.cluster", "flowrt.engine", "flowrt.serving", "flowrt.simulation"]
)
def test_loading_a_room_of_the_launching_process_reaches_no_torch(room: str) -> None:
    by_module = {source.module: source for source in sources()}
    todo = [(module, (module,)) for module in sorted(modules()) if room_of(module) == room]
    seen = set()
    while todo:
        module, way = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for entry in by_module[module].imports:
            if entry.at_load:
                assert entry.target.split(".")[0] != "torch", f"torch by way of {' -> '.join(way)}"
                if entry.target.split(".")[0] in PACKAGES and (needed := module_of(entry.target)) is not None:
                    todo.append((needed, (*way, needed)))


def test_packages_of_operators_import_nothing_when_loaded() -> None:
    front = next(source for source in sources() if source.path == "operators/__init__.py")
    assert not front.imports


def test_wire_libraries_stay_in_their_own_files() -> None:
    wrong = [
        f"{at(source.path, entry.line)}: {entry.target}"
        for source in sources()
        for entry in source.imports
        if (library := entry.target.split(".")[0]) in WIRE_LIBRARIES
        and not source.path.startswith(WIRE_LIBRARIES[library])
        and not is_later(source, entry)
    ]
    assert not wrong, "\n".join(wrong)


def constants_compared(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
        parts = [node.value]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith"):
        parts = list(node.args)
    else:
        return set()
    return {str(leaf.value).split(":")[0] for part in parts for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)}


def test_no_transport_is_known_by_name_above_the_transports() -> None:
    wrong = [
        f"{at(source.path, getattr(node, 'lineno', 0))}: ask for a capability of the contract instead"
        for source in sources()
        if not source.path.startswith(SCHEMES_FOR)
        for node in source.nodes()
        if constants_compared(node) & SCHEMES
    ]
    assert not wrong, "\n".join(wrong)


def test_channels_are_opened_only_by_the_rooms_that_may() -> None:
    wrong = []
    for source in sources():
        if source.room in CHANNELS_FOR:
            continue
        wrong += [at(source.path, entry.line) for entry in source.imports if entry.target.startswith("transports.registry")]
        attributes = [node for node in source.nodes() if isinstance(node, ast.Attribute) and node.attr in ("listen", "connect")]
        wrong += [at(source.path, node.lineno) for node in attributes if "transport" in ast.unparse(node.value).lower()]
    assert not wrong, "channels opened at " + ", ".join(wrong)


def test_the_table_finds_what_it_should() -> None:
    """The checker itself: planted arrows of each kind are refused, lawful ones pass."""
    by_module = {source.module: source for source in sources()}
    planted = {
        ("flowrt.graph.model", "flowrt.actors.control"): False,
        ("flowrt.graph.model", "transports.message"): True,
        ("flowrt.graph.model", "transports.contract"): False,
        ("flowrt.seams", "transports.registry"): True,
        ("flowrt.actors.control", "flowrt.dataflow"): False,
        ("flowrt.dataflow", "flowrt.actors.control"): True,
        ("transports.contract", "flowrt.seams"): False,
        ("flowrt.engine", "flowrt.exchange"): False,
        ("flowrt.engine", "flowrt.actors.control"): True,
        ("flowrt.engine", "flowrt.actors"): False,
        ("flowrt.cluster", "flowrt.workers"): False,
        ("flowrt.simulation", "flowrt.workers"): True,
        ("flowrt.planning", "operators.model_config"): True,
        ("flowrt.planning", "operators.weights"): False,
        ("flowrt.workers", "operators.weights"): True,
        ("operators", "transports.message"): False,
    }
    assert (ROOT / "flowrt").is_dir()
    for (source, target), allowed in planted.items():
        assert (refusal(by_module[source], target) is None) == allowed, (source, target)
