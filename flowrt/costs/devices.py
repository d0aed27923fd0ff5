"""Defines Device: what an accelerator does, and the seconds that an operator's work takes on it. Data: cards/devices, cards/families.yaml.

The time of a call is `fixed_seconds` + max(bytes / (bandwidth * its efficiency), flops / (peak * efficiency of so many rows)). Constants
belong to a family of devices, so that a device that has no measurements of its own is predicted, too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from flowrt.costs.cards import CARDS, CardReader, as_count, as_list, as_mapping, as_name, as_text, card_names, find_card, read_card
from flowrt.costs.links import PROFILES, LinkProfile, link_label, profile_of
from flowrt.costs.quantities import read_quantity
from flowrt.costs.work import Work
from flowrt.errors import UserError, nearest, shown

# What a family's constants mean: name in cards -> (unit, meaning). Cards of devices may override each under the same name.
CONSTANTS: Mapping[str, tuple[str, str]] = {
    "fixed": ("s", "from the start of a call of an operator to its end, beside bytes and flops"),
    "bandwidth_efficiency": ("", "share of the memory bandwidth that an operator reaches"),
    "flops_efficiency": ("", "share of the peak at which products of many rows run, beside what feeds them"),
    "feed": ("flop/s", "products per second that operands are prepared and results are stored for, whatever the peak"),
    "attention_efficiency": ("", "share of the peak that attention reaches over cached tokens"),
    "half_rows": ("", "rows per matrix at which products reach half of that share"),
    "exchange": ("s", "fixed part of a dispatch or a combine: starts, counts, flags"),
    "quantize": ("s", "what a dispatch in 8 bits adds to it"),
    "within_efficiency": ("", "share of the bandwidth inside a node that exchanges reach"),
    "between_efficiency": ("", "share of the bandwidth between nodes that exchanges reach"),
    "jitter": ("", "standard deviation of a rank's time to compute, as a share of it; an exchange waits for the slowest rank"),
    "bulk_share": ("", "share of the cores that exchanges of prefill occupy"),
}
# What only cards have whose processes are measured themselves (flowrt profile). Without them the runtime takes no time of its own: links of
# accelerators include the software that sends and receives.
MEASURED: Mapping[str, tuple[str, str]] = {
    "expert": ("s", "each expert that has rows in a call, beside bytes and flops: its products start one after another"),
    "firing": ("s", "a firing that sends rows to experts or computes them, beside operators: matching, splitting rows, starting it"),
    "message": ("s", "each message between them, at either end: encoding and sending, or receiving and decoding"),
    "kv_efficiency": ("", "share of the memory bandwidth that attention reaches over cached tokens; by default that of all operators"),
    "step": ("s", "a step of a group that samples, beside its operators: scheduling, sampling, the way of its tokens to the gateway"),
    "sequence": ("s", "each sequence of such a step"),
}
_SUFFIXES = {"s": "_seconds", "flop/s": "_flops_per_second", "": ""}
FIELDS = {
    name: name + _SUFFIXES[unit] for name, (unit, _) in (*CONSTANTS.items(), *MEASURED.items())
}  # constant in cards -> field of a Device
WIDE = "bfloat16"
_RUNS_AS = {"float16": WIDE, "fp8": WIDE, "int8": WIDE}  # dtypes that a device without units of their own computes in 16 bits


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process of a machine. `flops_per_second`: peak by dtype ("bfloat16", "fp8", "int8"). `price`: of one device,
    in units of an L20; `watts`: maximum power; None: no source gives it. `within`, `between`: labels of the links inside a node and between
    nodes (profile_of). `sources`: by name of the field in the card. `by_dtype`: itself with the constants of models in a dtype, where its
    card has some. `card`: what `read_device` was given."""

    name: str
    family: str
    memory_bytes: float
    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    within: str
    between: str
    devices_per_node: int
    fixed_seconds: float
    bandwidth_efficiency: float
    flops_efficiency: float
    feed_flops_per_second: float
    attention_efficiency: float
    half_rows: float
    exchange_seconds: float
    quantize_seconds: float
    within_efficiency: float
    between_efficiency: float
    bulk_share: float
    jitter: float
    expert_seconds: float = 0.0
    firing_seconds: float = 0.0
    message_seconds: float = 0.0
    step_seconds: float = 0.0
    sequence_seconds: float = 0.0
    kv_efficiency: float = 0.0
    by_dtype: dict[str, Device] = field(default_factory=dict, compare=False)
    price: float | None = None
    watts: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    card: str = field(default="", compare=False)

    def peak(self, dtype: str) -> float:
        """Flops per second in a dtype; 8 bits without units of their own are computed in 16. Raises UserError for an unknown dtype."""
        rate = self.flops_per_second.get(dtype, self.flops_per_second.get(_RUNS_AS.get(dtype, "")))
        if rate is None:
            raise UserError(f"device {self.name} has no rate for {shown(dtype)}; it has {', '.join(self.flops_per_second)}")
        return rate

    def efficiency(self, rows: float, dtype: str = WIDE) -> float:
        """The share of the dtype's peak that a matrix product of so many rows reaches."""
        share = 1 / (1 / self.flops_efficiency + self.peak(dtype) / self.feed_flops_per_second)
        return share * rows / (rows + self.half_rows) if rows < math.inf else share

    def seconds(self, work: Work, dtype: str, rows: float = math.inf) -> float:
        """Seconds of one call. `rows`: of each matrix product in it; of experts, the rows of each expert that has any."""
        return self.fixed_seconds + self.busy_seconds(work, dtype, self.efficiency(rows, dtype))

    def attend_seconds(self, work: Work, dtype: str) -> float:
        """Seconds of attention over cached tokens, without a fixed part."""
        return self.busy_seconds(work, dtype, self.attention_efficiency, self.kv_efficiency or self.bandwidth_efficiency)

    def busy_seconds(self, work: Work, dtype: str, efficiency: float, bandwidth_share: float | None = None) -> float:
        """Seconds of a call without its fixed part, at these shares of the peak and of the bandwidth."""
        reading = work.num_bytes / (self.bytes_per_second * (bandwidth_share or self.bandwidth_efficiency))
        return max(reading, work.num_flops / (self.peak(dtype) * efficiency)) if work.num_flops else reading

    def with_constants(self, constants: Mapping[str, float]) -> Device:
        """The same with these constants, by their names in cards."""
        changed: dict[str, Any] = {FIELDS[name]: value for name, value in constants.items()}
        return replace(self, **changed)

    @property
    def links(self) -> tuple[LinkProfile, LinkProfile]:
        """Profiles of a link inside a node and of one between nodes."""
        return profile_of(self.within), profile_of(self.between)


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a cluster, with equal devices. `within`, `between`: as of a Device."""

    device: Device
    nodes: int
    devices_per_node: int
    within: str
    between: str

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Cluster:
    """What a deployment may use: groups of equal nodes."""

    name: str
    groups: tuple[NodeGroup, ...]

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)


def device_names() -> tuple[str, ...]:
    """The names of flowrt's own device cards."""
    return card_names("devices")


@cache
def read_device(name_or_path: str | Path) -> Device:
    """A device by the name of a card or the path of one. Raises UserError: it lists the names and the closest one, or names the bad key."""
    path = find_card("devices", name_or_path)
    document = read_card(path)
    card = CardReader(document)
    family = {**dict.fromkeys(MEASURED, 0.0), **card.take("family", _family, {} if CONSTANTS.keys() <= document.value.keys() else ...)}
    named = _take_constants(card, family)
    device = Device(
        name=path.stem,
        family=card.take("family", as_text, ""),
        memory_bytes=card.take("memory", partial(_positive, unit="B")),
        bytes_per_second=card.take("bandwidth", partial(_positive, unit="B/s")),
        flops_per_second=card.take("flops", _rates),
        within=card.take("within", _link),
        between=card.take("between", _link),
        devices_per_node=card.take("devices_per_node", as_count, 8),
        price=card.take("price", partial(_positive, unit=""), None),
        watts=card.take("power", partial(_positive, unit="W"), None),
        sources=card.take("sources", as_mapping, {}),
        card=str(name_or_path),
        **named,
    )
    of_dtypes = card.take("dtypes", as_mapping, {})
    card.end()
    for dtype in of_dtypes:
        part = CardReader(document, "dtypes", dtype)
        variant = replace(device, **_take_constants(part, {name: getattr(device, field) for name, field in FIELDS.items()}))
        part.end()
        device.by_dtype[dtype] = variant
    return device


def _take_constants(card: CardReader, others: Mapping[str, float]) -> dict[str, Any]:
    """By field, the constants of a card, or those of `others` that it leaves out."""
    known = (*CONSTANTS.items(), *MEASURED.items())
    return {FIELDS[name]: card.take(name, partial(_read_constant, unit=unit), others.get(name, ...)) for name, (unit, _) in known}


@cache
def families() -> Mapping[str, Mapping[str, float]]:
    """Calibrated family -> its constants, by name, in base units."""
    path = CARDS / "families.yaml"
    return {
        family: {name: _read_constant(values[name], f"{path}: {family}.{name}", unit) for name, (unit, _) in CONSTANTS.items()}
        for family, values in read_card(path).value["calibrated"].items()
    }


@cache
def calibrated_family(family: str) -> str:
    """The family whose constants this one takes: itself, or the one that families.yaml names. Raises UserError for an unknown one."""
    known = read_card(CARDS / "families.yaml").value
    if family in known["calibrated"]:
        return family
    if family not in known["taken_from"]:
        raise UserError(f"unknown family {shown(family)}; {nearest(family, {*known['calibrated'], *known['taken_from']})}")
    return str(known["taken_from"][family])


@cache
def error_bands() -> Mapping[str, float]:
    """Group of predictions (communication, step) -> the share by which a prediction may be off, either way, in nine of ten cases."""
    return {str(group): float(share) for group, share in read_card(CARDS / "families.yaml").value["bands"].items()}


def calibration_hash(constants: Mapping[str, Mapping[str, float]] | None = None) -> str:
    """Twelve digits that name a set of constants, those of the cards unless given: a plan says what it was made with."""
    found = {
        family: {name: f"{value:.3g}" for name, value in sorted(own.items())} for family, own in sorted((constants or families()).items())
    }
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:12]


def cluster_names() -> tuple[str, ...]:
    """The names of flowrt's own cluster cards."""
    return card_names("clusters")


def read_cluster(name_or_path: str | Path) -> Cluster:
    """A cluster by the name of a card or the path of one. Raises UserError as `read_device` does."""
    path = find_card("clusters", name_or_path)
    document = read_card(path)
    card = CardReader(document)
    groups = tuple(_read_group(CardReader(document, "nodes", number)) for number in range(len(card.take("nodes", as_list))))
    card.end()
    return Cluster(path.stem, groups)


def _read_group(card: CardReader) -> NodeGroup:
    device = read_device(card.take("device", as_name))
    group = NodeGroup(
        device,
        card.take("nodes", as_count),
        card.take("devices_per_node", as_count, device.devices_per_node),
        card.take("within", _link, device.within),
        card.take("between", _link, device.between),
    )
    card.end()
    return group


def _family(value: object, where: str) -> Mapping[str, float]:
    try:
        return families()[calibrated_family(str(value))]
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _read_constant(value: object, where: str, unit: str) -> float:
    number = read_quantity(value, unit, where)
    if where.endswith("efficiency") and not 0 < number <= 1:
        raise UserError(f"{where}: is {shown(value)}; a share above 0 and up to 1 is needed")
    if where.endswith("_share") and number > 1:
        raise UserError(f"{where}: is {shown(value)}; a share from 0 to 1 is needed")
    if unit == "flop/s" and not number:
        raise UserError(f"{where}: is {shown(value)}; a rate above 0 is needed")
    return number


def _positive(value: object, where: str, unit: str) -> float:
    number = read_quantity(value, unit, where)
    if not number:
        raise UserError(f"{where}: is 0; a number above 0 is needed")
    return number


def _rates(value: object, where: str) -> dict[str, float]:
    rates = {name: _positive(rate, f"{where}.{name}", "flop/s") for name, rate in as_mapping(value, where).items()}
    if WIDE not in rates:
        raise UserError(f"{where}: {WIDE} is missing; add the rate in 16 bits")
    return rates


def _link(value: object, where: str) -> str:
    if isinstance(value, dict):
        try:
            return link_label(as_mapping(value, where))
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
    text = as_text(value, where)
    try:
        profile_of(text)
    except (KeyError, ValueError, TypeError):
        raise UserError(
            f"{where}: unknown link {shown(text)}; {nearest(text, PROFILES)}, or give numbers, as {{latency: 30 us, bandwidth: 3 GB/s}}"
        ) from None
    return text
