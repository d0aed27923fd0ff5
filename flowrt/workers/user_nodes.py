"""The functions of a user's graph ("module:function"), imported in the worker and checked against the ports of their nodes.

`build_user_nodes` puts the graph file's folder first on the import path. model_nodes.py builds the built-in operators.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flowrt.dataflow.matching import Firing
from flowrt.dataflow.payload import Payload
from flowrt.dataflow.schemas import Spec, check_tensor, parse_spec
from flowrt.dataflow.subgraph import NodeFunction
from flowrt.errors import OperatorError, UserError
from flowrt.graph.model import Graph, Node

MAX_REMEMBERED = 1024  # combinations of dtypes and shapes of a node
_NOT_PLAIN = (
    (inspect.isclass, "a class"),
    (inspect.iscoroutinefunction, "a coroutine function (async def)"),
    (inspect.isasyncgenfunction, "an asynchronous generator"),
    (inspect.isgeneratorfunction, "a generator"),
)
_LOOKS_LIKE_SPEC = re.compile(r"(?!list|dict|tuple|set|type)[a-z]+[0-9][a-z0-9_]*\[.*\]|bool\[.*\]")


def build_user_nodes(graph: Graph, process: str, device: torch.device) -> dict[str, NodeFunction]:
    """A function for each node of `process` whose operator is "module:function".

    Raises UserError, one line, when the module or function does not exist, when its parameters are not the node's inputs, or when a
    spec in the file and an annotation disagree.
    """
    nodes = [node for node in graph.nodes_of(process) if node.kind.is_users]
    if nodes and graph.folder and graph.folder not in sys.path:
        sys.path.insert(0, graph.folder)
    operators: dict[str, tuple[Callable[..., Any], inspect.Signature | None]] = {}
    for node in nodes:
        if node.operator not in operators:
            function = _import(graph, node)
            operators[node.operator] = function, _signature(function)
    return {node.name: _UserNode(graph, node, *operators[node.operator], device) for node in nodes}


class _UserNode:
    """Calls the function with one tensor per port (a list on a gather port), one tag at a time."""

    def __init__(
        self, graph: Graph, node: Node, function: Callable[..., Any], signature: inspect.Signature | None, device: torch.device
    ) -> None:
        self._node = node
        self._function = function
        self._device = device
        self._on_cpu = device.type == "cpu"
        # dtypes and shapes that were found to fit the specs: of the inputs, and of inputs and outputs together.
        self._fitting: set[Any] = set()
        edges = graph.edges_from(node.name)
        sent = {edge.source_port for edge in edges}
        self._outputs = list(node.outputs)
        # The edges that wait for a node's only output; a gather may be given nothing.
        self._needing = [
            edge
            for edge in edges
            if len(node.outputs) == 1 and (port := graph.nodes[edge.target].inputs.get(edge.target_port)) and port.takes == "one"
        ]
        annotations = {} if signature is None else _annotations(node, signature)
        self._in = _specs(node, "input", node.inputs, annotations)
        returned = annotations.get("return")
        if isinstance(returned, str):
            returned = {self._outputs[0]: returned} if len(self._outputs) == 1 else None
        self._out = _specs(node, "output", node.outputs, returned if isinstance(returned, Mapping) else {})
        if isinstance(returned, Mapping) and not sent <= set(returned):
            missing = ", ".join(sorted(sent - set(returned)))
            raise UserError(f"node {node.name}: {node.operator} gives {', '.join(returned)}, but an edge takes {missing}")

    def __call__(self, firings: Sequence[Firing]) -> list[dict[str, Payload]]:
        return [self._fire(firings[0])] if len(firings) == 1 else [self._fire(firing) for firing in firings]

    def _fire(self, firing: Firing) -> dict[str, Payload]:
        arguments: dict[str, Any] = {}
        given: list[Any] = []  # dtypes and shapes
        for port, value in firing.inputs.items():
            if type(value) is Payload:
                tensors = value.tensors
                tensor = tensors[0] if len(tensors) == 1 and tensors[0].is_cpu and self._on_cpu else self._one(port, value)
                arguments[port] = tensor
                given += port, tensor.dtype, tensor.shape
            else:
                arguments[port] = [self._one(port, payload) for payload in value]  # nothing is declared of several
        fits: Any = tuple(given)
        sizes: dict[str, int] | None = None
        if fits not in self._fitting:
            self._check("input", self._in, arguments, sizes := {})
            self._remember(fits)
        result = self._function(**arguments)
        outputs = self._outputs
        if type(result) is torch.Tensor and len(outputs) == 1:
            fits = (fits, result.dtype, result.shape)
            if fits in self._fitting:
                return {outputs[0]: Payload((result,))}
        elif type(result) is dict:
            fits = (fits, *[(port, tensor.dtype, tensor.shape) for port, tensor in result.items() if type(tensor) is torch.Tensor])
            if fits in self._fitting and len(fits) == 1 + len(result):
                return {port: Payload((tensor,)) for port, tensor in result.items()}
        else:
            fits = None
        if result is None and any(firing.tag.layer in edge.layers for edge in self._needing):
            raise OperatorError(
                f"{self._node.name} gave nothing for its output {self._outputs[0]}; return a dict without the port to send nothing"
            )
        named = self._named(result)
        if sizes is None:
            self._check("input", self._in, arguments, sizes := {})  # for the sizes that the outputs must have
        self._check("output", self._out, named, sizes)
        if fits is not None:
            self._remember(fits)
        return {port: Payload((tensor,)) for port, tensor in named.items()}

    def _remember(self, fits: Any) -> None:
        if len(self._fitting) >= MAX_REMEMBERED:
            self._fitting.clear()
        self._fitting.add(fits)

    def _check(self, way: str, specs: Mapping[str, Spec], tensors: Mapping[str, Any], sizes: dict[str, int]) -> None:
        """Raises OperatorError for a tensor that does not fit. `sizes`: the free dimensions known in this firing; it grows."""
        for port, spec in specs.items():
            tensor = tensors.get(port)
            if isinstance(tensor, torch.Tensor) and (fault := check_tensor(spec, tensor, sizes)):
                raise OperatorError(f"{way} {self._node.name}.{port} is {fault}; {spec} is declared")

    def _one(self, port: str, payload: Payload) -> torch.Tensor:
        if len(payload.tensors) != 1:
            raise OperatorError(f"{self._node.name}.{port} takes one tensor per message, got {len(payload.tensors)}")
        tensor = payload.tensors[0]
        return tensor if tensor.device == self._device else tensor.to(self._device)

    def _named(self, result: Any) -> dict[str, torch.Tensor]:
        """The function's result by output port: a tensor, a tuple in port order, or a dict. None sends nothing."""
        ports = self._outputs
        if result is None:
            return {}
        if isinstance(result, torch.Tensor):
            if len(ports) == 1:
                return {ports[0]: result}
            result = (result,)
        if isinstance(result, Mapping):
            named = dict(result)
        elif isinstance(result, (tuple, list)) and len(result) == len(ports):
            named = dict(zip(ports, result, strict=True))
        else:
            raise OperatorError(f"{self._node.name} gave {_what(result)} for its outputs {', '.join(ports) or '(none)'}")
        for port, tensor in named.items():
            if port not in ports or not isinstance(tensor, torch.Tensor):
                raise OperatorError(f"{self._node.name} gave {_what(tensor)} as {port!r}; its outputs are tensors {', '.join(ports)}")
        return named


def _import(graph: Graph, node: Node) -> Callable[..., Any]:
    key = f"nodes.{node.name}.operator"
    module_name, _, attribute = node.operator.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        found = _loaded_from(module_name)
        raise graph.error(key, f"cannot import {module_name!r} ({error}){found}; put it beside the graph file") from error
    except (Exception, SystemExit) as error:
        text = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        raise graph.error(key, f"{' '.join(text.split())}; correct the module") from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if function is None or not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        missing = f"{module_name!r} has no function {attribute!r}{_loaded_from(module_name)}"
        raise graph.error(key, f"{missing}; it has {', '.join(names) or 'none'}")
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004  (an object's method)
    for test, kind in _NOT_PLAIN:
        if test(function) or test(called):
            raise graph.error(key, f"{node.operator} is {kind}; an operator is a plain function that returns tensors: write def and return")
    return function


def _loaded_from(module_name: str) -> str:
    """ ", loaded from FILE" for the innermost loaded package of `module_name`: a module of the same name may shadow the user's."""
    while module_name and module_name not in sys.modules:
        module_name = module_name.rpartition(".")[0]
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return f", {module_name!r} was loaded from {file}" if file else ""


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _annotations(node: Node, signature: inspect.Signature) -> dict[str, Any]:
    parameters = signature.parameters
    try:
        signature.bind(**node.inputs)
    except TypeError:
        takes, fed = ", ".join(parameters) or "nothing", ", ".join(node.inputs) or "nothing"
        raise UserError(f"node {node.name}: {node.operator} takes {takes}, the graph feeds {fed}") from None
    found: dict[str, Any] = {name: parameter.annotation for name, parameter in parameters.items()}
    found["return"] = signature.return_annotation
    return {name: _unquoted(annotation) for name, annotation in found.items()}


def _unquoted(annotation: Any) -> Any:
    """A spec, or a dict of specs, as written; under `from __future__ import annotations` it comes quoted once more."""
    if isinstance(annotation, str):
        with contextlib.suppress(ValueError, SyntaxError):
            annotation = ast.literal_eval(annotation)
    return annotation if isinstance(annotation, (str, Mapping)) else None


def _specs(node: Node, way: str, ports: Mapping[str, Any], annotated: Mapping[str, Any]) -> dict[str, Spec]:
    """Spec per port, from the file or from the annotation; both must agree."""
    found: dict[str, Spec] = {}
    for name, port in ports.items():
        written = parse_spec(port.tensors[0]) if port.tensors else None
        noted = _noted(node, annotated.get(name))
        if written is not None and noted is not None and written != noted:
            raise UserError(
                f"node {node.name}: {way} {name} is {written} in the graph file and {noted} in {node.operator}; both must agree"
            )
        spec = written or noted
        if spec is not None:
            found[name] = spec
    return found


def _noted(node: Node, text: Any) -> Spec | None:
    """The spec of an annotation, if it is one: "torch.Tensor" and the like are none."""
    if not isinstance(text, str) or not _LOOKS_LIKE_SPEC.fullmatch(text):
        return None
    try:
        return parse_spec(text)
    except ValueError as error:
        raise UserError(f"node {node.name}: {node.operator} is annotated wrongly: {error}") from error


def _what(value: object) -> str:
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__
