"""What the cost model says about each published row: one function per kind of measurement, none with constants of its own. Rows name them.

Each takes the costs and what the row gives, and returns base units (seconds, bytes or tokens per second, shares), or for an ordering a
value by choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from flowrt.costs.devices import FIELDS, Device, calibrated_family, read_device
from flowrt.costs.exchange import (
    Routing,
    bulk_exchange_seconds,
    exchange_seconds,
    fabric_of,
    hybrid_exchange_seconds,
    overlapped_seconds,
    row_bytes,
    transfer_seconds,
)
from flowrt.costs.links import profile_of
from flowrt.costs.models import read_model_card
from flowrt.costs.work import Work
from flowrt.operators.model_config import KeptWeights, ModelConfig
from flowrt.planner.closed_form import (
    ClosedStep,
    SplitDeployment,
    UniformDeployment,
    decode_step,
    layer_times,
    prefill_step,
    reduce_seconds,
    split_layer,
)

Value = float | dict[Any, float]


@dataclass(frozen=True)
class Costs:
    """Devices, with constants of families in place of those of the cards: family -> constant -> value."""

    constants: Mapping[str, Mapping[str, float]]

    def device(self, name: str) -> Device:
        device = read_device(name)
        given = self.constants.get(calibrated_family(device.family), {})
        return replace(device, **{FIELDS[constant]: value for constant, value in given.items()})  # type: ignore[arg-type]


def _routing(model: ModelConfig) -> Routing:
    return Routing(model.num_experts, model.num_experts_per_token, model.gate.groups, model.gate.topk_groups)


# ---- communication ----


def exchange(costs: Costs, device: str, endpoints: int, tokens: float, hidden: int, active: int, dtype: str) -> float:
    """Seconds of a dispatch or combine of decode."""
    return exchange_seconds(fabric_of(costs.device(device)), endpoints, tokens * active, hidden, dtype)


def bulk_bandwidth(costs: Costs, device: str, endpoints: int, tokens: float, dtype: str, model: str, over: str) -> float:
    """Bytes per second as DeepEP counts them: rows for each node (`over` nodes) or rank, the sender's own among them."""
    config, fabric = read_model_card(model), fabric_of(costs.device(device))
    seconds = bulk_exchange_seconds(fabric, endpoints, tokens, _routing(config), config.hidden_size, dtype)
    targets = endpoints // fabric.per_node if over == "nodes" else endpoints
    item = 1 if dtype in ("fp8", "int8") else 2
    return tokens * _routing(config).targets(targets) * config.hidden_size * item / seconds


def transfer(costs: Costs, link: str, bytes: float) -> float:
    """Seconds of one message."""
    return transfer_seconds(profile_of(link), bytes)


def crossing(costs: Costs, device: str, endpoints: int, hidden: int, active: int, dtypes: list[str]) -> float:
    """Tokens per rank from which the exchange of the first dtype takes less time than that of the second."""
    fabric = fabric_of(costs.device(device))
    one, other = ([exchange_seconds(fabric, endpoints, rows, hidden, dtype) for rows in (0.0, 1.0)] for dtype in dtypes)
    return (one[0] - other[0]) / ((other[1] - other[0]) - (one[1] - one[0])) / active


def two_stage(costs: Costs, device: str, senders: int, receivers: int, batch: float, hidden: int, active: int, dtype: str) -> float:
    """Seconds of an exchange by trampolines: to as many servers as senders, and from these to all (xDeepServe, section 3.3). The fixed part
    is paid once: kernels of servers wait for data and do not start for it."""
    fabric = fabric_of(costs.device(device))
    first = exchange_seconds(fabric, senders, batch * active, hidden, dtype)
    forwarded = batch * active * (receivers - senders) / receivers
    return first + exchange_seconds(fabric, receivers, forwarded, hidden, dtype) - fabric.fixed_seconds(dtype)


# ---- operators and steps ----


def efficiency(costs: Costs, device: str, of: str) -> float:
    """The share of a limit that operators reach with many rows: a constant, or for a dtype that of its matrix products."""
    card = costs.device(device)
    return card.efficiency(float("inf"), of) if of in card.flops_per_second else float(getattr(card, of))


def _uniform(costs: Costs, model: str, device: str, weights: KeptWeights = "dtype", **given: Any) -> UniformDeployment:
    card = costs.device(device)
    links = {name: given.pop(name) for name in ("within", "between", "per_node") if name in given}
    return UniformDeployment(model=read_model_card(model, weights), device=card, fabric=fabric_of(card, **links), **given)


def _given(step: ClosedStep, deployment: UniformDeployment, give: str, batch: float, per: int) -> float:
    """What a row asks for of a step: its seconds, seconds per token, tokens per second of `per` devices, or shares of operators."""
    gained = 1 + deployment.acceptance * deployment.draft_tokens
    if give == "share attend":
        return step.layer.attend * len(deployment.model.moe_layers) / step.seconds
    if give.startswith("share "):
        return step.share(*give.removeprefix("share ").split("+"))
    if give.startswith("layer "):
        return step.layer.exchanged(give.removeprefix("layer "))
    tokens = batch * deployment.groups / deployment.ranks * per
    return {"step": step.seconds, "tpot": step.seconds / gained, "tokens": tokens * gained / step.seconds}[give]


def decode(costs: Costs, batch: float, context: float, give: str, per: int = 1, **given: Any) -> float:
    deployment = _uniform(costs, **given)
    return _given(decode_step(deployment, batch, context), deployment, give, batch, per)


def prefill(costs: Costs, tokens: float, prompt: float, give: str = "tokens", per: int = 1, **given: Any) -> float:
    deployment = _uniform(costs, **given)
    return _given(prefill_step(deployment, tokens, prompt), deployment, give, tokens, per)


def decode_ratio(costs: Costs, of: dict[str, Any], to: dict[str, Any], **given: Any) -> float:
    """What `decode` says of one deployment over what it says of another."""
    return decode(costs, **given, **of) / decode(costs, **given, **to)


def balance_gain(costs: Costs, batch: float, context: float, **given: Any) -> float:
    """Time saved by placing experts by load, as a share of the step with the native placement."""
    deployment = _uniform(costs, **given)
    native, balanced = (decode_step(replace(deployment, balanced=value), batch, context).seconds for value in (False, True))
    return 1 - balanced / native


def split_step(
    costs: Costs,
    model: str,
    weights: KeptWeights,
    device: str,
    groups: int,
    domains: int,
    servers: int,
    slots: int,
    shared_servers: int,
    batch: float,
    context: float,
    micro_batches: int,
    draft_tokens: int,
    acceptance: float,
    give: str,
) -> float:
    """Attention and experts on devices of their own, in domains that take turns at the expert servers (xDeepServe, section 5.2). Each of
    `groups` attention ranks decodes `batch` sequences in `micro_batches`."""
    config, in_domain = read_model_card(model, weights), groups // domains
    rows = batch * (1 + draft_tokens) / micro_batches
    attention_side = _uniform(costs, model, device, weights, ranks=in_domain)
    # The servers have the rows of one domain at a time: those of so many per server.
    expert_side = _uniform(costs, model, device, weights, ranks=servers, slots=slots, shared_ranks=shared_servers)
    kv_tokens = batch * context / micro_batches
    layer = layer_times(attention_side, rows, kv_tokens, rows * context, is_bulk=False)
    attention, waits = layer.attention + layer.gate, layer.waiting
    experts = layer_times(expert_side, rows * in_domain / servers, kv_tokens, rows * context, is_bulk=False).experts
    active = config.num_experts_per_token + (shared_servers > 0)
    sizes = in_domain, servers, rows, config.hidden_size, active
    there, back = (two_stage(costs, device, *sizes, dtype) for dtype in ("int8", config.dtype))
    # Servers receive, compute and send in three streams, and serve each domain once for every micro-batch of a layer.
    turn, round_trip = max(experts, there, back), attention + there + experts + back + waits
    period = max(micro_batches * max(attention, domains * turn), round_trip)
    dense = micro_batches * attention * len(config.dense_layers)
    seconds = period * (len(config.moe_layers) + draft_tokens) + dense + round_trip - attention
    gained = 1 + acceptance * draft_tokens
    return {
        "step": seconds,
        "tpot": seconds / gained,
        "tokens": batch * groups * gained / seconds / ((groups + servers) / 2),
        "a2e": there,
        "e2a": back,
        "experts": experts,
    }[give]


# ---- MegaScale-Infer ----


def _split(costs: Costs, model: str, attention: str, experts: str, weights: KeptWeights = "dtype", **given: Any) -> SplitDeployment:
    config, one, other = read_model_card(model, weights), costs.device(attention), costs.device(experts)
    given = {"expert_nodes": config.num_experts, "attention_fabric": fabric_of(one), "expert_fabric": fabric_of(other), **given}
    return SplitDeployment(model=config, attention=one, experts=other, **given)


def _split_throughput(deployment: SplitDeployment, micro_batch: float, context: float) -> tuple[float, float]:
    """Tokens per second, and seconds per token."""
    times, layers = split_layer(deployment, micro_batch, context), deployment.model.num_layers
    seconds = times.step_seconds(deployment.micro_batches, layers)
    return micro_batch * deployment.micro_batches * deployment.replicas / (times.period_seconds(deployment.micro_batches) * layers), seconds


def micro_batch_gains(costs: Costs, counts: list[int], micro_batch: float, context: float, **given: Any) -> float:
    """Throughput with the second number of micro-batches against the first, at the number of attention replicas that balances best."""

    def imbalance(deployment: SplitDeployment) -> float:
        times = split_layer(deployment, micro_batch, context)
        return abs(times.attention_seconds - times.experts_seconds)

    best = min((_split(costs, replicas=replicas, **given) for replicas in range(1, 17)), key=imbalance)
    one, other = (_split_throughput(replace(best, micro_batches=count), micro_batch, context)[0] for count in counts)
    return other / one


def throughput_by_replicas(costs: Costs, replicas: list[int], micro_batch: float, context: float, **given: Any) -> dict[Any, float]:
    """Decoding throughput per device by the number of attention replicas."""
    deployments = {count: _split(costs, replicas=count, **given) for count in replicas}
    return {count: _split_throughput(each, micro_batch, context)[0] / sum(each.num_devices) for count, each in deployments.items()}


def largest_split_gain(costs: Costs, models: list[str], **given: Any) -> float:
    """The largest gain of these models: what a paper means by "up to"."""
    return max(_split_gain(costs, model, **given) for model in models)


def _split_gain(
    costs: Costs, model: str, attention: str, experts: str, baseline: str, slo: float, context: float, per: str, ranks: int = 8
) -> float:
    """Decoding throughput per device, price or watt of the best split plan, against the best of tensor and expert parallelism on `ranks`
    `baseline` devices; all within `slo` seconds per token and the devices' memory."""
    config = read_model_card(model)

    def worth(device: Device, count: int) -> float:
        return {"device": 1.0, "price": device.price or 0.0, "watt": device.watts or 0.0}[per] * count

    def split_seconds(split: SplitDeployment, micro_batch: float) -> float:
        return _split_throughput(split, micro_batch, context)[1]

    def uniform_seconds(uniform: UniformDeployment, batch: float) -> float:
        return decode_step(uniform, batch, context).seconds

    best = 0.0
    for tp_a, tp_e, replicas in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16)):
        split = _split(costs, model, attention, experts, replicas=replicas, attention_tp=tp_a, expert_tp=tp_e)
        weights = 2.0 * config.hidden_size * 3 * config.expert_width * config.num_layers / tp_e
        if config.num_heads % tp_a or weights > 0.9 * split.experts.memory_bytes:
            continue
        room = _kv_room(config, split.attention, tp_a, with_experts=0) / 3
        batch = _largest_batch(partial(split_seconds, split), room / context, slo)
        if batch:
            value = sum(map(worth, (split.attention, split.experts), split.num_devices))
            best = max(best, _split_throughput(split, batch, context)[0] / value)
    device = costs.device(baseline)
    room, per_second = _kv_room(config, device, ranks, with_experts=config.num_experts), 0.0
    for tp_a, tp_e in ((ranks, ranks), (8, 8), (8, 1)):  # tensor parallelism over all, or in a node, experts cut or whole
        uniform = UniformDeployment(model=config, device=device, fabric=fabric_of(device), ranks=ranks, attention_tp=tp_a, expert_tp=tp_e)
        batch = _largest_batch(partial(uniform_seconds, uniform), room / context / uniform.groups, slo)
        if batch:
            per_second = max(per_second, uniform.groups * batch / decode_step(uniform, batch, context).seconds)
    return best / (per_second / worth(device, ranks)) if per_second else 0.0


def _kv_room(config: ModelConfig, device: Device, degree: int, with_experts: int) -> float:
    """Tokens whose KV fits into `degree` devices beside the weights."""
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads) * config.num_layers
    experts = with_experts * 3 * config.hidden_size * config.expert_width * len(config.moe_layers)
    weights = 2.0 * (attention + experts + 2 * config.vocab_size * config.hidden_size)
    return max(0.0, 0.9 * degree * device.memory_bytes - weights) / (2 * config.kv_elements)


def _largest_batch(seconds: Callable[[float], float], most: float, slo: float) -> float:
    """The largest batch up to `most` whose step takes at most `slo`; 0.0: none."""
    low, high = 0.0, float(int(most))
    if high >= 1 and seconds(high) <= slo:
        return high
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) <= slo else (low, middle)
    return float(int(low))


# ---- EPS-MoE ----


def _eps_layer(costs: Costs, device: str, m: float, width: int, hidden: int, experts: int, ranks: int, dtype: str) -> tuple[float, float]:
    """Seconds of computing and of sending (dispatch and combine) of one layer; `m`: rows of each expert."""
    card = costs.device(device)
    flops = 2 * 3 * m * experts * hidden * width
    weights = 2 * 3.0 * experts * hidden * width
    rows = m * experts
    computing = card.seconds(Work(weights + rows * 2 * (2 * hidden + 3 * width), flops), "bfloat16", m)
    sending = 2 * exchange_seconds(fabric_of(card), ranks, rows, hidden, dtype)
    return computing, sending


def pipelined_layer(costs: Costs, pipelines: int, sms: int, all_sms: int, send_sms: int, **given: Any) -> float:
    """Seconds of a layer with experts in `pipelines` pieces; `sms`: of `all_sms`, for computing."""
    card = costs.device(given["device"])
    computing, sending = _eps_layer(costs, **given)
    if pipelines == 1:
        return computing + sending
    fixed = 2 * card.exchange_seconds + card.fixed_seconds
    shares = sms / all_sms, send_sms / all_sms
    return fixed * (pipelines - 1) + overlapped_seconds(computing, sending, pipelines, *shares, card.efficiency(given["m"]))


def layer_by_sms(costs: Costs, sms: list[int], **given: Any) -> dict[Any, float]:
    return {each: float(pipelined_layer(costs, sms=each, **given)) for each in sms}


def prefill_gain(costs: Costs, prompt: float, batch: float, pipelines: int, **given: Any) -> float:
    """Prefill throughput of an expert pipeline against none."""
    deployment = _uniform(costs, **given)
    layer = prefill_step(deployment, batch * prompt, prompt).layer
    fixed = 2 * deployment.device.exchange_seconds + deployment.device.fixed_seconds
    # Shared experts hide the first dispatch, whatever the number of pieces; pieces hide the rest (EPS-MoE, section IV-D).
    hidden = min(layer.shared, layer.dispatch)
    left = layer.sending - hidden  # a wait for the slowest rank is hidden by nothing that this rank does
    overlapped = overlapped_seconds(layer.experts, left, pipelines) if pipelines > 1 else layer.experts + left
    piped = layer.attention + layer.gate + layer.shared + overlapped + layer.waiting + fixed * (pipelines - 1)
    return layer.seconds / piped


def gain_by_pipelines(costs: Costs, pipelines: list[int], **given: Any) -> dict[Any, float]:
    return {count: float(prefill_gain(costs, pipelines=count, **given)) for count in pipelines}


# ---- MixServe ----


def _mixserve_layer(
    costs: Costs,
    rows: float,
    kv: float,
    scores: float,
    is_bulk: bool,
    *,
    model: str,
    device: str,
    nodes: int,
    per_node: int,
    attention: int,
    experts: int,
    pipeline: int,
    between: str | None = None,
) -> float:
    """Seconds of a layer with its exchange: all-reduces where experts are cut over all ranks of a stage, else MixServe's hybrid exchange,
    whose sends between nodes overlap those inside."""
    card = costs.device(device)
    fabric, ranks = fabric_of(card, between=between, per_node=per_node), nodes * per_node // pipeline
    degrees: dict[str, Any] = {"ranks": ranks, "attention_tp": attention, "expert_tp": experts}
    deployment = UniformDeployment(model=read_model_card(model), device=card, fabric=fabric, **degrees)
    layer = layer_times(deployment, rows, kv, scores, is_bulk)
    if deployment.expert_ranks == 1:
        return layer.seconds
    reduce = reduce_seconds(fabric, rows * row_bytes(deployment.model.hidden_size, "bfloat16"), deployment.attention_tp)
    exchange = hybrid_exchange_seconds(fabric, nodes, attention, experts, rows, deployment.routing, deployment.model.hidden_size)
    return layer.computing + layer.waiting + reduce + 2 * exchange


def mixserve_itl(costs: Costs, batch: float, context: float, **given: Any) -> float:
    """Seconds between tokens: all layers of all stages, for a batch over the data-parallel groups."""
    rows = max(1.0, batch * given["attention"] * given["pipeline"] / (given["nodes"] * given["per_node"]))  # of a group or pipeline
    return read_model_card(given["model"]).num_layers * _mixserve_layer(costs, rows, rows * context, rows * context, False, **given)


def mixserve_ratio(costs: Costs, of: dict[str, Any], to: dict[str, Any], **given: Any) -> float:
    one, other = (mixserve_itl(costs, **{**given, **each}) for each in (of, to))
    return one / other


def mixserve_ttft(costs: Costs, prompt: float, choices: dict[str, dict[str, Any]], **given: Any) -> dict[Any, float]:
    """Seconds to compute one prompt by choice of degrees."""
    layers, load = read_model_card(given["model"]).num_layers, (prompt, prompt, prompt * (prompt + 1) / 2)
    return {name: layers * _mixserve_layer(costs, *load, True, **{**given, **choice}) for name, choice in choices.items()}


# ---- Expert-as-a-Service ----


def _service_step(costs: Costs, clients: int, servers: int, requests: float, context: float, batches: int, **given: Any) -> float:
    """Seconds of a step with `clients` attention ranks and `servers` expert ranks, in two batches that take turns."""
    device, weights = given["device"], given["weights"]
    sides = {"replicas": clients, "attention_tp": 1, "expert_nodes": servers, "expert_tp": 1, "micro_batches": batches}
    deployment = _split(costs, given["model"], device, device, weights, dispatch_dtype=weights, **sides)
    times = split_layer(deployment, requests / clients / batches, context)
    return times.period_seconds(batches) * deployment.model.num_layers


def throughput_drop(costs: Costs, clients: int, servers: int, lost_clients: int, lost_servers: int, **given: Any) -> float:
    """The share of throughput that is lost with these devices: others have their requests and replicas of their experts."""
    whole = _service_step(costs, clients, servers, batches=2, **given)
    return 1 - whole / _service_step(costs, clients - lost_clients, servers - lost_servers, batches=2, **given)


def devices_needed(costs: Costs, devices: int, requests: float, fewer: float, context: float, step: int, **given: Any) -> float:
    """The fewest devices, half of each kind, in steps of `step`, that serve `fewer` requests as quickly as `devices` serve `requests`."""
    whole = _service_step(costs, devices // 2, devices // 2, requests, context, 2, **given)
    for count in range(step, devices + 1, step):
        if _service_step(costs, count // 2, count // 2, fewer, context, 2, **given) <= whole * 1.02:
            return float(count)
    return float(devices)


def single_batch_drop(costs: Costs, devices: int, requests: float, context: float, **given: Any) -> float:
    """The share of throughput that is lost with one batch in flight in place of two."""
    two, one = (_service_step(costs, devices // 2, devices // 2, requests, context, batches, **given) for batches in (2, 1))
    return 1 - two / one
