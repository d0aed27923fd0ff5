"""Sweep files: what they stand for, the figures of their runs in virtual time, and one line for what is wrong in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrt.api import read_graph
from flowrt.bench.cases.small_model import TOP_K, write_small_model
from flowrt.bench.measure.benchmark import run_benchmark
from flowrt.bench.measure.modelled import ModelledRun, simulated_run
from flowrt.bench.report.figures import Figure
from flowrt.bench.sweep.metrics import METRICS, MeasuredVariant
from flowrt.bench.sweep.run import _compared_together, measure_sweep, read_variant
from flowrt.bench.sweep.sweep_file import DecodeSection, Sweep, read_sweep
from flowrt.costs.ping_pong import PingPong
from flowrt.document import with_values
from flowrt.errors import UserError
from flowrt.graph.model import Graph
from flowrt.planner.traffic import Traffic

LAYERS = 4
TIMES = PingPong(100e-6, 60e-6, 28e-6)
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "sweeps"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_small_model(tmp_path_factory.mktemp("model"), LAYERS, 4))


def graph(model: str, times: PingPong = TIMES, **attention: Any) -> Graph:
    link = {"latency_seconds": 1e-9, "message_seconds": times.exchange_seconds, "bandwidth_bytes_per_second": 1e15}
    compute = {"attention": {"row_seconds": times.attention_seconds}, "experts": {"row_seconds": times.experts_seconds / TOP_K}}
    deploy = {"attention": attention, "experts": {"servers": 1}, "links": {"attention-experts": {"link": link}}}
    return read_graph({"flowrt": 1, "model": {"path": model}, "deploy": deploy, "emulate": {"dilation": 100, "compute": compute}})


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_takes_as_many_periods_as_there_are_layers(small_model: str, micro_batches: int) -> None:
    run = simulated_run(graph(small_model, micro_batches=micro_batches), batch=micro_batches, new_tokens=6)
    period = TIMES.period_seconds(micro_batches)
    assert run.mean_step_seconds == pytest.approx(LAYERS * period, rel=0.002)
    assert run.busy_share("attention") == pytest.approx(micro_batches * TIMES.attention_seconds / period, abs=0.1)
    assert run.busy_share("experts") == pytest.approx(micro_batches * TIMES.experts_seconds / period, abs=0.1)
    assert run.sent["attention.0.dispatch.server0 -> experts.0.rows"][0] == LAYERS


# --- the shipped files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_files_are_read_in_both_forms(file: Path, tmp_path: Path) -> None:
    virtual, real = read_sweep(file), read_sweep(file, is_real=True)
    assert len(virtual.figures) >= len(real.figures) > 0
    assert len({each.label for each in virtual.figures if each.against is None}) == sum(each.against is None for each in virtual.figures)
    for sweep in (virtual, real):
        variant = read_variant(sweep, sweep.figures[0].of, tmp_path, 1000.0)
        assert variant.graph.emulation is not None
        assert variant.batch or isinstance(variant.load, Traffic)


def figures_of(name: str, only: Mapping[str, tuple[str, ...]], **changes: Any) -> list[Figure]:
    """The figures of a shipped file in virtual time, with some of its values and other keys."""
    document = read_sweep(FOLDER / f"{name}.yaml").document
    values = {"processes.only": {key.replace("_", " "): list(names) for key, names in only.items()}}
    values |= {"processes.set": {key.replace("__", "."): value for key, value in changes.items()}}
    reduced = Sweep(with_values(document, [(key, value, "test") for key, value in values.items()]), is_real=True)
    virtual = Sweep(document)
    vars(virtual).update(figures=reduced.figures, document_of=reduced.document_of)
    report = run_benchmark(name, measure_sweep(virtual, 1.0), 1)
    assert not report.notes
    return list(report.figures)


def test_micro_batches_gain_what_the_equations_say() -> None:
    only = {"exchange": ("0.28 T_f",), "number": ("1 micro-batch", "2 micro-batches", "3 micro-batches")}
    second, _, third, *away, exposed = figures_of("overlap", only, small_model__num_layers=4)
    assert [each.verdict for each in (second, third)] == ["met", "met"]
    assert all(each.ours.median < 0.2 for each in (*away, exposed))  # few layers: filling the pipeline counts


def test_a_number_of_micro_batches_is_chosen() -> None:
    only = {"computing": ("by rows",)}
    figures = figures_of("micro-batches", only, small_model__num_layers=1, decode__new_tokens=40)
    assert [each.peer for each in figures] == ["1 micro-batch", "2 micro-batches", "3 micro-batches"]
    assert all(each.ratio is not None and each.ratio.median > 0.8 for each in figures)


def test_domains_keep_the_experts_busy_and_a_stopped_one_slows_no_other() -> None:
    only = {"groups": ("1 domain", "3 domains", "3 groups without turns", "3 domains, one stopped")}
    gain, busy, _, turns, stopped = figures_of("domains", only, small_model__num_layers=4, decode__new_tokens=6)
    assert gain.ratio is not None
    assert gain.ratio.median == pytest.approx(3.0, rel=0.05)
    assert turns.ratio is not None
    assert turns.ratio.median >= 1.0
    assert [busy.verdict, stopped.verdict] == ["met", "met"]


def test_a_stalled_client_delays_others_only_when_counts_of_all_ranks_are_awaited() -> None:
    only = {"stalled": ("undisturbed", "200 ms")}
    per_client, all_ranks, undisturbed = figures_of("dispatch", only, small_model__num_layers=2, decode__new_tokens=6)
    assert per_client.verdict == "met"
    assert all_ranks.ours.median == pytest.approx(0.2e6 / 5, rel=0.1)  # the stall, in 5 steps
    assert undisturbed.ratio is not None
    assert undisturbed.ratio.median == pytest.approx(1.0, abs=0.02)
    assert per_client.about == {"x": 0.2, "curve": "per client"}


def test_colocated_experts_are_compared_with_servers_and_with_whole_groups() -> None:
    only = {"read": ("5 us", "60 us")}
    figures = figures_of("colocated", only, small_model__num_layers=2, decode__new_tokens=6)
    to_servers, to_whole, *_, waiting, busy = [figure.ratio.median for figure in figures if figure.ratio is not None]
    assert to_servers > 1.2, "half of the processes have the attention of all sequences"
    assert 0.8 < to_whole < 1.2
    assert waiting > 1.0
    assert busy < 0.75, "a server that waits reads the weights of an expert for several requests at once"


def test_trampolines_save_messages_and_change_no_token(tmp_path: Path) -> None:
    document = read_sweep(FOLDER / "trampoline.yaml").document
    sweep = Sweep(with_values(document, [("small_model.num_layers", 1, "test")]))
    names = [("16 servers, 4 groups", exchange) for exchange in ("trampolines", "direct")]
    through, direct = (replace(read_variant(sweep, each, tmp_path, 1.0).simulate(), at="dispatch") for each in names)
    assert through.run.tokens == direct.run.tokens
    assert METRICS["messages_per_layer"].value(through) == pytest.approx(4.0, rel=0.02)
    assert METRICS["messages_per_server"].value(through) == METRICS["messages_per_layer"].value(through) / 16
    num_bytes = [METRICS["bytes_per_layer"].value(replace(each, at="")) for each in (through, direct)]
    assert 1.0 < num_bytes[0] / num_bytes[1] < 2.0


def test_routing_policies_serve_a_trace() -> None:
    only = {"workers": ("4 groups",), "load": ("mixed lengths",), "routing": ("cache_aware", "round_robin")}
    figures = figures_of("routing", only, traffic__requests=20)
    assert len(figures) == 6
    assert {each.unit for each in figures} == {"ms"}
    short, whole = (next(each for each in figures if each.name.endswith(words)) for words in ("p50 below 1000 tokens", "first token p50"))
    assert short.ours.median < whole.ours.median * 1.01


def test_equations_hold_for_runs_that_follow_them(tmp_path: Path) -> None:
    sweep = read_sweep(FOLDER / "overlap.yaml")
    times = PingPong(100e-6, 100e-6, 10e-6)
    for number in (1, 3):
        variant = read_variant(sweep, ("0.1 T_f", f"{number} micro-batch{'es' * (number > 1)}"), tmp_path, 1000.0)
        step = times.step_seconds(number, 16)
        run = ModelledRun((step,) * number, {"experts.0": 0.99}, {}, ())
        measured = MeasuredVariant(variant.graph, run, variant.batch)
        assert METRICS["off_ping_pong"].value(measured) == pytest.approx(0.0, abs=1e-6)
        assert METRICS["exposed_exchange"].value(measured) == pytest.approx(0.01 * step / 16 / 10e-6)
        assert METRICS["tokens_per_second"].value(measured) == pytest.approx(number / step)


# --- the format -------------------------------------------------------------------------------------------------------------

SWEEP = """\
small_model: {num_layers: 1}
decode: {new_tokens: 4}
graph: {emulate: {compute: {attention: {row_seconds: 1e-6}}}}
set:
  deploy.experts.servers: [1, 2]
  number:
    one: {deploy.attention.micro_batches: 1}
    two: {deploy.attention.micro_batches: 2, decode.batch: 2}
"""


def sweep_of(folder: Path, text: str, *, is_real: bool = False) -> Sweep:
    path = folder / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    return read_sweep(path, is_real)


def test_a_figure_stands_for_all_values_that_it_leaves_open(tmp_path: Path) -> None:
    keys = "metric: tokens_per_second, of: {number: two}, against: {number: one}, x: deploy.experts.servers, curve: '{number}'"
    sweep = sweep_of(tmp_path, f"{SWEEP}figures: [{{{keys}}}]")
    compared = [(each.of, each.against, each.peer) for each in sweep.figures]
    assert compared == [((servers, "two"), (servers, "one"), "one") for servers in ("1", "2")]
    assert [each.label for each in sweep.figures] == [f"deploy.experts.servers={number}, two: tokens per second" for number in (1, 2)]
    assert [each.about for each in sweep.figures] == [{"x": 1, "curve": "two"}, {"x": 2, "curve": "two"}]
    assert sweep.sections_of(("1", "two")).decode == DecodeSection(new_tokens=4, batch=2)
    assert len(list(_compared_together(sweep.figures))) == 2


def test_processes_have_some_of_the_values_and_keys_of_their_own(tmp_path: Path) -> None:
    own = "processes: {only: {deploy.experts.servers: [2]}, set: {decode.new_tokens: 3, deploy.processes: 4}}\n"
    sweep = sweep_of(tmp_path, SWEEP + own + "figures: [{metric: tokens_per_second}]", is_real=True)
    assert [each.of for each in sweep.figures] == [("2", "one"), ("2", "two")]
    sections = sweep.sections_of(("2", "one"))
    assert sections.decode is not None
    assert sections.decode.new_tokens == 3
    assert sections.graph["deploy"] == {"experts": {"servers": 2}, "attention": {"micro_batches": 1}, "processes": 4}


def test_variants_are_measured_between_real_processes(tmp_path: Path) -> None:
    costs = "{compute: {attention: {fixed_seconds: 1e-3}, experts: {fixed_seconds: 1e-3}}}"
    link = "links: {attention-experts: {link: {latency: 100 us, bandwidth: 10 GB/s}}}"
    text = f"""\
small_model: {{num_layers: 1}}
decode: {{batch: 1, new_tokens: 3}}
graph: {{deploy: {{{link}}}, emulate: {costs}}}
set: {{deploy.experts.servers: [1, 2]}}
figures: [{{metric: step_seconds, of: {{deploy.experts.servers: 2}}, against: {{deploy.experts.servers: 1}}}}]
"""
    report = run_benchmark("real", measure_sweep(sweep_of(tmp_path, text, is_real=True), 50.0), 1)
    (figure,) = report.figures
    assert figure.ours.median > 2000  # microseconds of attention and experts


def test_without_figures_the_first_key_is_drawn(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, SWEEP)
    assert [each.about for each in sweep.figures] == [{"x": x, "curve": curve} for x in (1, 2) for curve in ("one", "two")]
    assert sweep.labels == {"xlabel": "deploy.experts.servers", "ylabel": "tokens per second"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ":1: nothing is not a mapping"),
        ("graph: {}", ":1: set: is missing"),
        ("set: {}", ":1: set: is empty"),
        ("set: {deploy.experts.servers: 2}", ":1: set.deploy.experts.servers: 2 is not a list"),
        ("set: {a: []}", ":1: set.a: has no value"),
        ("set: {a: [1]}\nfigurs: []", ":2: figurs: unknown key 'figurs'; did you mean 'figures'"),
        ("set: {a: [1]}\nemulate: {}", ":2: emulate: unknown key 'emulate'; known: "),
        ("set: {a: [1]}\ndecode: {new_tokens: 1}", ":2: decode.new_tokens: 1 is too small; write 2"),
        (f"set: {{a: {[*range(40)]}, b: {[*range(40)]}}}", ":1: set: 1600 combinations are more"),
        (SWEEP + "figures:\n  - {metric: tokens}", ":10: figures.0.metric: there is no metric 'tokens'"),
        (SWEEP + "figures:\n  - {metric: busy_share, of: {numbr: two}}", ":10: figures.0.of.numbr: nothing under set: is called 'numbr'"),
        (SWEEP + "figures:\n  - {metric: busy_share, of: {number: ten}}", ":10: figures.0.of.number: number has no value 'ten'"),
        (SWEEP + "figures:\n  - {metric: busy_share, x: numbr}", ":10: figures.0.x: 'numbr' is neither under set: nor a key"),
        (SWEEP + "figures:\n  - {metric: busy_share, at_least: 1, at_most: 2}", ":10: figures.0.at_most: a figure has one target"),
        (SWEEP + "figures:\n  - {metric: inter_token_p50_seconds}", ":10: figures.0.metric: inter_token_p50_seconds is a metric of"),
        (SWEEP + "processes: {only: {number: [ten]}}", ":9: processes.only.number: number has no value 'ten'"),
    ],
)
def test_wrong_files_are_one_line(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(UserError) as raised:
        sweep_of(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path}/sweep.yaml{error}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (SWEEP.replace("micro_batches: 2", "micro_batches: x"), ":8: deploy.attention.micro_batches: 'x' is not"),
        (SWEEP.replace("batch: 2", "stop: experts.9"), ":8: decode.stop: there is no process 'experts.9'"),
        (SWEEP.replace("decode: {new_tokens: 4}", "traffic: {load: no.jsonl}").replace(", decode.batch: 2", ""), ":2: --traffic "),
        (SWEEP.replace("{emulate", "{emulat: 1, emulate"), ":3: emulat: unknown key 'emulat'; did you mean 'emulate'"),
        (SWEEP + "traffic: {load: 'in=2,out=2,rate=1'}", ":1: a variant has one of decode: and traffic:"),
    ],
)
def test_wrong_variants_are_one_line(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(UserError) as raised:
        read_variant(sweep_of(tmp_path, text), ("2", "two"), tmp_path, 1.0)
    assert str(raised.value).startswith(f"{tmp_path}/sweep.yaml{error}")
    assert "\n" not in str(raised.value)
