"""`flowrt profile`: measures this machine and writes it as a device card."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from flowrt.errors import TORCH_REMEDY, UserError

if TYPE_CHECKING:
    from flowrt.bench.measure.host_probe import HostReport


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ProfileCommandOptions:
    """What is measured, and where the card goes."""

    out: Annotated[str, Parameter(help="Write the card into this file; - for standard output.")] = "machine.yaml"
    threads: Annotated[
        int | None,
        Parameter(validator=Number(gte=1), help="Compute threads of a process, which is a device. [default: a thread per core]"),
    ] = None
    dtype: Annotated[
        tuple[Literal["bfloat16", "float32"], ...],
        Parameter(
            negative=(), consume_multiple=True, help="Dtypes of weights and products. [default: bfloat16 float32]", show_default=False
        ),
    ] = ("bfloat16", "float32")
    hosts: Annotated[
        Path | None, Parameter(help="Measure the link between nodes on the hosts of this graph file, not between two processes.")
    ] = None


def profile(options: ProfileCommandOptions) -> None:
    """Measure and write the card. Raises UserError for options that cannot be used."""
    from flowrt.bench.report.report import Machine, new_console
    from flowrt.system.machine_limits import usable_cores
    from flowrt.system.output_file import check_writable, write_file

    check_writable(options.out, "--out")
    cores, threads = usable_cores(), options.threads or usable_cores()
    if threads > cores:
        raise UserError(f"--threads {threads}: this machine has {cores} cores that flowrt may use; give {cores} or fewer")
    if find_spec("torch") is None:
        raise UserError(f"torch is not installed; {TORCH_REMEDY}")
    from flowrt.bench.machine.profile import ProfileOptions, card_text, profile_machine
    from flowrt.bench.peers.child import new_event_loop

    settings = ProfileOptions(threads, cores // threads, options.dtype or ("bfloat16", "float32"))
    report = None if options.hosts is None else asyncio.run(_probe(options.hosts))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        found = runner.run(profile_machine(settings, report))
    hosts = None if options.hosts is None else options.hosts.name
    card = card_text(found, Machine.here(), settings, command_of(options, settings.threads), hosts)
    write_file(options.out, card)
    console = new_console("-" if options.out == "-" else None)
    for name, errors in found.by_operator.items():
        console.print(f"{name}: {errors}", markup=False)
    console.print(f"operators: {found.calls}", markup=False)
    console.print(f"decode steps of real runs: {found.steps}", markup=False)
    if options.out != "-":
        console.print(f"wrote {options.out}; use it: flowrt plan MODEL --hardware {shlex.quote(options.out)}", markup=False, soft_wrap=True)


def command_of(options: ProfileCommandOptions, threads: int) -> str:
    """The command line that measures the same."""
    hosts = [] if options.hosts is None else ["--hosts", shlex.quote(str(options.hosts))]
    return " ".join(["flowrt profile", f"--threads {threads}", "--dtype", *options.dtype, *hosts])


async def _probe(graph: Path) -> HostReport:
    from flowrt.api import read_graph
    from flowrt.bench.measure.host_probe import probe_hosts
    from flowrt.cli.doctor import HOST_SECONDS
    from flowrt.launcher.start_checks import check_engine
    from flowrt.launcher.transport_choice import BETWEEN_HOSTS, tried_between
    from flowrt.seams import Seams

    loaded = read_graph(graph)
    check_engine(loaded)
    if loaded.hosts is None:
        raise UserError(f"--hosts {graph}: the graph has one host; write hosts: into it")
    return await probe_hosts(loaded.hosts, Seams(), BETWEEN_HOSTS[0], tried_between(loaded.hosts), HOST_SECONDS)
