"""Emulated devices: times and bytes of another model on named devices, in virtual time, while a small checkpoint gives the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from flowrt.api import read_graph
from flowrt.bench.measure.modelled import ModelledRun, simulated_run
from flowrt.costs.devices import read_device
from flowrt.costs.links import PROFILES
from flowrt.costs.models import read_model_card
from flowrt.costs.work import FiringLoad
from flowrt.errors import GraphError
from flowrt.graph.emulated import StandIn, device_name, emulation_note
from flowrt.graph.kinds import kind_of
from flowrt.graph.settings import Emulation
from flowrt.kinds.device_times import device_seconds
from flowrt.launcher.model_facts import facts_of
from flowrt.operators.model_config import ModelConfig

WIDE = {"hidden_size": 2048, "moe_intermediate_size": 1408, "intermediate_size": 10944, "n_shared_experts": 2, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), architecture="deepseek_v2", layers=3)


def card(folder: Path, checkpoint: Path, **changes: Any) -> Path:
    """A model card with the routing of the checkpoint and other sizes."""
    config = json.loads((checkpoint / "config.json").read_text())
    path = folder / "wide.json"
    path.write_text(json.dumps(config | WIDE | changes))
    return path


def graph(checkpoint: Path, model: Path | None, devices: dict[str, Any], **deploy: Any) -> Any:
    sections = {"attention": {"groups": 1}, "experts": {"servers": 1}, "links": {"attention-experts": {"link": "ub"}}} | deploy
    emulate = {"dilation": 100, "devices": devices} | ({} if model is None else {"model": str(model)})
    return read_graph({"flowrt": 1, "model": {"path": str(checkpoint)}, "deploy": sections, "emulate": emulate})


def seconds(device: str, config: ModelConfig, **loads: FiringLoad) -> float:
    return sum(device_seconds(read_device(device), kind_of(kind), config, load) for kind, load in loads.items())


def expected_step(config: ModelConfig, attention: str, experts: str, kv_tokens: float) -> float:
    """One sequence, one group and one server: shared experts are computed while the row is at the server and on its way."""
    row, link = FiringLoad(1), PROFILES["ub"]
    attend = FiringLoad(1, 0, kv_tokens, kv_tokens)
    active = config.num_experts_per_token
    request = config.hidden_size * 2 + active * (8 + 8 + 2)
    exchange = link.seconds(request) + link.seconds(config.hidden_size * 2)
    routed = seconds(experts, config, experts=FiringLoad(active, active)) + exchange
    layer = seconds(attention, config, attention=attend, gate=row) + max(routed, seconds(attention, config, shared=row))
    dense = seconds(attention, config, attention=attend, mlp=row)
    return len(config.moe_layers) * layer + len(config.dense_layers) * dense + seconds(attention, config, embed=row, head=row)


@pytest.mark.parametrize(("attention", "experts"), [("h20", "l40s"), ("910c", "h800")])
def test_a_step_takes_the_times_and_bytes_of_the_card(checkpoint: Path, tmp_path: Path, attention: str, experts: str) -> None:
    wide = card(tmp_path, checkpoint)
    run = simulated_run(graph(checkpoint, wide, {"attention": attention, "experts": experts}), batch=1, new_tokens=8)
    assert run.mean_step_seconds == pytest.approx(expected_step(read_model_card(wide), attention, experts, 8), rel=0.01)


def test_layers_of_the_checkpoint_stand_for_several(checkpoint: Path, tmp_path: Path) -> None:
    """Without micro-batches nothing overlaps between layers, so that a layer that stands for three takes as long as three."""
    config = json.loads((checkpoint / "config.json").read_text())
    num_dense = config["first_k_dense_replace"]
    num_moe = config["num_hidden_layers"] - num_dense
    wide = card(tmp_path, checkpoint, num_hidden_layers=num_dense + 3 * num_moe)
    emulated = graph(checkpoint, wide, {"attention": "h20", "experts": "h20"})
    run = simulated_run(emulated, batch=1, new_tokens=8)
    assert run.mean_step_seconds == pytest.approx(expected_step(read_model_card(wide), "h20", "h20", 8), rel=0.01)
    assert "each layer with experts counts as 3" in emulation_note(emulated, facts_of(checkpoint))


def test_two_kinds_of_device_in_one_role_and_prefill_on_a_third(checkpoint: Path, tmp_path: Path) -> None:
    wide, devices = card(tmp_path, checkpoint), {"attention": ["h20", "l20"], "experts": "h800"}

    def run(devices: dict[str, Any]) -> ModelledRun:
        return simulated_run(graph(checkpoint, wide, devices, attention={"groups": 2}, experts={"servers": 2}), batch=2, new_tokens=6)

    both, fast, slow = run(devices), run(devices | {"attention": "h20"}), run(devices | {"attention": "l20"})
    assert max(fast.step_seconds) < max(both.step_seconds) <= max(slow.step_seconds) * 1.01
    assert min(both.step_seconds) == pytest.approx(min(fast.step_seconds), rel=0.02)
    assert both.tokens == fast.tokens == slow.tokens


def test_a_process_has_the_device_of_its_name_before_that_of_its_role() -> None:
    emulation = Emulation(1.0, devices={"attention": ("h20", "l20"), "attention.2": "l40s", "experts": "910c"})
    names = ("attention.0", "attention.1", "attention.2", "attention.3", "experts.7", "prefill.0")
    assert [device_name(emulation, name) for name in names] == ["h20", "l20", "l40s", "l20", "910c", None]


@pytest.mark.parametrize(
    ("emulate", "text"),
    [
        ({"devices": {"attention": "h21"}}, "did you mean 'h20'"),
        ({"devices": {"attentoin": "h20"}}, "did you mean 'attention'"),
        ({"devices": {"attention.1": "h20"}}, "no process has the role or name 'attention.1'"),
        ({"devices": {"attention": []}}, "emulate.devices.attention: names no device; write one of 910b"),
        ({"devices": {"attention": 3}}, "emulate.devices.attention"),
        ({"devices": {"attention": "h20"}, "model": "deepsek-r1"}, "did you mean 'deepseek-r1'"),
        ({"devices": {"attention": "h20"}, "model": "deepseek-r1"}, "needs a checkpoint with as many experts and experts per token"),
    ],
)
def test_wrong_devices_and_models_give_one_line(checkpoint: Path, emulate: dict[str, Any], text: str) -> None:
    with pytest.raises(GraphError) as caught:
        read_graph({"flowrt": 1, "model": {"path": str(checkpoint)}, "emulate": {"dilation": 100} | emulate})
    assert text in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_layers_stand_for_whole_layers_only() -> None:
    card = read_model_card("deepseek-r1")
    facts = facts_of(Path(__file__).parents[2] / "flowrt" / "costs" / "cards" / "models" / "deepseek-r1.yaml")
    assert StandIn.of(card, facts) == StandIn(1, 1.0, 0)
    with pytest.raises(ValueError, match="256 experts, 8 per token, in 58 layers, the checkpoint 256 experts, 8 per token, in 60 layers"):
        StandIn.of(card, type(facts)(**{**vars(facts), "moe_layers": tuple(range(60)), "num_layers": 60}))
    assert StandIn.of(card, type(facts)(**{**vars(facts), "moe_layers": (0, 1), "num_layers": 2})) == StandIn(29, 0.0, 3)
