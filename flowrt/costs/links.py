"""Defines link profiles: the time of a message on links that this machine does not have, each number with its source.

* xDeepServe, "Model-as-a-Service on Huawei CloudMatrix384" (2025): sections 2.2, 3.1
* MegaScale-Infer, "Serving Mixture-of-Experts at Scale with Disaggregated Expert Parallelism" (2025): sections 7.1, 7.3
* MixServe (2026): section IV, the list of clusters
* CloudMatrix384, "Serving Large Language Models on Huawei CloudMatrix384" (arXiv 2506.12708): its hardware overview
* DeepEP's published low-latency curves (GB200, EP4): dispatch takes 15.9 us + 0.0934 us per token

"read": the number is in the source. "derived": it follows by the given arithmetic. "assumed": it has no source; replace it with a number
of your own when a conclusion depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flowrt.costs.quantities import MAX_NUMBER, read_quantity
from flowrt.errors import UserError, nearest

LINK_NUMBERS = ("latency_seconds", "bandwidth_bytes_per_second", "message_seconds")
# The same numbers as quantities: name -> number, unit.
LINK_QUANTITIES = {"latency": (LINK_NUMBERS[0], "s"), "bandwidth": (LINK_NUMBERS[1], "B/s"), "message": (LINK_NUMBERS[2], "s")}


@dataclass(frozen=True)
class LinkProfile:
    """One kind of link from the view of one process: its own NIC and the path to any other NIC.

    A message of b bytes occupies a direction of the NIC for `message_seconds` + b / `bandwidth_bytes_per_second` (per direction) and
    arrives `latency_seconds` after that. `sources` maps the name of each number to its source.
    """

    name: str
    latency_seconds: float
    bandwidth_bytes_per_second: float
    message_seconds: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def busy_seconds(self, num_bytes: float) -> float:
        """Returns the seconds for which a message occupies an otherwise idle direction of the NIC."""
        return self.message_seconds + num_bytes / self.bandwidth_bytes_per_second

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds from the send to the arrival of one message on an idle link."""
        return self.busy_seconds(num_bytes) + self.latency_seconds

    def shared_by(self, num_processes: int) -> LinkProfile:
        """Returns the profile of each of `num_processes` that split one NIC evenly, whether they use their share or not."""
        return replace(
            self,
            bandwidth_bytes_per_second=self.bandwidth_bytes_per_second / num_processes,
            message_seconds=self.message_seconds * num_processes,
        )


def _profile(name: str, latency: tuple[float, str], bandwidth: tuple[float, str], message: tuple[float, str]) -> LinkProfile:
    sources = dict(zip(LINK_NUMBERS, (latency[1], bandwidth[1], message[1]), strict=True))
    return LinkProfile(name, latency[0], bandwidth[0], message[0], sources)


PROFILES: Mapping[str, LinkProfile] = {
    profile.name: profile
    for profile in (
        _profile(
            "ub",
            (14e-6, "derived: XCCL sends less than 1 MB in under 20 us (xDeepServe 3.1, figure 5); 1 MB at 196 GB/s takes 5.1 us of them"),
            (196e9, "derived: 392 GB/s per direction and package of two dies (CloudMatrix384); a process is a die"),
            (1e-6, "assumed: of the 15 us that do not depend on size, what keeps the NIC from the next message"),
        ),
        _profile(
            "nvlink",
            (14e-6, "derived: a dispatch over NVLink costs 15.9 us beside its rows (DeepEP, GB200, EP4), kernel starts included"),
            (450e9, "derived: half of 900 GB/s, which counts both directions (H20: MegaScale-Infer 7.1, MixServe IV)"),
            (2e-6, "assumed: the rest of those 15.9 us"),
        ),
        _profile(
            "nvlink-400",
            (14e-6, "assumed: as nvlink"),
            (200e9, "derived: half of 400 GB/s, which counts both directions (A800: MegaScale-Infer 7.1; H800 has the same)"),
            (2e-6, "assumed: as nvlink"),
        ),
        _profile(
            "pcie-4",
            (14e-6, "assumed: as nvlink"),
            (25e9, "derived: 16 lanes of PCIe 4 carry 31.5 GB/s; about 80 % is assumed to be usable"),
            (2e-6, "assumed: as nvlink"),
        ),
        _profile(
            "hccs", (14e-6, "assumed: as ub"), (60e9, "read: up to 480 Gbit/s (MixServe IV, Atlas 800T A2)"), (1e-6, "assumed: as ub")
        ),
        _profile(
            "hccs-mesh",
            (14e-6, "assumed: as ub"),
            (210e9, "derived: 8 fully connected accelerators use 7 links at once; 480 Gbit/s (MixServe IV) count both directions"),
            (1e-6, "assumed: as ub"),
        ),
        _profile(
            "roce-100g",
            (20e-6, "assumed: as roce-200g"),
            (12.5e9, "derived: two NICs of 400 Gbit/s for eight accelerators (L40S nodes, MegaScale-Infer 7.1)"),
            (1e-6, "assumed: as roce-200g"),
        ),
        _profile(
            "roce-200g",
            (20e-6, "assumed: what software costs on ub, and a few microseconds of NIC and switch"),
            (25e9, "read: 200 Gbit/s per NIC, a NIC per accelerator (MegaScale-Infer 7.1 and 7.3; MixServe IV)"),
            (1e-6, "assumed: as ub"),
        ),
        _profile(
            "roce-400g",
            (20e-6, "assumed: as roce-200g"),
            (50e9, "read: 400 Gbit/s per NIC (MegaScale-Infer 7.1; MixServe IV; up to 400 Gbit/s per NPU, CloudMatrix384)"),
            (1e-6, "assumed: as roce-200g"),
        ),
        _profile(
            "vpc",
            (50e-6, "assumed: TCP through the kernels of two virtual machines; xDeepServe 2.2 names the network without numbers"),
            (3.125e9, "assumed: 25 Gbit/s"),
            (10e-6, "assumed: system calls and interrupts of a message"),
        ),
    )
}


def link_label(link: Mapping[str, object]) -> str:
    """The label of a link of the user's: "latency_seconds=2e-06,..." in a fixed order, from numbers or from quantities with a unit, such as
    {latency: 30 us, bandwidth: 3 GB/s}. Raises ValueError."""
    found = dict[str, float]()
    for name, value in link.items():
        if name in LINK_QUANTITIES:
            number, unit = LINK_QUANTITIES[name]
            try:
                found[number] = read_quantity(value, unit, name)
            except UserError as error:
                raise ValueError(str(error)) from None
        elif name not in LINK_NUMBERS:
            raise ValueError(f"unknown number {name!r} of a link; {nearest(name, [*LINK_NUMBERS, *LINK_QUANTITIES])}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
            raise ValueError(f"{name}: {value!r} is not a number of a link; write a number from 0 to {MAX_NUMBER:g}")
        else:
            found[name] = float(value)
    if not found.get("bandwidth_bytes_per_second"):
        raise ValueError("a link needs bandwidth_bytes_per_second, or bandwidth, above 0; the other numbers may be left out")
    return ",".join(f"{name}={found.get(name, 0.0)!r}" for name in LINK_NUMBERS)


def link_numbers(label: str) -> dict[str, float]:
    """The numbers in the label of a link; none for a profile's name. Raises ValueError for anything else."""
    parts = [part.partition("=") for part in label.split(",")] if "=" in label else []
    return {name: float(number) for name, _, number in parts}


def profile_of(label: str) -> LinkProfile:
    """The profile of a link, by its label as graph/notation.py writes it: a key of PROFILES, or "latency_seconds=2e-06,...".

    Raises KeyError or ValueError for any other text.
    """
    if "=" not in label:
        return PROFILES[label]
    numbers = link_numbers(label)
    link_label(numbers)  # checks them
    return LinkProfile(label, **numbers, sources=dict.fromkeys(LINK_NUMBERS, "the user's"))
