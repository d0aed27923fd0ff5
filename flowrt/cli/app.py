"""The command line: `flowrt run`, `serve`, `plan` and the other commands that `flowrt --help` lists.

It holds the options, their help texts, and the errors: one line on standard error, exit code 2. The commands load when they are called,
so that `flowrt --help` is fast. `main` is the entry point.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Env

import flowrt
from flowrt.cli.bench import bench_app
from flowrt.cli.chaos import chaos_app
from flowrt.cli.check import check_app
from flowrt.cli.graph import graph_app
from flowrt.cli.options import ChatOptions, ChatSamplingOptions, RunOptions, SamplingOptions, ServeCommandOptions, Switch, read_number
from flowrt.cli.planning_options import FleetOptions, PlanOptions, ProfileCommandOptions, SimOptions
from flowrt.errors import INTERRUPTED, NO_READER, UserError, shortened
from flowrt.simulation.simulate_options import SimulationOptions
from flowrt.system.output_file import LostOutputError

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG)
_UNKNOWN_OPTION = re.compile(r'Unknown option: "?(--?([A-Za-z0-9_-]+))')


def _split_variable(kind: Any, value: str, delimiter: str | None = None) -> list[str]:
    """The values of an option from its environment variable. "" gives none; one that is not repeatable may have a newline at its end."""
    lines = value.splitlines()
    return lines if len(lines) < 2 or tuple in (get_origin(kind), *map(get_origin, get_args(kind))) else [value]


app = App(
    name="flowrt",
    help="""Run Mixture-of-Experts language models as asynchronous dataflow graphs of processes.

    Each option is also an environment variable, as FLOWRT_SERVE_PORT=80 for
    flowrt serve --port 80. The command line overrides it. A repeatable option
    takes a line of its variable for each value.""",
    version=f"flowrt {flowrt.__version__}",
    version_flags=("--version",),
    help_format="plaintext",  # the others load a Markdown parser
    suppress_keyboard_interrupt=False,  # else it exits without a word
    config=Env("FLOWRT_", show=False),
    default_parameter=Parameter(env_var_split=_split_variable),
)
app.command(graph_app)
app.command(bench_app)
app.command(check_app)
app.command(chaos_app)
app.register_install_completion_command(help="Install shell completion (bash, zsh, fish) for this user.")


@app.command
def run(
    graph: Annotated[Path | None, Parameter(help="A graph file, or a Hugging Face model directory; none with --attach.")] = None,
    /,
    *,
    options: RunOptions = RunOptions(),
    sampling: SamplingOptions = SamplingOptions(),
) -> None:
    """Start a graph, answer prompts, and show how it ran.

    Answers go to standard output, progress and tables to standard error.
    Press Ctrl-C once to let running requests finish, twice to end at once.
    Each option is also an environment variable, as FLOWRT_RUN_MAX_TOKENS.
    Exit codes: 0 all finished, 1 a request failed, a fault of --chaos was
    not injected or an output was lost, 2 bad input (nothing was started),
    3 a worker died, 130 interrupted, 141 the reader of the answers left.
    """
    _run(graph, options, sampling)


@app.command
def serve(
    graph: Annotated[Path, Parameter(help="A graph file, or a Hugging Face model directory.")],
    /,
    *,
    options: ServeCommandOptions = ServeCommandOptions(),
) -> None:
    """Start a graph and serve it through OpenAI's API over HTTP, until it is stopped.

    After SIGTERM or Ctrl-C, requests in progress finish within --drain-seconds
    and new ones are refused. A second signal ends them with an error, and the
    server at once.
    Each option is also an environment variable, as FLOWRT_SERVE_PORT.
    Exit codes: 0 stopped in order, 2 bad input (nothing was started),
    3 a worker died that the graph needs, 130 ended at once.
    """
    from flowrt.cli.serve import serve as serve_graph

    raise SystemExit(serve_graph(graph, options))


@app.command
def up(
    graph: Annotated[Path, Parameter(help="A graph file, or a Hugging Face model directory; with --resume, the name of a dead graph.")],
    /,
    *,
    options: ServeCommandOptions = ServeCommandOptions(),
) -> None:
    """Start a graph as `flowrt serve` does, but in the background.

    With --resume NAME, the graph NAME, whose launcher has died, starts with
    the options that it had and continues the requests in its request log.
    The command returns when the graph is ready, or prints why it is not.
    Each option is also an environment variable, as FLOWRT_UP_PORT.
    Exit codes: 0 it is ready, 2 bad input or a graph of this name is up
    (nothing was started), 3 a worker died, 130 interrupted.
    """
    from flowrt.cli.up import up as start_graph

    raise SystemExit(start_graph(graph, options))


_Name = Annotated[str | None, Parameter(help="Name of the graph; may be left out when only one is up.")]


@app.command
def ps(*, json: Annotated[Switch, Parameter(help="Print JSON.")] = False) -> None:
    """Show the graphs that are up, and their processes."""
    from flowrt.cli.graphs import ps as show

    raise SystemExit(show(json))


@app.command
def logs(
    name: _Name = None,
    /,
    *,
    follow: Annotated[Switch, Parameter(name=("--follow", "-f"), help="Print new lines until the graph ends.")] = False,
    tail: Annotated[
        int | None, Parameter(name=("--tail", "-n"), converter=read_number, help="Print only so many lines from the end. [default: all]")
    ] = None,
) -> None:
    """Print the log of a graph that flowrt up has started."""
    from flowrt.cli.graphs import logs as show

    if tail is not None and tail < 0:
        raise UserError(f"--tail is {tail}, it must be at least 0")
    raise SystemExit(show(name, follow, tail))


@app.command
def drain(name: _Name = None, /) -> None:
    """Refuse new requests to a graph, and wait until those in progress have ended. The graph stays up."""
    from flowrt.cli.graphs import drain as drain_graph

    raise SystemExit(drain_graph(name))


@app.command
def down(name: _Name = None, /, *, now: Annotated[Switch, Parameter(help="End requests in progress at once.")] = False) -> None:
    """Stop a graph. Requests in progress finish within the --drain-seconds of its start.

    Exit codes: 0 it has ended and left nothing behind, 1 it had to be killed.
    """
    from flowrt.cli.graphs import down as stop

    raise SystemExit(stop(name, now))


@app.command
def chat(
    graph: Annotated[
        Path | None,
        Parameter(
            help="A graph file, or a Hugging Face model directory, to start; or the name of a graph that is up. [default: the only one]"
        ),
    ] = None,
    /,
    *,
    options: ChatOptions = ChatOptions(),
    sampling: ChatSamplingOptions = ChatSamplingOptions(),
) -> None:
    """Talk with a model at a prompt line: one that this starts, or a server's.

    Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. Lines from
    a pipe are answered one after another.
    Each option is also an environment variable, as FLOWRT_CHAT_URL.
    Exit codes: 0 the input has ended, 1 a request of piped input failed,
    2 bad input or no server, 3 a worker died at the start, 130 interrupted.
    """
    from flowrt.cli.chat import chat as converse

    raise SystemExit(converse(graph, options, sampling))


@app.command
def demo(*, options: RunOptions = RunOptions(), sampling: SamplingOptions = SamplingOptions()) -> None:
    """Answer eight prompts with a small model that comes with flowrt.

    The demo starts two attention groups and three expert servers, each in its
    own process. It takes the options of `flowrt run`.
    """
    from flowrt.cli.init import DEMO

    _run(DEMO / "quickstart.yaml", options, sampling)


@app.command
def init(
    folder: Annotated[Path, Parameter(help="Folder of the new file; made when it does not exist.")],
    /,
    *,
    model: Annotated[Path | None, Parameter(help="Hugging Face model directory of the graph. [default: the model of flowrt demo]")] = None,
) -> None:
    """Write graph.yaml, a commented graph file that runs as it is. An existing file is kept."""
    from flowrt.cli.init import write_graph

    write_graph(folder, model)


def _run(graph: Path | None, options: RunOptions, sampling: SamplingOptions) -> NoReturn:
    from flowrt.cli.prompts import checked_options
    from flowrt.cli.run import run as run_graph

    for option, name in (("--prompts", options.prompts), ("--json", options.json)):
        if name is not None and name.startswith("-") and name != "-":  # let through for the sake of "-"
            raise UserError(f"{option} is followed by {name}; give it a file, or write ./{name} for one of that name")
    given = checked_options(vars(sampling))
    if options.attach is not None:
        from flowrt.cli.attach import run_attached

        raise SystemExit(run_attached(graph, options, given))
    if graph is None:
        raise UserError(_no_graph())
    raise SystemExit(run_graph(graph, options, given))


@app.command(usage="Usage: flowrt simulate [OPTIONS] [GRAPHS...]")
def simulate(
    *graphs: Annotated[str, Parameter(help="Graph files with a model, or folders of them. [default: the graph of flowrt demo]")],
    options: SimulationOptions = SimulationOptions(),
) -> None:
    """Run graphs with faults under many seeds in virtual time, and check invariants after every step.

    For a seed that fails, the command prints the smallest case that still fails
    and the command that replays it. Exit codes: 0 all invariants held under
    each seed, 1 one did not, 2 bad input.
    """
    from flowrt.cli.init import DEMO
    from flowrt.simulation.command import run

    raise SystemExit(run(graphs or (str(DEMO / "quickstart.yaml"),), options))


@app.command
def sim(
    graph: Annotated[Path, Parameter(help="A graph file with emulate:, which serves a model.")], /, *, options: SimOptions = SimOptions()
) -> None:
    """Predict what a graph does with traffic: latencies, throughput, where the time goes.

    No process starts. Level L2 is a model of the graph's steps, for any size;
    level L1 runs the runtime itself in virtual time. Each answer names its
    level. Times are those of the hardware that emulate: describes.
    Exit codes: 0 answered, 2 bad input.
    """
    from flowrt.cli.sim import sim as simulate_traffic

    raise SystemExit(simulate_traffic(graph, options))


@app.command
def plan(
    model: Annotated[str, Parameter(help="A model card by name or path, a config.json, or the folder of a checkpoint.")],
    /,
    *,
    options: PlanOptions,
) -> None:
    """Find what to run a model on, for given traffic and limits of latency, without running it.

    It compares ways to cut the model over the devices, says why the others
    lost, and writes the best one as a graph file.
    Exit codes: 0 a plan fits, 1 none does (it prints what to relax), 2 bad
    input.
    """
    from flowrt.cli.plan import run as find_plan

    raise SystemExit(find_plan(model, options))


@app.command
def profile(*, options: ProfileCommandOptions = ProfileCommandOptions()) -> None:
    """Measure this machine and write it as a device card for plan, sim and emulate: devices.

    It computes operators with random weights, sends messages between
    processes, and starts small graphs: about a minute, on all cores.
    Close other programs first.
    """
    from flowrt.cli.profile import profile as measure

    measure(options)


@app.command
def fleet(
    graph: Annotated[Path, Parameter(help="A graph file with emulate:, which serves a model, such as flowrt plan writes.")],
    /,
    *,
    options: FleetOptions,
) -> None:
    """Predict how many devices a day of traffic needs, and what failures of devices cost under each recovery policy.

    No process starts. Throughput is that of level L2, in virtual time.
    Exit codes: 0 answered, 2 bad input.
    """
    from flowrt.cli.fleet import run as predict_fleet

    raise SystemExit(predict_fleet(graph, options))


@app.command
def models(
    path: Annotated[Path | None, Parameter(help="The folder of a checkpoint, or its config.json: how it runs, and its memory.")] = None, /
) -> None:
    """List the models that this build can run, or say how a checkpoint runs.

    Exit codes: 0 it can run, 2 it cannot, with the reason.
    """
    from rich.console import Console

    from flowrt.cli.models import print_known, print_model

    if path is None:
        print_known(Console())
    else:
        print_model(path, Console())


@app.command(name="quantize")
def quantize_checkpoint(
    model: Annotated[Path, Parameter(help="The folder of a checkpoint in bfloat16, float16 or float32.")],
    out: Annotated[Path, Parameter(help="The new folder to write.")],
    /,
    *,
    weights: Annotated[Literal["int8", "fp8"], Parameter(help="What the weights become.")] = "int8",
    prompts: Annotated[
        str | None,
        Parameter(
            help="A file of texts, as for flowrt run: smooth the model after them, so that rows lose less as INT8; needs transformers."
        ),
    ] = None,
) -> None:
    """Write a checkpoint with weights in 8 bits, in the form of compressed-tensors.

    The matrices of attention, MLPs and experts have one scale per output; all
    others stay as they are. Exit codes: 0 written, 2 bad input.
    """
    from flowrt.cli.quantize import write

    write(model, out, weights, prompts)


@app.command
def doctor(
    *,
    model: Annotated[
        str | None, Parameter(help="Also check the files of this model directory, and whether it allows strict numerics.")
    ] = None,
    dtype: Annotated[str | None, Parameter(help="Dtype for --model. [default: the checkpoint's own]")] = None,
    graph: Annotated[
        str | None, Parameter(help="Also find the smallest dilation at which this machine can emulate this graph file.")
    ] = None,
    hosts: Annotated[
        str | None, Parameter(help="Instead check every host of this graph file: versions, transports, latency and bandwidth.")
    ] = None,
    overrides: Annotated[
        list[str] | None, Parameter(name="--set", negative=(), help="Override a key of the graph file, as hosts.count=3; repeatable.")
    ] = None,
) -> None:
    """Report what works on this machine, what is missing, and what would help. It changes nothing.

    Exit codes: 0 a run has all it needs, 1 it does not.
    """
    import asyncio

    from flowrt.cli.doctor import collect, collect_hosts, report

    if hosts is not None:
        if model is not None or graph is not None:
            raise UserError("--hosts checks other things than --model and --graph; give one of them")
        raise SystemExit(0 if report(asyncio.run(collect_hosts(hosts, overrides or ()))) else 1)
    if dtype is not None and model is None:
        raise UserError("--dtype needs --model DIR")
    if overrides and graph is None:
        raise UserError("--set needs --graph FILE or --hosts FILE")
    raise SystemExit(0 if report(asyncio.run(collect(model, dtype, graph, overrides or ()))) else 1)


def _join_lines(command: App) -> None:
    """Join the lines of each paragraph of the help texts, so that they break at the width of the terminal only."""
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in cleandoc(command.help).split("\n\n"))
    for name in command:
        if not name.startswith("-"):
            _join_lines(command[name])


_join_lines(app)


def _no_graph() -> str:
    hint = " without --model" if any(word.partition("=")[0] == "--model" for word in sys.argv) else ""
    return f"a graph file or model directory is missing; give its path{hint}, or write one with flowrt init DIR"


def _plain(error: CycloptsError) -> str:
    """The parser's message in the user's terms."""
    text, command = str(error), " ".join(error.command_chain or ())
    if text.startswith("Unused Tokens: ["):
        extra = text.removeprefix("Unused Tokens: [").rstrip("].")
        if command in ("run", "demo"):
            return f"unexpected {extra}; a prompt is given with --prompt TEXT, and a value with spaces needs quotes"
        return f"unexpected {extra}; see --help, and quote a value with spaces"
    if text.endswith(("parameter GRAPH requires an argument.", "parameter FILE requires an argument.")):
        return _no_graph()
    if text.startswith("Unknown command "):
        return f"{text.partition(' Available commands:')[0]} {f'flowrt {command}'.strip()} --help lists the commands"
    if (option := _UNKNOWN_OPTION.match(text)) and command.partition(" ")[0] in ("run", "demo", "serve", "up", "chat", "graph"):
        from flowrt.graph.problems import find_section, unbuilt

        key = option[2].replace("-", "_")
        if unbuilt(key):
            return f"there is no option {option[1]}: {unbuilt(key).replace(key, 'it')}"
        if section := find_section(key):
            return f"there is no option {option[1]}; this is a key of the graph: --set {'.'.join((*section, key))}=VALUE"
    return text


def main() -> None:
    """Parse sys.argv, run the command and exit. A user's mistake gives one line, never a traceback."""
    try:
        _check_environment()
        _fill_standard_descriptors()
        try:
            app(sys.argv[1:], exit_on_error=False, print_error=False)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where its failure can still be reported
    except CycloptsError as error:
        _fail(_shortened(_plain(error)))
    except UserError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("flowrt: interrupted\n")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(NO_READER) from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            from flowrt.processes.descriptors import too_few_descriptors

            _fail(too_few_descriptors())
        if error.filename is not None:
            _fail(f"{shortened(str(error.filename))}: {error.strerror}", 2 if error.errno == errno.ENAMETOOLONG else 1)
        if error.errno not in _UNWRITABLE:
            raise
        _discard_output()
        _fail(f"standard output cannot be written ({error.strerror}); send it elsewhere", 1)


def _check_environment() -> None:
    """Raises UserError for what a command cannot do without. `flowrt run` and `demo` report a closed standard output themselves."""
    try:
        os.getcwd()
    except FileNotFoundError:
        if sys.argv[1:2] != ["graph"]:  # all others load torch, which does not load from a deleted folder
            raise UserError("the working directory has been deleted; change to another one") from None
    if sys.argv[1:2] not in (["doctor"], ["graph"]):
        from flowrt.processes.descriptors import MIN_DESCRIPTORS, raise_limit, too_few_descriptors

        if raise_limit(MIN_DESCRIPTORS) < MIN_DESCRIPTORS:  # here, since any import may fail for want of one
            raise UserError(too_few_descriptors(MIN_DESCRIPTORS))
    if sys.stdout is None and sys.argv[1:2] not in (["run"], ["demo"]):
        raise LostOutputError("standard output is closed; send it elsewhere")


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
    from flowrt.cli.text import OutputStream, one_line

    OutputStream(sys.stderr).write_now(f"flowrt: error: {one_line(text)}\n")
    raise SystemExit(code)


def _discard_output() -> None:
    """Discards buffered output, which nothing reads any more, so that writing it does not raise when the interpreter ends."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
