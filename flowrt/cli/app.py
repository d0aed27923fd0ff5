"""The command line: `flowrt run`, `flowrt doctor`, `flowrt graph`, `flowrt bench`, `flowrt check`, `flowrt chaos`.

Here: the options, their help texts, and what becomes of errors: one line on standard error, exit code 2. Not here: what the commands do
(run.py, graph.py, bench.py, check.py, chaos.py, doctor); they load when they are called, so that `flowrt --help`
is quick. `main` is the entry point.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, Token

import flowrt
from flowrt.cli.bench import bench_app
from flowrt.cli.chaos import chaos_app
from flowrt.cli.check import check_app
from flowrt.cli.graph import graph_app
from flowrt.errors import UserError

INTERRUPTED, NO_READER = 130, 141
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG)
_MIN_DESCRIPTORS = 32  # to load the libraries and run in one process

app = App(
    name="flowrt",
    help="Run Mixture-of-Experts language models as asynchronous dataflow graphs of processes.",
    version=f"flowrt {flowrt.__version__}",
    version_flags=("--version",),
    help_format="plaintext",  # the others load a Markdown parser
)
app.command(graph_app)
app.command(bench_app)
app.command(check_app)
app.command(chaos_app)


def _number(kind: Any, tokens: Sequence[Token]) -> int | float:
    """As JSON lines have it: the parser's own reading takes 1.5 and 0x10 for whole numbers."""
    from flowrt.cli.prompts import option_number

    try:
        return option_number(kind, tokens[0].value)
    except ValueError as error:
        raise UserError(f"{tokens[0].keyword} {error}") from None


_SAMPLING = Group(
    "Sampling",
    default_parameter=Parameter(converter=_number),
    help="For every prompt; a line of --prompts may say otherwise for its own.",
    sort_key=2,
)
_PROMPTS = Group("Prompts", sort_key=1)
_OTHER = Group("Graph and output", sort_key=3)


@app.command
def run(
    graph: Annotated[Path, Parameter(help="A graph file.")],
    /,
    *,
    prompt: Annotated[
        list[str] | None,
        Parameter(negative=(), group=_PROMPTS, help="A prompt; may be given several times. If it begins with a dash: --prompt=TEXT."),
    ] = None,
    prompts: Annotated[
        str | None,
        Parameter(
            group=_PROMPTS,
            allow_leading_hyphen=True,
            help='JSON lines, "-" for standard input: {"prompt": text} or {"prompt_token_ids": [...]} each, with optional max_tokens, '
            "temperature, top_p, top_k, seed, stop, ignore_eos and the other options of Sampling. With neither option, the graph "
            "file's own prompts are answered.",
        ),
    ] = None,
    chat: Annotated[
        bool, Parameter(negative=(), group=_PROMPTS, help="Put each text through the model's chat template.", show_default=False)
    ] = False,
    max_tokens: Annotated[
        int | None, Parameter(group=_SAMPLING, help="The most new tokens of an answer. [default: limits.max_tokens of the graph]")
    ] = None,
    temperature: Annotated[float | None, Parameter(group=_SAMPLING, help="0 is greedy. [default: 0]")] = None,
    top_p: Annotated[
        float | None, Parameter(group=_SAMPLING, help="Draw from the likeliest tokens that make up this probability. [default: 1, off]")
    ] = None,
    top_k: Annotated[int | None, Parameter(group=_SAMPLING, help="Draw from this many of the likeliest tokens. [default: 0, off]")] = None,
    seed: Annotated[int | None, Parameter(group=_SAMPLING, help="The same seed gives the same answer. [default: a new one each]")] = None,
    min_tokens: Annotated[int | None, Parameter(group=_SAMPLING, help="No answer ends before it has so many tokens. [default: 0]")] = None,
    n: Annotated[
        int | None, Parameter(group=_SAMPLING, help="Answers to each prompt; the first is shown, all are in --json. [default: 1]")
    ] = None,
    presence_penalty: Annotated[
        float | None, Parameter(group=_SAMPLING, help="Taken off the logit of each token that the answer holds. [default: 0]")
    ] = None,
    frequency_penalty: Annotated[
        float | None, Parameter(group=_SAMPLING, help="Taken off once for each time that the answer holds it. [default: 0]")
    ] = None,
    repetition_penalty: Annotated[
        float | None, Parameter(group=_SAMPLING, help="Divides the logits of tokens in prompt and answer. [default: 1, off]")
    ] = None,
    logprobs: Annotated[
        int | None, Parameter(group=_SAMPLING, help="For --json: each token's logprob, and so many of the likeliest, up to 20.")
    ] = None,
    model: Annotated[Path | None, Parameter(group=_OTHER, help="A Hugging Face model directory, instead of the graph's.")] = None,
    overrides: Annotated[
        list[str] | None,
        Parameter(name="--set", negative=(), group=_OTHER, help="path=value, as deploy.experts.servers=2; may be given several times."),
    ] = None,
    json: Annotated[
        str | None,
        Parameter(group=_OTHER, allow_leading_hyphen=True, help='Write answers, times and figures to this file; "-" for standard output.'),
    ] = None,
    chaos: Annotated[
        str | None,
        Parameter(group=_OTHER, help='What is to befall whom when, as "kill:experts.1@2s" or "pause:experts.0@1s+500ms,kill:monitor@2s".'),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Parameter(group=_OTHER, help="What processes write to standard error.")
    ] = "warning",
) -> None:
    """Start a graph, answer all prompts at once, and show how it ran.

    Press Ctrl-C once to let running requests finish, twice to end at once.
    Exit codes: 0 all finished, 1 a request failed, 2 bad input, 3 a worker
    died, 130 interrupted.
    """
    if 0 <= (limit := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _MIN_DESCRIPTORS:
        text = f"too few open files are allowed (RLIMIT_NOFILE is {limit}, at least {_MIN_DESCRIPTORS} are needed)"
        raise UserError(f"{text}; raise it: ulimit -n 1024")
    from flowrt.cli.prompts import checked_options
    from flowrt.cli.run import Options
    from flowrt.cli.run import run as run_graph

    for option, name in (("--prompts", prompts), ("--json", json)):
        if name is not None and name.startswith("-") and name != "-":  # let through for the sake of "-"
            raise UserError(f"{option} is followed by {name}; give it a file, or write ./{name} for one of that name")
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "min_tokens": min_tokens,
        "n": n,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "logprobs": logprobs,
    }
    options = Options(
        graph=graph,
        prompts=tuple(prompt or ()),
        prompt_file=prompts,
        params=checked_options(sampling),
        chat=chat,
        model=model,
        overrides=tuple(overrides or ()),
        json=json,
        chaos=chaos,
        log_level=log_level,
    )
    raise SystemExit(run_graph(options))


@app.command
def doctor(
    *,
    model: Annotated[str | None, Parameter(help="A Hugging Face model directory: are strict numerics possible for it?")] = None,
    dtype: Annotated[str | None, Parameter(help="Of that model. [default: the checkpoint's own]")] = None,
    graph: Annotated[str | None, Parameter(help="A graph file: at what dilation can it be emulated here?")] = None,
) -> None:
    """Say what this machine can do, what is missing, and what would help. Nothing is changed.

    With --model DIR (and --dtype) also whether strict numerics are possible
    for that model, and in blocks of how many rows. With --graph FILE also the
    smallest dilation at which this machine can emulate that graph.
    """
    import asyncio

    from flowrt.doctor import collect, report

    if dtype is not None and model is None:
        raise UserError("--dtype says how the model of --model is to be computed; give --model DIR too")
    raise SystemExit(0 if report(asyncio.run(collect(model, dtype, graph))) else 1)


def _plain(text: str) -> str:
    """The parser's words in the user's."""
    if text.startswith("Unused Tokens: ["):
        extra = text.removeprefix("Unused Tokens: [").rstrip("].")
        if sys.argv[1:2] == ["run"]:
            return f"unexpected {extra}; a prompt is given with --prompt TEXT, and a value with spaces needs quotes"
        return f"unexpected {extra}; --help says what the command takes, and a value with spaces needs quotes"
    if text.endswith(("parameter GRAPH requires an argument.", "parameter FILE requires an argument.")):
        return "a graph file is missing, such as examples/quickstart.yaml"
    return text


def main() -> None:
    """Parse sys.argv, run the command and exit. No traceback for what a user did wrong."""
    try:
        _fill_standard_descriptors()
        try:
            app(sys.argv[1:], exit_on_error=False, print_error=False)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where its failure can still be told
    except CycloptsError as error:
        _fail(_shortened(_plain(str(error))))
    except UserError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("flowrt: interrupted\n")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        _silence()
        raise SystemExit(NO_READER) from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            from flowrt.processes.descriptors import too_few_descriptors

            _fail(too_few_descriptors())
        if error.errno not in _UNWRITABLE:
            raise
        _silence()
        _fail(f"standard output cannot be written ({error.strerror}); send it elsewhere", 1)


def _fill_standard_descriptors() -> None:
    """A closed one would be given to the next file or socket that is opened, and whoever prints would write into that."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def _shortened(text: str) -> str:
    """The parser repeats words of the command line at any length."""
    for word in sys.argv[1:]:
        for part in (word, word.partition("=")[2]):
            if len(part) > 80:
                text = text.replace(part, f"{part[:77]}...")
    return text


def _fail(text: str, code: int = 2) -> None:
    from flowrt.cli.text import Output, one_line

    stderr = Output(sys.stderr)
    stderr.write(f"flowrt: error: {one_line(text)}\n")
    stderr.flush()
    raise SystemExit(code)


def _silence() -> None:
    """What is still buffered for a reader that has left must not raise at the interpreter's end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
