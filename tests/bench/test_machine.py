"""`flowrt profile` and `flowrt bench machine`: fits to times with known constants, the card, and one real profile of tiny sizes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from flowrt.bench.cases.machine import BATCHES, ComparedRun, check_card, figures, shapes
from flowrt.bench.machine.calls import SIZES, config_of
from flowrt.bench.machine.constants import FITTED, FitErrors, MeasuredCall, MeasuredStep, fit_device, fit_link, fit_runtime
from flowrt.bench.machine.profile import MachineProfile, ProfileOptions, card_text, profile_machine
from flowrt.bench.machine.shapes import RunLoad, RunSpeeds
from flowrt.bench.report.report import Machine
from flowrt.costs.devices import FIELDS, Device, read_device
from flowrt.costs.links import link_label
from flowrt.costs.work import FiringLoad
from flowrt.errors import UserError
from flowrt.graph.kinds import kind_of
from flowrt.kinds.device_times import device_seconds
from flowrt.planner.inputs import read_hardware

MACHINE = Machine("a processor", 2, "Linux", {"python": "3.12", "flowrt": "0.1"}, 0.0)
CPU = replace(
    read_device("h20"),
    bytes_per_second=30e9,
    flops_per_second={"bfloat16": 500e9, "float32": 250e9},
    within=link_label({"latency": "30 us", "bandwidth": "3 GB/s"}),
    between=link_label({"latency": "90 us", "bandwidth": "1 GB/s"}),
    devices_per_node=2,
).with_constants(
    {
        **{"fixed": 60e-6, "bandwidth_efficiency": 0.6, "flops_efficiency": 0.9, "feed": 5e12, "half_rows": 12},
        **{"attention_efficiency": 0.1, "kv_efficiency": 0.3, "expert": 20e-6},
        **{"step": 300e-6, "sequence": 50e-6, "firing": 70e-6, "message": 20e-6},
    }
)


def measured_on(device: Device, dtypes: tuple[str, ...], spread: float = 0.0) -> list[MeasuredCall]:
    """The times that the model itself gives, each off by up to `spread`."""
    chance, found = random.Random(0), list[MeasuredCall]()
    for dtype, sizes, rows in product(dtypes, range(len(SIZES)), (1, 4, 16, 64, 256)):
        config = config_of(sizes, dtype)
        loads = {"gate": [FiringLoad(rows)], "embed": [FiringLoad(rows)]}
        loads["experts"] = [FiringLoad(4 * rows, min(4 * rows, config.num_experts))]
        loads["attention"] = [FiringLoad(rows, 0, rows * context, rows * context) for context in (64, 1024)]
        loads["attention"].append(FiringLoad(rows, 0, rows, rows * (rows + 1) / 2))
        for operator, each in loads.items():
            for load in each:
                seconds = device_seconds(device, kind_of(operator), config, load) * (1 + chance.uniform(-spread, spread))
                found.append(MeasuredCall(config, operator, load, seconds))
    return found


def test_the_fit_finds_the_constants_of_each_dtype() -> None:
    true = replace(CPU, by_dtype={"float32": CPU.with_constants({"fixed": 30e-6, "half_rows": 4})})
    found = fit_device(replace(CPU, by_dtype={}), measured_on(true, ("bfloat16", "float32")))
    names = ("fixed", "bandwidth_efficiency", "attention_efficiency", "kv_efficiency", "expert")
    assert found.half_rows == pytest.approx(CPU.half_rows, rel=0.15)  # products in float32 wait for memory, which hides theirs
    for own, expected in ((found, true), (found.by_dtype["float32"], true.by_dtype["float32"])):
        for name in names:
            assert getattr(own, FIELDS[name]) == pytest.approx(getattr(expected, FIELDS[name]), rel=0.15), name
    assert FitErrors.of([call.error(found) for call in measured_on(true, ("bfloat16", "float32"))]).worst < 0.05


def test_the_fit_of_times_that_are_off_keeps_every_share_at_most_1() -> None:
    calls = measured_on(CPU, ("bfloat16",), 0.2)
    found = fit_device(replace(CPU, flops_per_second={"bfloat16": 1e9}), calls)  # calls show a higher peak than what was measured
    assert found.peak("bfloat16") > 100e9
    assert all(0 < getattr(found, FIELDS[name]) <= 1 for name in FITTED if name.endswith("efficiency"))
    assert FitErrors.of([call.error(found) for call in calls if call.operator != "embed"]).median < 0.15


def test_links_and_the_runtime_are_fitted_with_no_constant_below_0() -> None:
    assert fit_link({size: 40e-6 + size / 2e9 for size in (64, 1 << 16, 1 << 20)}) == pytest.approx((40e-6, 2e9))
    true = {"step": 300e-6, "sequence": 50e-6, "firing": 70e-6, "message": 20e-6}
    terms = [(1.0, batch, firings, messages) for batch in (1, 8) for firings, messages in ((0, 0), (8, 32), (8, 64))]
    steps = [MeasuredStep(5e-3 + sum(n * each for n, each in zip(term, true.values(), strict=True)), 5e-3, term) for term in terms]
    assert fit_runtime(steps) == pytest.approx(true)
    assert min(fit_runtime([replace(step, predicted=6e-3) for step in steps]).values()) == 0


def test_the_card_can_be_read_back(tmp_path: Path) -> None:
    errors = FitErrors(0.1, 0.2, 9)
    device = replace(CPU, by_dtype={"float32": CPU.with_constants({"half_rows": 4})})
    card = tmp_path / "machine.yaml"
    profile = MachineProfile(device, errors, {}, errors)
    card.write_text(card_text(profile, MACHINE, ProfileOptions(1, 2, ("bfloat16",)), "flowrt profile", "a: b #c.yaml"))
    found = read_device(card)
    for name in (*FITTED, "step", "sequence", "firing", "message"):
        assert getattr(found, FIELDS[name]) == pytest.approx(getattr(CPU, FIELDS[name]), rel=0.01), name
    assert (found.within, found.devices_per_node, found.by_dtype["float32"].half_rows) == (CPU.within, 2, 4)
    assert "2 cores of a processor; flowrt profile; python 3.12, flowrt 0.1" in found.sources["bandwidth"]
    assert found.sources["between"].startswith("the ways between the hosts of a: b #c.yaml; 2 cores")
    assert read_hardware(str(card)).num_devices == 2
    check_card(found)
    check_card(replace(found, step_seconds=0.0, firing_seconds=0.0))  # a fit may end there
    with pytest.raises(UserError, match="give a card of flowrt profile"):
        check_card(read_device("h20"))


def test_a_profile_of_tiny_sizes_gives_a_card(tmp_path: Path) -> None:
    options = ProfileOptions(1, 1, ("float32",), is_tiny=True)
    found = asyncio.run(profile_machine(options))
    card = tmp_path / "machine.yaml"
    card.write_text(card_text(found, MACHINE, options, "flowrt profile", None))
    device = read_device(card)
    assert {"bfloat16", "float32"} == set(device.flops_per_second)
    assert device.fixed_seconds > 0 < device.links[0].latency_seconds
    assert {"attention", "gate", "experts", "head"} == set(found.by_operator)


def test_the_comparison_has_thirty_shapes_and_judges_the_deployment_that_is_picked() -> None:
    assert len(set(shapes())) == 30
    assert {batch for *_, batch in shapes()} == set(BATCHES)
    slow = ComparedRun(1, 0, 8, RunSpeeds(100, 1.0), RunSpeeds(90, 1.0))
    fast = ComparedRun(2, 0, 8, RunSpeeds(90, 1.0), RunSpeeds(100, 2.0))
    found = {figure.name: figure.ours.median for figure in figures([slow, fast])}
    assert found["tokens/s lost by the deployment that is picked, worst batch"] == pytest.approx(10)
    assert found["decode, worst error"] == pytest.approx(100 / 9)
    assert found["prefill, median error"] == pytest.approx(25)
    assert RunLoad(7).of_groups(3) == [3, 2, 2]
