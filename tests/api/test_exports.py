"""What `import flowrt` shows: every name, for dir and help too, and every error that a user can get."""

from __future__ import annotations

import ast
import copy
import pickle
import pydoc
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from repository.source_tree import sources

import flowrt
from flowrt.errors import place_of

COMMANDS = ("flowrt.cli", "flowrt.bench", "flowrt.system.output_file")  # their errors end a command
ERRORS = [
    flowrt.FlowrtError("text"),
    flowrt.UserError("text"),
    flowrt.ArgumentError("n is 0, it must be at least 1"),
    flowrt.TokenizerError("no tokenizer.json"),
    flowrt.GraphError("graph.yaml:3", "limits.max_tokens", "is 0; write at least 1"),
    flowrt.NotRunningError("the graph is not open"),
    flowrt.OperatorError("a failed at step 3, layer 0: ValueError", "a"),
    flowrt.RequestError("the prompt is empty, it needs at least one token"),
    flowrt.WorkerDiedError("experts.0", "was killed by SIGKILL", ("one line", "another")),
]


def test_dir_and_help_show_every_name_before_any_is_used() -> None:
    script = "import flowrt, pydoc; print(*dir(flowrt)); print(pydoc.render_doc(flowrt, renderer=pydoc.plaintext))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names, text = done.stdout.split("\n", 1)
    assert set(flowrt.__all__) == {name for name in names.split() if not name.startswith("__")}
    assert [name for name in flowrt.__all__ if name not in text] == []


@pytest.mark.parametrize("name", flowrt.__all__)
def test_each_name_is_there_and_has_a_docstring(name: str) -> None:
    assert len(pydoc.getdoc(getattr(flowrt, name))) > 40


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'flowrt' has no attribute 'complete'"):
        flowrt.complete  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_that_leaves_flowrt_is_exported() -> None:
    classes = {(source.module, node.name) for source in sources() for node in source.nodes() if isinstance(node, ast.ClassDef)}
    named = [(module, name) for module, name in classes if name.endswith("Error") and not module.startswith("flowrt.transports")]
    raised = [getattr(import_module(module), name) for module, name in named if not module.startswith(COMMANDS)]
    users = {error for error in raised if issubclass(error, flowrt.FlowrtError)}
    assert {type(error) for error in ERRORS} == users == {getattr(flowrt, name) for name in flowrt.__all__ if name.endswith("Error")}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_and_copying(error: Exception) -> None:
    assert isinstance(error, flowrt.FlowrtError)
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_a_wrong_argument_is_a_type_error_and_a_value_error() -> None:
    assert issubclass(flowrt.ArgumentError, flowrt.UserError)
    assert issubclass(flowrt.ArgumentError, TypeError)
    assert issubclass(flowrt.ArgumentError, ValueError)


def test_the_place_of_an_error_is_a_line_of_the_operator() -> None:
    """Not of a decorator of torch around it. An error that flowrt raises has none."""

    @torch.no_grad()
    def operator() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:
        operator()
    line = operator.__wrapped__.__code__.co_firstlineno + 2
    assert place_of(caught.value.with_traceback(caught.tb.tb_next)) == f"test_exports.py:{line}"
    with pytest.raises(flowrt.UserError) as raised:
        flowrt.start("/nope")
    assert place_of(raised.value.with_traceback(raised.tb.tb_next)) == ""
