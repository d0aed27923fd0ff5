"""The command line: `flowrt run|graph|bench|check|chaos|doctor`.

It holds the options, their help texts, and the errors: one line on standard error, exit code 2. The commands load when they are called,
so that `flowrt --help` is fast. `main` is the entry point.
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
    """Reads numbers as JSON does: the parser itself accepts 1.5 and 0x10 as whole numbers."""
    from flowrt.cli.prompts import option_number

    try:
        return option_number(kind, tokens[0].value)
    except ValueError as error:
        raise UserError(f"{tokens[0].keyword} {error}") from None


_SAMPLING = Group(
    "Sampling",
    default_parameter=Parameter(converter=_number),
    help="Apply to every prompt; a line of --prompts may override them.",
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
        Parameter(negative=(), group=_PROMPTS, help="Answer this prompt; repeatable. If it begins with a dash: --prompt=TEXT."),
    ] = None,
    prompts: Annotated[
        str | None,
        Parameter(
            group=_PROMPTS,
            allow_leading_hyphen=True,
            help='Read prompts from this JSON lines file ("-": standard input): {"prompt": text} or {"prompt_token_ids": [...]}, optional '
            "max_tokens, "
            "temperature, top_p, top_k, seed, stop, ignore_eos and the other options of Sampling. With neither option, the graph "
            "file's own prompts are answered.",
        ),
    ] = None,
    chat: Annotated[
        bool, Parameter(negative=(), group=_PROMPTS, help="Apply the model's chat template to each text.", show_default=False)
    ] = False,
    max_tokens: Annotated[
        int | None, Parameter(group=_SAMPLING, help="Maximum of new tokens per answer. [default: limits.max_tokens of the graph]")
    ] = None,
    temperature: Annotated[float | None, Parameter(group=_SAMPLING, help="0 is greedy. [default: 0]")] = None,
    top_p: Annotated[
        float | None, Parameter(group=_SAMPLING, help="Sample from the most likely tokens that make up this probability. [default: 1, off]")
    ] = None,
    top_k: Annotated[
        int | None, Parameter(group=_SAMPLING, help="Sample from this many of the most likely tokens. [default: 0, off]")
    ] = None,
    seed: Annotated[
        int | None,
        Parameter(group=_SAMPLING, help="Seed of the sampling; the same seed gives the same answer. [default: a new one per request]"),
    ] = None,
    min_tokens: Annotated[int | None, Parameter(group=_SAMPLING, help="Minimum of new tokens per answer. [default: 0]")] = None,
    n: Annotated[
        int | None, Parameter(group=_SAMPLING, help="Number of answers per prompt; the first is shown, --json has all. [default: 1]")
    ] = None,
    presence_penalty: Annotated[
        float | None, Parameter(group=_SAMPLING, help="Subtract this from the logit of each token in the answer. [default: 0]")
    ] = None,
    frequency_penalty: Annotated[
        float | None, Parameter(group=_SAMPLING, help="Subtract this once per occurrence in the answer. [default: 0]")
    ] = None,
    repetition_penalty: Annotated[
        float | None, Parameter(group=_SAMPLING, help="Divide the logits of tokens in prompt and answer by this. [default: 1, off]")
    ] = None,
    logprobs: Annotated[
        int | None, Parameter(group=_SAMPLING, help="Write each token's logprob and those of the N most likely (up to 20) to --json.")
    ] = None,
    model: Annotated[Path | None, Parameter(group=_OTHER, help="Use this Hugging Face model directory instead of the graph's.")] = None,
    overrides: Annotated[
        list[str] | None,
        Parameter(name="--set", negative=(), group=_OTHER, help="Override a key, as deploy.experts.servers=2; may be given several times."),
    ] = None,
    json: Annotated[
        str | None,
        Parameter(group=_OTHER, allow_leading_hyphen=True, help='Write answers, times and figures to this file; "-" for standard output.'),
    ] = None,
    chaos: Annotated[
        str | None,
        Parameter(group=_OTHER, help='Inject faults, as "kill:experts.1@2s" or "pause:experts.0@1s+500ms,kill:monitor@2s".'),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Parameter(group=_OTHER, help="Log level of the processes on standard error.")
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
    model: Annotated[str | None, Parameter(help="Also check whether this model directory allows strict numerics.")] = None,
    dtype: Annotated[str | None, Parameter(help="Dtype for --model. [default: the checkpoint's own]")] = None,
    graph: Annotated[
        str | None, Parameter(help="Also find the smallest dilation at which this machine can emulate this graph file.")
    ] = None,
) -> None:
    """Report what this machine can do, what is missing, and what would help. It changes nothing.

    Exit codes: 0 a run has all it needs, 1 it does not.
    """
    import asyncio

    from flowrt.doctor import collect, report

    if dtype is not None and model is None:
        raise UserError("--dtype needs --model DIR")
    raise SystemExit(0 if report(asyncio.run(collect(model, dtype, graph))) else 1)


def _plain(text: str) -> str:
    """The parser's message in the user's terms."""
    if text.startswith("Unused Tokens: ["):
        extra = text.removeprefix("Unused Tokens: [").rstrip("].")
        if sys.argv[1:2] == ["run"]:
            return f"unexpected {extra}; a prompt is given with --prompt TEXT, and a value with spaces needs quotes"
        return f"unexpected {extra}; see --help, and quote a value with spaces"
    if text.endswith(("parameter GRAPH requires an argument.", "parameter FILE requires an argument.")):
        return "a graph file is missing, such as examples/quickstart.yaml"
    return text


def main() -> None:
    """Parse sys.argv, run the command and exit. A user's mistake gives one line, never a traceback."""
    try:
        _fill_standard_descriptors()
        try:
            app(sys.argv[1:], exit_on_error=False, print_error=False)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where its failure can still be reported
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
    """The kernel gives a closed descriptor to the next file or socket that is opened, and prints would go into that."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def _shortened(text: str) -> str:
    """The parser's messages repeat arguments of any length."""
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
    """Discards what is buffered for a reader that has left, so that it does not raise when the interpreter ends."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
