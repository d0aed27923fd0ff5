"""Exchange patterns in virtual time: step times are those of the equations, and the benchmarks' figures follow from the runs."""

from __future__ import annotations

from typing import Any

import pytest

from flowrt.api import read_graph
from flowrt.bench.cases import colocated, dispatch, domains, overlap, trampoline_cost
from flowrt.bench.cases.patterns import Runs
from flowrt.bench.cases.small_model import TOP_K, write_small_model
from flowrt.bench.measure.benchmark import run_benchmark
from flowrt.bench.measure.modelled import ModelledRun, simulated_run
from flowrt.costs.ping_pong import PingPong
from flowrt.graph.model import Graph

LAYERS = 4
TIMES = PingPong(100e-6, 60e-6, 28e-6)


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


def test_figures_of_the_overlap_benchmark_follow_from_its_runs() -> None:
    def run(step_seconds: float, batch: int, busy: float) -> ModelledRun:
        return ModelledRun((step_seconds,) * batch, {"experts.0": busy}, {}, ())

    times = PingPong(1.0, 1.0, 0.1)
    numbers = overlap.VIRTUAL_MICRO_BATCHES
    runs = [[run(times.step_seconds(m, overlap.NUM_LAYERS), m, 0.99)] for m in numbers]
    second, third, third_to_one, fourth, *away, exposed = overlap._figures(times, 0.1, numbers, runs)
    assert second.ours.median == pytest.approx(2 / times.step_seconds(2, overlap.NUM_LAYERS))
    assert third.ratio is not None
    assert third.ratio.median == pytest.approx(1.5 * times.step_seconds(2, 16) / times.step_seconds(3, 16))
    assert [figure.about["x"] for figure in (second, third_to_one, fourth)] == [2, 3, 4]
    assert fourth.ratio is not None
    assert fourth.ratio.median == pytest.approx(4 * times.step_seconds(1, 16) / times.step_seconds(4, 16))
    assert [figure.ours.median for figure in away] == pytest.approx([0.0] * 4)
    assert exposed.ours.median == pytest.approx(0.01 * times.step_seconds(3, 16) / 16 / 0.1)


def test_the_benchmark_runs_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "EXCHANGE_SHARES", (0.28,))
    monkeypatch.setattr(overlap, "NUM_LAYERS", 4)
    monkeypatch.setattr(overlap, "DYNAMIC_LAYERS", 1)
    monkeypatch.setattr(overlap, "DYNAMIC_TOKENS", 40)
    report = run_benchmark("overlap", overlap.measure_overlap(virtual=True, dilation=1.0), 1)
    second, third, *_ = report.figures
    assert [second.verdict, third.verdict] == ["met", "met"]
    assert not report.notes


def test_domains_keep_the_experts_busy_and_a_stopped_one_slows_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "NUM_LAYERS", 4)
    monkeypatch.setattr(domains, "NEW_TOKENS", 6)
    monkeypatch.setattr(domains, "NUMBERS", (1, 3))
    report = run_benchmark("domains", domains.measure_domains(virtual=True, dilation=1.0), 1)
    gain, busy, _, turns, stopped = report.figures
    assert gain.ratio is not None
    assert gain.ratio.median == pytest.approx(3.0, rel=0.05)
    assert turns.ratio is not None
    assert turns.ratio.median >= 1.0
    assert [busy.verdict, stopped.verdict] == ["met", "met"]


def test_a_stalled_client_delays_others_only_when_counts_of_all_ranks_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "NUM_LAYERS", 2)
    monkeypatch.setattr(dispatch, "NEW_TOKENS", 6)
    monkeypatch.setattr(dispatch, "STALL_SECONDS", (0.2,))
    report = run_benchmark("dispatch", dispatch.measure_dispatch(virtual=True, dilation=1.0), 1)
    per_client, all_ranks, undisturbed = report.figures
    assert per_client.verdict == "met"
    assert all_ranks.ours.median == pytest.approx(0.2e6 / 5, rel=0.1)  # the stall, in 5 steps
    assert undisturbed.ratio is not None
    assert undisturbed.ratio.median == pytest.approx(1.0, abs=0.02)


def test_colocated_experts_are_compared_with_servers_and_with_whole_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "NUM_LAYERS", 2)
    monkeypatch.setattr(colocated, "NEW_TOKENS", 6)
    monkeypatch.setattr(colocated, "EXPERT_SECONDS", (5e-6, 60e-6))
    report = run_benchmark("colocated", colocated.measure_colocated(virtual=True, dilation=1.0), 1)
    to_servers, to_whole, *_, waiting, busy = [figure.ratio.median for figure in report.figures if figure.ratio is not None]
    assert to_servers > 1.2, "half of the processes have the attention of all sequences"
    assert 0.8 < to_whole < 1.2
    assert waiting > 1.0
    assert busy < 0.75, "a server that waits reads the weights of an expert for several requests at once"


def test_trampolines_save_messages_and_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[ModelledRun] = []
    figures = trampoline_cost._figures

    def keep(servers: int, groups: int, in_step: bool, found: Runs) -> Any:
        runs.extend(run for each in found for run in each)
        return figures(servers, groups, in_step, found)

    monkeypatch.setattr(trampoline_cost, "SIZES", ((8, 2),))
    monkeypatch.setattr(trampoline_cost, "TARGET_SIZE", (8, 2))
    monkeypatch.setattr(trampoline_cost, "_figures", keep)
    report = run_benchmark("trampoline", trampoline_cost.measure_trampoline(virtual=True, dilation=1.0), 1)
    step, messages, updates, num_bytes, *in_step = report.figures
    assert step.ratio is not None
    assert len(in_step) == 4
    assert messages.ours.median == pytest.approx(2.0, rel=0.02)
    assert updates.ours.median == messages.ours.median / 8
    assert updates.verdict == "met"
    assert num_bytes.ratio is not None
    assert 1.0 < num_bytes.ratio.median < 2.0
    assert runs[0].tokens == runs[1].tokens
