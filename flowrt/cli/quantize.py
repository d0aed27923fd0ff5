"""`flowrt quantize`: write a checkpoint with weights in 8 bits, smoothed after texts if the user gives some."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from flowrt.cli.prompts import read_prompts
from flowrt.errors import GraphError, UserError, install_command
from flowrt.graph.default import hub_hint
from flowrt.graph.file import load_graph
from flowrt.launcher.model_facts import facts_of
from flowrt.launcher.start_checks import check_kept
from flowrt.observe import size_text
from flowrt.operators.families.library import missing_package
from flowrt.operators.model_config import ModelError
from flowrt.sampling_params import SamplingParams


def write(model: Path, out: Path, kept: Literal["int8", "fp8"], prompts: str | None) -> None:
    """Write the checkpoint `model` into the folder `out`. `prompts`: a file of texts after which it is smoothed. Raises UserError."""
    if not model.is_dir():
        raise UserError(f"{model}: no such folder; {hub_hint(str(model)) or 'give the folder of a checkpoint'}")
    if out.exists():
        raise UserError(f"{out} exists already; give a new folder")
    texts = [] if prompts is None else [each.prompt for each in read_prompts(prompts, SamplingParams())]
    if texts and (missing := missing_package()):
        raise UserError(f"--prompts computes texts with transformers, and {missing} is not installed: {install_command('transformers')}")
    from flowrt.workers.quantization import quantize_checkpoint

    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"writing {out}", total=None)
            written = quantize_checkpoint(model, out, kept, texts, lambda done, total: progress.update(task, completed=done, total=total))
    except ModelError as error:
        raise UserError(f"{error}; {out} is not complete: remove it" if out.exists() else str(error)) from error
    except OSError as error:
        left = f"; {out} is not complete: remove it" if out.exists() else ""
        raise UserError(f"{error.filename or out}: {error.strerror or ' '.join(str(error).split())}{left}") from error
    sizes = f"{size_text(written.bytes_before)} to {size_text(written.bytes_after)}"
    worst = max(written.errors, key=written.errors.__getitem__)
    errors = f"median {_percent(median(written.errors.values()))}, largest {_percent(written.errors[worst])} ({worst})"
    print(f"wrote {out}: {len(written.errors)} of {written.num_tensors} tensors in {kept}, {sizes}")
    print(f"error of a matrix, relative to its weights: {errors}")
    keep = "model.expert_weights=as_stored"
    try:
        check_kept(load_graph(out, [keep], facts_of=facts_of))
    except GraphError as error:
        print(f"flowrt restores them as they are read: {keep} is not possible ({error.text})")
    else:
        print(f"to keep the weights of experts so: flowrt run {out} --set {keep} --prompt TEXT")


def _percent(squares: float) -> str:
    return f"{100 * squares**0.5:.2g} %"
