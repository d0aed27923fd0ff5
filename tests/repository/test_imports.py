"""Which package may import which: the table of the design, held against every import, also those inside functions.

`cli -> chaos -> bench -> planner -> api -> simulation -> serving -> launcher -> hosts -> gateway, processes -> workers -> kinds -> exchange
-> engine -> dataflow -> actors -> transports`: a package may import any package to its right, never one beside it or to its left. The
leaves, graph, reliability and trace stand below all.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

import pytest
from repository.source_tree import ROOT, Import, Source, is_ours, module_of, modules, package_of, sources

OPERATORS, TRANSPORTS = "flowrt.operators", "flowrt.transports"
LEAVES = (
    "flowrt.costs",
    "flowrt.document",
    "flowrt.emulation",
    "flowrt.errors",
    "flowrt.histogram",
    "flowrt.observe",
    "flowrt.sampling_params",
    "flowrt.seams",
    "flowrt.structured_outputs",
    "flowrt.system",
    "flowrt.text_files",
    "flowrt.timer",
)
BELOW_ALL = (*LEAVES, "flowrt.graph", "flowrt.reliability", "flowrt.trace")
# What users get from `import flowrt`; loaded on first use.
FRONT_MAY = ("flowrt.api", "flowrt.actors.outputs", *LEAVES)
# From the top down. Packages of one row do not import each other.
ROWS: tuple[tuple[str, ...], ...] = (
    ("flowrt.cli",),
    ("flowrt.chaos",),
    ("flowrt.bench",),
    ("flowrt.planner",),
    ("flowrt.api",),
    ("flowrt.simulation",),
    ("flowrt.serving",),
    ("flowrt.launcher",),
    ("flowrt.hosts",),
    ("flowrt.gateway", "flowrt.processes"),
    ("flowrt.workers",),
    ("flowrt.kinds",),
    ("flowrt.exchange",),
    ("flowrt.engine",),
    ("flowrt.dataflow",),
    ("flowrt.actors",),
    (TRANSPORTS,),
)
_BY_NAME = "the fork server loads workers by name, so that the launching process stays free of torch"
# Where the rows say more than is meant.
FORBIDDEN = {
    ("flowrt.launcher", "flowrt.workers"): _BY_NAME,
    ("flowrt.gateway", "flowrt.workers"): _BY_NAME,
    ("flowrt.processes", "flowrt.workers"): _BY_NAME,
    ("flowrt.hosts", "flowrt.workers"): _BY_NAME,
    ("flowrt.serving", "flowrt.workers"): "HTTP talks to the gateway",
    ("flowrt.exchange", "flowrt.engine"): "an exchange of messages knows no engine",
    ("flowrt.engine", "flowrt.actors"): "the engine is pure decisions: it knows requests and tokens, no mailbox",
    ("flowrt.engine", TRANSPORTS): "the engine is pure decisions",
}
EXCEPT = {
    ("flowrt.engine", "flowrt.actors.control"),
    ("flowrt.engine", "flowrt.actors.outputs"),
    ("flowrt.exchange", "flowrt.engine.offered_prompt"),
}
# The bench times operators one by one, and what each costs beside its limit.
OPERATORS_FOR = ("flowrt.workers", "flowrt.kinds", "flowrt.exchange", "flowrt.dataflow", "flowrt.bench")
# Facts of a model without torch: what a package that runs in the launching process may read.
PLAIN_OPERATORS = tuple(f"{OPERATORS}.{name}" for name in ("model_config", "checkpoint_files", "families", "replica_choice"))
PLAIN_OPERATORS_FOR = (
    "flowrt.costs",
    "flowrt.launcher",
    "flowrt.hosts",
    "flowrt.gateway",
    "flowrt.api",
    "flowrt.cli",
    "flowrt.chaos",
    "flowrt.planner",
    "flowrt.simulation",
)
MESSAGE_TYPES = (f"{TRANSPORTS}.wire.message", f"{TRANSPORTS}.errors")
SEAMS_MAY = (f"{TRANSPORTS}.contract", f"{TRANSPORTS}.registry")
# The bench measures torch and the wire libraries themselves; it loads them when it does, not before. Graph files are checked by kinds of
# operators, whose functions load torch when a worker builds a node.
LATER_FOR = ("flowrt.bench", "flowrt.kinds")
# Of the bench: what workers and peers import by name, and what a benchmark of operators loads when it begins.
TORCH_FILES = (
    "flowrt/bench/cases/nodes.py",
    "flowrt/bench/cases/operator_cases.py",
    "flowrt/bench/cases/random_weights.py",
    "flowrt/bench/peers/gloo_rank.py",
)
TORCH_FOR = (OPERATORS, "flowrt.dataflow", "flowrt.exchange", "flowrt.workers")
CHANNELS_FOR = (
    "flowrt.actors",
    "flowrt.bench",
    "flowrt.simulation",
    "flowrt.launcher",
    "flowrt.hosts",
    "flowrt.processes",
    "flowrt.seams",
    "flowrt.cli.doctor",
    TRANSPORTS,
)
SCHEMES = {"inproc", "shm", "zmq", "ucx"}
SCHEMES_FOR = ("transports/", "flowrt/graph/", "flowrt/launcher/transport_choice.py")
WIRE_LIBRARIES = {"zmq": "transports/zeromq/", "ucxx": "transports/ucx/endpoint.py"}

PACKAGES = (*(package for row in ROWS for package in row), *BELOW_ALL, OPERATORS)
ROW_OF = {package: number for number, row in enumerate(ROWS) for package in row}


def refusal(source: Source, target: str) -> str | None:
    """Why `source` may not import `target`, a module of ours; None when it may."""
    package, other = source.package, package_of(target)
    if package == other:
        return None
    if package == "flowrt":
        return None if target in FRONT_MAY else "flowrt/__init__.py exports the api and its types only"
    if other == "flowrt":
        return None if package == "flowrt.cli" else "import the module itself, not the package's front"
    if package == OPERATORS:
        return "operators import nothing else of flowrt"
    if package == TRANSPORTS:
        return "transports import nothing else of flowrt"
    if other == OPERATORS:
        if package in OPERATORS_FOR or (package in PLAIN_OPERATORS_FOR and target.startswith(PLAIN_OPERATORS)):
            return None
        return "operators are for workers, exchange, dataflow and the bench; others may read " + ", ".join(PLAIN_OPERATORS)
    if other == TRANSPORTS and package in BELOW_ALL:
        allowed = target in MESSAGE_TYPES or (source.module in ("flowrt.seams", "flowrt.system.process_backend") and target in SEAMS_MAY)
        return None if allowed else "only the types of messages and errors"
    if other in BELOW_ALL:
        return "a leaf imports leaves only" if package in LEAVES and other not in LEAVES else None
    if package in BELOW_ALL:
        return "stands below all packages of the chain"
    if package not in ROW_OF or other not in ROW_OF:
        return "not in the table of packages: add it to tests/repository/test_imports.py and to the design"
    if (package, other) in FORBIDDEN and (package, target) not in EXCEPT:
        return FORBIDDEN[package, other]
    return None if ROW_OF[other] > ROW_OF[package] else "imports a package above or beside it"


def at(path: str, line: int) -> str:
    return f"{path}:{line}"


def is_later(source: Source, entry: Import) -> bool:
    return source.package in LATER_FOR and not entry.at_load


def ours(source: Source) -> list[tuple[str, int, bool]]:
    """(module of ours, line, at load) for each import of one."""
    found = []
    for entry in source.imports:
        if is_ours(entry.target):
            module = module_of(entry.target)
            assert module is not None, f"{at(source.path, entry.line)}: imports {entry.target}, which is not in the tree"
            found.append((module, entry.line, entry.at_load))
    return found


def test_every_import_follows_the_table() -> None:
    wrong = [
        f"{at(source.path, line)}: {source.package} may not import {module}: {reason}"
        for source in sources()
        for module, line, _ in ours(source)
        if (reason := refusal(source, module)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_is_in_the_table() -> None:
    unknown = sorted({source.package for source in sources()} - {"flowrt", *PACKAGES})
    assert not unknown, f"packages that no row names: {unknown}"


def test_no_two_packages_import_each_other() -> None:
    pairs = {(source.package, package_of(module)) for source in sources() for module, _, _ in ours(source)}
    mutual = sorted((a, b) for a, b in pairs if a < b and (b, a) in pairs)
    assert not mutual


def test_modules_import_each_other_in_no_cycle() -> None:
    """Imports inside functions count too: a cycle that only works late is still a cycle."""
    graph = {source.module: {module for module, _, _ in ours(source)} - {source.module} for source in sources()}
    for module, needs in graph.items():
        # Importing a name from a package's front is not a cycle for the package's own files.
        graph[module] = {need for need in needs if not module.startswith(f"{need}.")}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_torch_is_imported_only_where_tensors_are_computed() -> None:
    wrong = [
        f"{at(source.path, entry.line)}: torch in {source.package}"
        for source in sources()
        for entry in source.imports
        if entry.target.split(".")[0] == "torch"
        and not source.package.startswith(TORCH_FOR)
        and source.path not in TORCH_FILES
        and not is_later(source, entry)
    ]
    plain = [source for source in sources() if source.module.startswith(PLAIN_OPERATORS)]
    wrong += [f"{at(s.path, e.line)}: torch in a torch-free file" for s in plain for e in s.imports if e.target.split(".")[0] == "torch"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "package",
    [
        "flowrt",
        "flowrt.api",
        "flowrt.cli",
        "flowrt.launcher",
        "flowrt.gateway",
        "flowrt.processes",
        "flowrt.costs",
        "flowrt.engine",
        "flowrt.graph",
        "flowrt.kinds",
        "flowrt.serving",
        "flowrt.simulation",
    ],
)
def test_loading_a_package_of_the_launching_process_imports_no_torch(package: str) -> None:
    by_module = {source.module: source for source in sources()}
    todo = [(module, (module,)) for module in sorted(modules()) if package_of(module) == package]
    seen = set()
    while todo:
        module, way = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for entry in by_module[module].imports:
            if entry.at_load:
                assert entry.target.split(".")[0] != "torch", f"torch by way of {' -> '.join(way)}"
                if is_ours(entry.target) and (needed := module_of(entry.target)) is not None:
                    todo.append((needed, (*way, needed)))


def test_front_of_operators_imports_nothing() -> None:
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
        f"{at(source.path, getattr(node, 'lineno', 0))}: use a capability of the contract instead"
        for source in sources()
        if not source.path.startswith(SCHEMES_FOR)
        for node in source.nodes()
        if constants_compared(node) & SCHEMES
    ]
    assert not wrong, "\n".join(wrong)


def test_channels_are_opened_only_by_the_packages_that_may() -> None:
    wrong = []
    for source in sources():
        if source.module.startswith(CHANNELS_FOR):
            continue
        wrong += [at(source.path, entry.line) for entry in source.imports if entry.target.startswith("flowrt.transports.registry")]
        attributes = [node for node in source.nodes() if isinstance(node, ast.Attribute) and node.attr in ("listen", "connect")]
        wrong += [at(source.path, node.lineno) for node in attributes if "transport" in ast.unparse(node.value).lower()]
    assert not wrong, "channels opened at " + ", ".join(wrong)


def test_the_table_finds_what_it_should() -> None:
    """The checker itself: planted imports of each kind are refused, lawful ones pass."""
    by_module = {source.module: source for source in sources()}
    planted = {
        ("flowrt.graph.model", "flowrt.actors.control"): False,
        ("flowrt.graph.model", "flowrt.transports.wire.message"): True,
        ("flowrt.graph.model", "flowrt.transports.contract"): False,
        ("flowrt.seams", "flowrt.transports.registry"): True,
        ("flowrt.actors.control", "flowrt.dataflow"): False,
        ("flowrt.dataflow", "flowrt.actors.control"): True,
        ("flowrt.transports.contract", "flowrt.seams"): False,
        ("flowrt.engine", "flowrt.exchange"): False,
        ("flowrt.engine", "flowrt.actors.control"): True,
        ("flowrt.engine", "flowrt.actors"): False,
        ("flowrt.launcher", "flowrt.workers"): False,
        ("flowrt.simulation", "flowrt.workers"): True,
        ("flowrt.exchange", "flowrt.engine"): False,
        ("flowrt.exchange", "flowrt.engine.offered_prompt"): True,
        ("flowrt.costs", "flowrt.graph"): False,
        ("flowrt.launcher", "flowrt.operators.model_config"): True,
        ("flowrt.launcher", "flowrt.operators.weights"): False,
        ("flowrt.workers", "flowrt.operators.weights"): True,
        ("flowrt.operators", "flowrt.transports.wire.message"): False,
    }
    assert (ROOT / "flowrt").is_dir()
    for (source, target), allowed in planted.items():
        assert (refusal(by_module[source], target) is None) == allowed, (source, target)
