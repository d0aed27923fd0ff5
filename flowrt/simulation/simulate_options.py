"""Options of `flowrt simulate`, with their help, defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

_FLAG = Parameter(negative=(), show_default=False)
_LIST = Parameter(allow_leading_hyphen=True)  # "-" is a list of none


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """The seeds of a simulation, and what each of them runs."""

    seeds: Annotated[int, Parameter(validator=Number(gte=1), help="Number of seeds.")] = 200
    first: Annotated[int, Parameter(validator=Number(gte=0), help="The first seed.")] = 0
    scenario: Annotated[Path | None, Parameter(help="Inject the faults of this scenario file in every run, instead of drawn ones.")] = None
    weights: Annotated[bool, _FLAG, Parameter(help="Compute with the model's weights instead of the exact integer model.")] = False
    cancel: Annotated[
        int, Parameter(validator=Number(gte=0), help="Number of further requests per seed that clients cancel at random moments.")
    ] = 0
    draw_graphs: Annotated[bool, _FLAG, Parameter(help="Draw another deployment of a graph's model for each seed.")] = False
    digests: Annotated[bool, _FLAG, Parameter(help="Print each seed's digest and number of steps.")] = False
    keep_faults: Annotated[str | None, _LIST, Parameter(help="Keep only these of the drawn faults, as 0,2; - for none.")] = None
    keep_requests: Annotated[str | None, _LIST, Parameter(help="Keep only these of the drawn requests, as 0,2.")] = None
    calm: Annotated[bool, _FLAG, Parameter(help="Draw no delays and duplicates of messages; faults may still cause them.")] = False
    trace: Annotated[
        str | None, Parameter(help="Write what each process computed, sent and received to this file, for ui.perfetto.dev; with --seeds 1.")
    ] = None
    record: Annotated[Path | None, Parameter(help="Append the seeds that were run to this file, and skip those in it.")] = None
    no_shrink: Annotated[bool, _FLAG, Parameter(help="Do not shrink a case that fails.")] = False
