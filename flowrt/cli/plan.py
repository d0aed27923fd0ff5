"""`flowrt plan`: finds what to run a model on, prints it, and writes it as a graph file."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from flowrt.api.opening import read_graph
from flowrt.bench.report.plots import check_plot, new_picture, save_picture
from flowrt.cli.planning_options import PlanOptions
from flowrt.cli.tables import new_console, new_table, print_table
from flowrt.cli.text import OutputStream
from flowrt.costs.devices import calibration_hash, device_names, error_bands
from flowrt.costs.models import read_model_card
from flowrt.errors import FAILURE, SUCCESS, UserError, shortened
from flowrt.launcher.model_facts import config_of
from flowrt.observe import duration_text
from flowrt.planner.closed_form import LEVEL
from flowrt.planner.deployment import deployment_of
from flowrt.planner.fleet import MAX_LAYERS, MAX_RANKS
from flowrt.planner.inputs import read_hardware, read_slo, workload_of
from flowrt.planner.memory import RESERVE, model_bytes
from flowrt.planner.plan_graph import graph_of, graph_text, is_expressible
from flowrt.planner.plan_text import bound_text, constants_of, failure_text, loss_text, plan_text, ratio_text
from flowrt.planner.search import DeploymentPlan, Relaxation, Search, Task, frontier, search
from flowrt.planner.step import step_times
from flowrt.planner.strategies import parse_strategy
from flowrt.planner.traffic import parse_traffic
from flowrt.system.output_file import check_writable, json_text, write_file

WIDE_COLUMNS = 130  # of a terminal that has room for the reason beside each plan
_PLOT_WIDTH, _PLOT_HEIGHT = 56, 12


def run(model: str, options: PlanOptions) -> int:
    """Returns the exit code."""
    if not 0 <= options.skew <= 4:
        raise UserError(f"--skew is {options.skew:g}; give an exponent from 0 to 4")
    if not 1 <= options.top <= 1000:
        raise UserError(f"--top is {options.top}; give a number from 1 to 1000")
    check_plot(options.plot)
    for option in ("json", "out"):
        if (name := getattr(options, option)) is not None:
            check_writable(name, f"--{option}")
    config, traffic = read_model_card(model, options.weights), parse_traffic(options.traffic)
    traffic.check_context(config.max_position_embeddings)
    task = Task(
        model=config,
        cluster=read_hardware(options.hardware),
        workload=workload_of(traffic, options.traffic),
        slo=read_slo(options.slo),
        objective=options.objective,
        skew=options.skew,
        only=None if options.strategy is None else parse_strategy(options.strategy),
    )
    output = OutputStream(sys.stderr if options.json == "-" else sys.stdout)
    console = new_console(output)
    found = search(task)
    points = frontier(task, (*found.plans[:40], *found.others[:10]))
    _print_inputs(console, model, options, task)
    _print_constants(console, task)
    if found.plans:
        _print_plans(console, found.plans[: options.top], found.plans[0])
    else:
        console.print("\n[bold]nothing fits[/]", highlight=False)
        for line in relaxation_lines(found.relaxations, task):
            console.print(Text(f"  {line}"))
        if found.others:
            table = new_table(console, Column("closest plans", overflow="fold"), Column("why not", overflow="fold"))
            for plan in found.others[: options.top]:
                table.add_row(plan_text(plan), failure_text(plan))
            console.print()
            print_table(table, console)
    _print_frontier(console, points, task)
    console.print(Text(f"\n{found.num_tried} deployments compared"))
    if options.out is not None and found.plans:
        _write_graph(console, options, model, found.plans)
    if options.plot is not None:
        _plot(options.plot, points, task)
    if options.json is not None:
        write_file(options.json, json_text(record(model, options, found, points)))
    output.check()
    return SUCCESS if found.plans else FAILURE


def _print_inputs(console: Console, model: str, options: PlanOptions, task: Task) -> None:
    workload, slo, config = task.workload, task.slo, task.model
    held = config.dtype if config.weights == "dtype" else config.weights
    groups = [
        f"{each.num_devices} x {each.device.name}" + (f" in {each.nodes} nodes" if each.nodes > 1 else "") for each in task.cluster.groups
    ]
    limits = ", ".join(f"{name} <= {duration_text(at)}" for name, at in (("ttft", slo.ttft), ("itl", slo.itl)) if math.isfinite(at))
    lines = {
        "model": f"{model}: {model_bytes(config) / 1e9:.1f} GB of weights in {held}",
        "hardware": f"{', '.join(groups)}; {100 * RESERVE:.0f} % of their memory is kept free",
        "traffic": f"{workload.rate:.3g} requests/s of {workload.num_input:.0f} + {workload.num_output:.0f} tokens",
        "limits": f"{limits or 'none'} (means)",
        "objective": options.objective,
        "level": f"{LEVEL} (closed equations); error band of published steps +-{100 * _band():.0f} %{_own_cards(task)}",
    }
    for name, text in lines.items():
        console.print(Text.assemble((f"{name:<10}", "bold"), text), soft_wrap=True)


def _own_cards(task: Task) -> str:
    """What is known of the error where a card is the user's, whose devices were in no published row."""
    own = next((group.device for group in task.cluster.groups if group.device.name not in device_names()), None)
    return "" if own is None else f"; of {own.name}, a card of your own, flowrt bench machine {own.card} measures it"


def _band() -> float:
    """Nine of ten published rows of steps are within this share."""
    return error_bands()["step"]


def _print_constants(console: Console, task: Task) -> None:
    devices = {group.device.name: group.device for group in task.cluster.groups}
    table = new_table(
        console, Column(f"constants {calibration_hash()}", no_wrap=True), *(Column(name, justify="right") for name in devices)
    )
    by_device = [constants_of(device) for device in devices.values()]
    for name in by_device[0]:
        table.add_row(name, *(each[name] for each in by_device))
    console.print()
    print_table(table, console)


def _print_plans(console: Console, plans: Sequence[DeploymentPlan], best: DeploymentPlan) -> None:
    numbers = ("devices", "tokens/s", "per device", "ttft", "itl")
    is_wide, has_price = console.width >= WIDE_COLUMNS, any(plan.price is not None or plan.joules_per_token is not None for plan in plans)
    why_column = [Column("why", overflow="fold", min_width=20)] if is_wide else []
    table = new_table(
        console,
        Column("", justify="right"),
        Column("plan", overflow="fold", min_width=24 if is_wide else 12),
        *(
            Column(name, justify="right", no_wrap=True)
            for name in (*numbers, *(("price, L20", "J/token") if is_wide and has_price else ()))
        ),
        *why_column,
    )
    reasons = []
    for place, plan in enumerate(plans, 1):
        tokens, joules, operation = plan.max_tokens_per_second, plan.joules_per_token, plan.operation
        assert operation is not None
        why = f"best; limited by {bound_text(plan)}" if plan is best else loss_text(plan, best)
        row = [
            str(place),
            plan_text(plan),
            str(plan.num_devices),
            f"{tokens:.0f}",
            f"{tokens / plan.num_devices:.1f}",
            duration_text(operation.ttft),
            duration_text(operation.itl),
        ]
        more = ["-" if plan.price is None else f"{plan.price:.1f}", "-" if joules is None else f"{joules:.2f}"] if has_price else []
        table.add_row(*row, *([*more, why] if is_wide else []))
        reasons.append(f"{place}: {why}" + (f"; price {more[0]} L20, {more[1]} J/token" if more else ""))
    console.print()
    print_table(table, console)
    if not is_wide:
        for reason in reasons:
            console.print(Text(reason))
    console.print(Text("tokens/s: output tokens within the limits, at most; ttft and itl: at the traffic's rate"), soft_wrap=True)
    if text := ratio_text(best):
        console.print(Text(f"ratios of the best plan: {text}"))


def relaxation_lines(relaxations: Sequence[Relaxation], task: Task) -> list[str]:
    """What to relax, and by how much."""
    lines = []
    for each in relaxations:
        if each.limit in ("ttft", "itl"):
            lines.append(
                f"--slo {each.limit}: from {duration_text(each.now)} to {duration_text(each.needed)} ({each.needed / each.now:.2f}x)"
            )
        elif each.limit == "rate":
            share = 100 * (1 - each.needed / each.now)
            lines.append(f"--traffic rate: from {each.now:.3g} to {each.needed:.3g} requests/s (-{share:.0f} %)")
        elif each.limit == "devices":
            lines.append(f"--hardware: from {each.now:.0f} to {each.needed:.0f} devices")
        else:
            narrower = "; or --weights fp8, which halves the weights" if task.model.weights == "dtype" else ""
            lines.append(f"--hardware: from {each.now:.0f} to {each.needed:.0f} devices, for the weights and one sequence{narrower}")
    return lines or ["no single limit is enough: relax the limits of --slo together, or give more devices"]


def _print_frontier(console: Console, points: Sequence[tuple[float, float, DeploymentPlan]], task: Task) -> None:
    """Tokens per second against seconds between tokens, as a drawing and its points."""
    if len(points) < 2:
        return
    most, (low, high) = max(tokens for _, tokens, _ in points), (points[0][0], points[-1][0])
    grid = [[" "] * _PLOT_WIDTH for _ in range(_PLOT_HEIGHT)]
    for itl, tokens, _ in points:
        column = round((_PLOT_WIDTH - 1) * math.log(itl / low) / math.log(high / low)) if high > low else 0
        grid[_PLOT_HEIGHT - 1 - round((_PLOT_HEIGHT - 1) * tokens / most)][column] = "*"
    console.print(Text(f"\noutput tokens/s of all devices ({most:.0f} at the top) against the limit between tokens", "bold"))
    for row in grid:
        console.print(Text("  |" + "".join(row).rstrip()))
    console.print(Text("  +" + "-" * _PLOT_WIDTH))
    console.print(Text(f"   {duration_text(low)}{duration_text(high):>{_PLOT_WIDTH - len(duration_text(low))}}"))
    texts = [plan_text(plan) for _, _, plan in points]
    for (itl, tokens, _), text, before in zip(points, texts, ["", *texts], strict=False):
        named = f", {text}" if text != before else ""
        console.print(Text(f"  itl {duration_text(itl)}: {tokens:.0f} tokens/s{named}"), soft_wrap=True)


def _plot(path: str, points: Sequence[tuple[float, float, DeploymentPlan]], task: Task) -> None:
    picture, axes = new_picture((8, 5))
    devices = "1 device" if task.cluster.num_devices == 1 else f"{task.cluster.num_devices} devices"
    axes.plot([1e3 * itl for itl, _, _ in points], [tokens for _, tokens, _ in points], marker="o", color="#22577a")
    texts = [plan_text(plan) for _, _, plan in points]
    for place, ((itl, tokens, _), text) in enumerate(zip(points, texts, strict=True)):
        if place == 0 or text != texts[place - 1]:
            at_right = place >= len(points) / 2
            axes.annotate(
                shortened(text, 48),
                (1e3 * itl, tokens),
                fontsize="x-small",
                xytext=(-4, 6) if at_right else (6, -10),
                textcoords="offset points",
                ha="right" if at_right else "left",
            )
    if math.isfinite(task.slo.itl):
        axes.axvline(1e3 * task.slo.itl, color="#b5443a", linestyle=":", label="limit")
        axes.legend(fontsize="small", frameon=False)
    axes.set(xlabel="milliseconds between tokens, at most", ylabel=f"output tokens per second of {devices}")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{task.cluster.name}: {task.workload.num_input:.0f} + {task.workload.num_output:.0f} tokens ({LEVEL})", fontsize="small"
    )
    save_picture(picture, path)


def _write_graph(console: Console, options: PlanOptions, model: str, plans: Sequence[DeploymentPlan]) -> None:
    assert options.out is not None
    chosen = next(((place, plan) for place, plan in enumerate(plans, 1) if is_expressible(plan)), None)
    if chosen is None:
        raise UserError(
            f"--out {options.out}: no plan that fits can be written as a graph file, which cuts layers by expert and sequence only"
        )
    place, plan = chosen
    count, operation = plan.counts[0], plan.operation
    assert operation is not None
    provenance = [
        f"Written by: {command_of(model, options)}",
        f"Plan {place} of {len(plans)}: {plan_text(plan)}; calibration {calibration_hash()}",
        f"Predicted ({LEVEL}, +-{100 * _band():.0f} %): ttft {duration_text(operation.ttft)}, itl {duration_text(operation.itl)} at "
        f"{plan.task.workload.rate / count:.3g} requests/s; at most {plan.max_tokens_per_second / count:.0f} tokens/s",
        *([f"This is one instance; start {count} of them."] if count > 1 else []),
    ]
    write_file(options.out, graph_text(graph_of(plan, model), provenance))
    note = "" if place == 1 else f": plan {place}, the best one without tensor or pipeline parallelism"
    console.print(Text(f"wrote {options.out}{note}"), soft_wrap=True)
    console.print(Text(_checked(options.out, plan)), soft_wrap=True)


def _checked(path: str, plan: DeploymentPlan) -> str:
    """What level L2 says of the graph that was written, beside level L3."""
    graph, most = read_graph(path), plan.instances[0].operate(plan.rates[0])
    assert graph.model is not None
    assert most is not None
    deployment = deployment_of(graph, config_of(graph.model))
    batch = max(1.0, most.batch)
    step = step_times(deployment, batch, plan.task.workload.context, max_ranks=MAX_RANKS, max_layers=MAX_LAYERS)
    prompts = f", of which prompts take {100 * most.prompt_share:.0f} %" if most.prompt_share else ""
    closed = duration_text(most.itl * (1 - most.prompt_share))
    return (
        f"a step of {batch:.0f} sequences per group: {duration_text(step.seconds)} (L2), {closed} ({LEVEL}); "
        f"itl at the most requests: {duration_text(most.itl)} ({LEVEL}){prompts}"
    )


def command_of(model: str, options: PlanOptions) -> str:
    """The command line that gives this plan."""
    given = {"hardware": options.hardware, "traffic": options.traffic, "slo": options.slo, "objective": options.objective}
    given |= {"weights": options.weights} if options.weights != "dtype" else {}
    given |= {"skew": f"{options.skew:g}"} if options.skew else {}
    given |= {"strategy": options.strategy} if options.strategy is not None else {}
    return " ".join(["flowrt plan", shlex.quote(model), *(f"--{name} {shlex.quote(value)}" for name, value in given.items())])


def record(model: str, options: PlanOptions, found: Search, points: Sequence[tuple[float, float, DeploymentPlan]]) -> dict[str, Any]:
    """All figures, with the unit in each name."""
    task = found.task

    def plan_record(plan: DeploymentPlan) -> dict[str, Any]:
        operation = plan.operation
        return {
            "plan": plan_text(plan),
            "devices": {task.cluster.groups[group].device.name: num for group, num in plan.devices.items()},
            "max_requests_per_second": plan.max_rate,
            "max_output_tokens_per_second": plan.max_tokens_per_second,
            "ttft_seconds": None if operation is None else operation.ttft,
            "itl_seconds": None if operation is None else operation.itl,
            "sequences_per_group": None if operation is None else operation.batch,
            "price_l20": plan.price,
            "watts": plan.watts,
            "joules_per_token": plan.joules_per_token,
            "limited_by": bound_text(plan),
            **({} if plan.is_feasible else {"why_not": failure_text(plan)}),
        }

    return {
        "command": command_of(model, options),
        "level": LEVEL,
        "error_band": _band(),
        "calibration": calibration_hash(),
        "constants": {group.device.name: constants_of(group.device) for group in task.cluster.groups},
        "tried": found.num_tried,
        "plans": [plan_record(plan) for plan in found.plans],
        "not_fitting": [plan_record(plan) for plan in found.others[: options.top]],
        "relax": [{"limit": each.limit, "now": each.now, "needed": each.needed} for each in found.relaxations],
        "frontier": [{"itl_seconds": itl, "max_output_tokens_per_second": tokens, "plan": plan_text(plan)} for itl, tokens, plan in points],
    }
