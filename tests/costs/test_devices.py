"""Cards of devices, clusters and models: their facts, sources and errors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flowrt.costs.devices import CONSTANTS, cluster_names, device_names, families, read_cluster, read_device
from flowrt.costs.models import read_model_card
from flowrt.costs.quantities import read_quantity
from flowrt.costs.work import Work
from flowrt.errors import UserError
from flowrt.kinds.weights import weight_elements
from flowrt.operators.families.family import part_shapes, parts_to_read
from flowrt.operators.model_config import EXPERT_PARTS

FACTS = ("memory", "bandwidth", "flops", "within", "between", "devices_per_node")
# Model -> billions of parameters in routed and shared experts, and in all, as published.
PUBLISHED = {
    "deepseek-r1": (656.5, 671),
    "deepseek-v2": (225.5, 236),
    "kimi-k2": (1017, 1026),
    "qwen3-235b": (227.1, 235),
    "qwen3-30b": (29.0, 30.5),
    "mixtral-8x22b": (135.3, 141),
    "dbrx": (126.8, 132),
    "scaled-moe": (309.2, 317),
}


@pytest.mark.parametrize("name", device_names())
def test_each_number_of_a_device_has_a_source(name: str) -> None:
    device = read_device(name)
    priced = [*(["price"] if device.price is not None else []), *(["power"] if device.watts is not None else [])]
    assert set(device.sources) == {*FACTS, *priced}
    assert all(text.strip() for text in device.sources.values())
    assert all(link.bandwidth_bytes_per_second > 0 for link in device.links)


def test_constants_are_few_and_each_has_a_meaning() -> None:
    assert len(CONSTANTS) <= 12
    assert all(meaning for _, meaning in CONSTANTS.values())
    assert all(set(constants) == set(CONSTANTS) for constants in families().values())


def test_time_of_a_call_is_its_fixed_part_and_the_longer_of_bytes_and_flops() -> None:
    h800 = read_device("h800")
    reading = h800.seconds(Work(3430.4e9), "bfloat16") - h800.fixed_seconds
    assert reading == pytest.approx(1 / h800.bandwidth_efficiency)
    computing = h800.seconds(Work(0, 989e12), "bfloat16") - h800.fixed_seconds
    assert computing == pytest.approx(1 / h800.efficiency(math.inf))
    assert h800.efficiency(h800.half_rows) == pytest.approx(h800.efficiency(math.inf) / 2)
    assert 1 / h800.efficiency(math.inf) == pytest.approx(1 / h800.flops_efficiency + 989e12 / h800.feed_flops_per_second)
    assert h800.efficiency(math.inf, "fp8") < h800.efficiency(math.inf)  # a peak that what feeds it cannot keep up with
    assert h800.seconds(Work(1e9, 1e12), "bfloat16", 1) > h800.seconds(Work(1e9, 1e12), "bfloat16", 4096)
    assert read_device("a800").peak("fp8") == 312e12  # no units for it: computed in 16 bits
    with pytest.raises(UserError, match="no rate for 'float8'"):
        h800.peak("float8")


def test_clusters_name_devices() -> None:
    assert {name: read_cluster(name).num_devices for name in cluster_names()} == {
        **{"h20-2x8": 16, "910b-4x8": 32, "a800-8x8": 64, "h20-l40s": 64, "h800-4x8": 32, "superpod-384": 768}
    }


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_of_a_model_card_are_those_published(name: str) -> None:
    config = read_model_card(name)
    read = parts_to_read(config)
    shared = tuple(part for part in ("shared_gate_up", "shared_down") if part in read)
    per_layer = weight_elements(config, EXPERT_PARTS) * config.num_experts + (weight_elements(config, shared) if shared else 0)
    experts = per_layer * len(config.moe_layers)
    shapes = part_shapes(config)
    rest = sum(math.prod(shapes[part]) * len(list(layers)) for part, layers in read.items() if part not in (*EXPERT_PARTS, *shared))
    assert experts / 1e9 == pytest.approx(PUBLISHED[name][0], rel=0.001)
    assert (experts + rest) / 1e9 == pytest.approx(PUBLISHED[name][1], rel=0.006)


def test_kv_of_a_token_is_that_published() -> None:
    assert read_model_card("deepseek-r1").kv_elements == 35_136
    assert read_model_card("deepseek-r1").kv_elements * 2 / 1024 == pytest.approx(68.6, abs=0.05)


def test_weights_of_a_card_may_be_held_in_8_bits() -> None:
    assert read_model_card("deepseek-r1", "int8").expert_weights == "int8"


def test_any_config_file_is_a_model_card(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path("examples/tiny-moe/config.json").read_text())
    assert read_model_card(tmp_path).num_experts == read_model_card(tmp_path / "config.json").num_experts > 0


def test_a_card_of_the_user(tmp_path: Path) -> None:
    card = tmp_path / "mine.yaml"
    card.write_text(
        "family: hopper\nmemory: 32 GB\nbandwidth: 1.5 TB/s\nflops: {bfloat16: 200 TFLOPS}\nwithin: pcie-4\nbetween: roce-100g\n"
        "fixed: 9 us\n"
    )
    device = read_device(card)
    assert (device.name, device.fixed_seconds, device.bytes_per_second) == ("mine", 9e-6, 1.5e12)
    assert device.flops_efficiency == read_device("h800").flops_efficiency


def test_a_card_may_have_links_of_its_own_and_constants_of_a_runtime_and_of_a_dtype(tmp_path: Path) -> None:
    card = tmp_path / "mine.yaml"
    card.write_text(
        "family: hopper\nmemory: 32 GB\nbandwidth: 1.5 TB/s\nflops: {bfloat16: 2 TFLOPS, float32: 1 TFLOPS}\n"
        "within: {latency: 30 us, bandwidth: 3 GB/s}\nbetween: {latency: 90 us, bandwidth: 8 Gbit/s, message: 2 us}\n"
        "step: 300 us\nfiring: 70 us\nmessage: 20 us\ndtypes: {float32: {half_rows: 2}}\n"
    )
    device = read_device(card)
    within, between = device.links
    assert (within.latency_seconds, within.bandwidth_bytes_per_second, within.message_seconds) == (3e-5, 3e9, 0.0)
    assert (between.latency_seconds, between.bandwidth_bytes_per_second, between.message_seconds) == (9e-5, 1e9, 2e-6)
    assert (device.step_seconds, device.firing_seconds, device.message_seconds, device.sequence_seconds) == (3e-4, 7e-5, 2e-5, 0.0)
    assert device.by_dtype["float32"].half_rows == 2 < device.half_rows
    assert device.by_dtype["float32"].fixed_seconds == device.fixed_seconds


def test_a_card_with_all_constants_needs_no_family(tmp_path: Path) -> None:
    rest = "memory: 32 GB\nbandwidth: 1.5 TB/s\nflops: {bfloat16: 200 TFLOPS}\nwithin: pcie-4\nbetween: roce-100g\n"
    amounts = {"s": "1 us", "flop/s": "1 TFLOPS", "": "0.5"}
    constants = [f"{name}: {amounts[unit]}" for name, (unit, _) in CONSTANTS.items()]
    (tmp_path / "all.yaml").write_text("\n".join([rest, *constants]))
    assert read_device(tmp_path / "all.yaml").jitter == 0.5
    (tmp_path / "most.yaml").write_text("\n".join([rest, *constants[1:]]))
    with pytest.raises(UserError, match="family is missing; add it"):
        read_device(tmp_path / "most.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pcie-4", "{latency: 30 us}", r"within: a link needs bandwidth"),
        ("pcie-4", "{latency: 30 GB, bandwidth: 1 GB/s}", r"within: latency: '30 GB' has the unit 'GB'"),
        ("pcie-4", "{latenc: 3 us, bandwidth: 1 GB/s}", r"within: unknown number 'latenc' of a link; did you mean 'latency'\?"),
        ("pcie-4", "latency_seconds=nan,bandwidth_bytes_per_second=5", r"mine.yaml:5: within: unknown link"),
        ("pcie-4", "latency_seconds=1,bandwidth_bytes_per_second=0", r"mine.yaml:5: within: unknown link"),
        ("roce-100g", "latency_seconds=-1,bandwidth_bytes_per_second=5", r"between: unknown link"),
        ("roce-100g", "{latency_seconds: 1e300, bandwidth: 1 GB/s}", r"between: latency_seconds: 1e\+300 is not a number of a link"),
        ("family", "feed: 0 TFLOPS\nfamily", r"mine.yaml:1: feed: is '0 TFLOPS'; a rate above 0 is needed"),
        ("family", "bulk_share: 2\nfamily", r"mine.yaml:1: bulk_share: is 2; a share from 0 to 1 is needed"),
        ("family", "dtypes: {float32: {fixd: 1 us}}\nfamily", r"mine.yaml:1: dtypes.float32.fixd: unknown key; did you mean 'fixed'\?"),
        ("32 GB", "32", r"memory: 32 has no unit; write a number with a unit, such as '80 GB'"),
        ("32 GB", "32 GB/s", r"memory: '32 GB/s' has the unit 'GB/s'"),
        ("32 GB", "-1 GB", r"memory: '-1 GB' is not a quantity"),
        ("32 GB", "0 GB", r"memory: is 0; a number above 0 is needed"),
        ("32 GB", ".nan", r"mine.yaml:2: memory: '.nan' is not a quantity"),
        ("32 GB", "1e300 GB", r"mine.yaml:2: memory: '1e300 GB' is not a number from 0 to 1e\+24"),
        ("32 GB", "&all [32 GB]", r"mine.yaml:2: memory: '&all' is an anchor"),
        ("32 GB", "[1]", r"memory: \[1\] is not a quantity"),
        ("hopper", "hoper", r"unknown family 'hoper'; did you mean 'hopper'\?"),
        ("hopper", "3", r"unknown family '3'; known: ada, ampere, ascend, hopper"),
        ("pcie-4", "pcie4", r"unknown link 'pcie4'; did you mean 'pcie-4'\?"),
        ("memory:", "memori:", r"memory is missing; add it"),
        ("bfloat16:", "fp8:", r"flops: bfloat16 is missing"),
        ("{bfloat16: 200 TFLOPS}", "fast", r"flops: is 'fast'; a mapping"),
        ("family", "colour: red\nfamily", r"mine.yaml:1: colour: unknown key"),
        ("family", "bandwidth_efficiency: 1.5\nfamily", r"a share above 0 and up to 1"),
        ("family: hopper", "[", r"not YAML"),
        ("family: hopper", "{family: {1: 2}}", r"not YAML"),
    ],
)
def test_bad_cards_are_refused_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    good = "family: hopper\nmemory: 32 GB\nbandwidth: 1.5 TB/s\nflops: {bfloat16: 200 TFLOPS}\nwithin: pcie-4\nbetween: roce-100g\n"
    card = tmp_path / "mine.yaml"
    card.write_text(good.replace(old, new, 1))
    with pytest.raises(UserError, match=message) as caught:
        read_device(card)
    assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_what_exists_and_the_closest_one() -> None:
    with pytest.raises(UserError, match=r"unknown device 'h801': did you mean 'h800'\? Known: 910b, 910c, a800"):
        read_device("h801")
    with pytest.raises(UserError, match=r"unknown model 'deepseek-v9': did you mean 'deepseek-v2'\? Known: dbrx"):
        read_model_card("deepseek-v9")
    with pytest.raises(UserError, match=r"model_type: is None"):
        read_model_card(Path("flowrt/costs/cards/devices/h800.yaml"))


def test_quantities_have_units() -> None:
    assert read_quantity("5 us", "s", "") == 5e-6
    assert read_quantity("400 Gbit/s", "B/s", "") == 50e9
    assert read_quantity("2h", "s", "") == 7200
    assert read_quantity(1.85, "", "") == 1.85
    with pytest.raises(UserError, match="has a unit; write a plain number"):
        read_quantity("5 us", "", "price")
