"""`flowrt profile`: measures this machine and writes it as a device card."""

from __future__ import annotations

import asyncio
import shlex
from importlib.util import find_spec

from flowrt.bench.report.report import Machine, new_console
from flowrt.cli.doctor import probe_graph
from flowrt.cli.planning_options import ProfileCommandOptions
from flowrt.errors import TORCH_REMEDY, UserError
from flowrt.system.machine_limits import usable_cores
from flowrt.system.output_file import check_writable, write_file


def profile(options: ProfileCommandOptions) -> None:
    """Measure and write the card. Raises UserError for options that cannot be used."""
    check_writable(options.out, "--out")
    cores, threads = usable_cores(), options.threads or usable_cores()
    if threads > cores:
        raise UserError(f"--threads {threads}: this machine has {cores} cores that flowrt may use; give {cores} or fewer")
    if find_spec("torch") is None:
        raise UserError(f"torch is not installed; {TORCH_REMEDY}")
    from flowrt.bench.machine.profile import ProfileOptions, card_text, profile_machine
    from flowrt.bench.peers.child import new_event_loop

    settings = ProfileOptions(threads, cores // threads, options.dtype or ("bfloat16", "float32"))
    report = None if options.hosts is None else asyncio.run(probe_graph(options.hosts))
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
