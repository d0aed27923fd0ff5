"""Lists planted bugs of modelled time on emulated hardware. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug

EMULATION = "flowrt.emulation"
EMULATED = "flowrt.workers.emulated"
NIC, NIC_MODEL = "flowrt.transports.emulation.nic", "flowrt.transports.emulation.nic_model"
CHANNEL = "flowrt.transports.emulation.channel"

MODELLED_BUGS: tuple[Bug, ...] = (
    bug("modelled-wait-short", "a computation waits for half of its modelled time", (
        EMULATION, "EmulatedCompute.run", "self._timer.wait_until(start + modelled)", "self._timer.wait_until(start + modelled / 2)")),
    bug("charged-call-inline", "a charged computation counts as short and takes no modelled time", (
        EMULATION, "EmulatedCompute.is_short", "label not in self._charging and ", "")),
    bug("charges-add-up", "a call is charged for the calls before it, too", (
        EMULATION, "EmulatedCompute.run", "self._charged = 0.0", "pass")),
    bug("busy-counted-twice", "a worker counts its modelled time twice", (
        EMULATION, "Lateness.note", "self.modelled_seconds += modelled_seconds", "self.modelled_seconds += 2 * modelled_seconds")),
    bug("last-request-charged", "a batch is charged for the rows of its last request only", (
        EMULATED, "modelled_seconds", "layers[firing.tag.layer].append(firing.inputs)", "layers[firing.tag.layer] = [firing.inputs]")),
    bug("latency-undilated", "messages take the latency of their link without the dilation", (
        NIC, "Nic.__init__", "profile.latency_seconds * dilation", "profile.latency_seconds")),
    bug("bandwidth-unshared", "each message has the whole bandwidth of a NIC", (
        NIC_MODEL, "SharedDirection._next_finish", " * len(self._finishes)", "")),
    bug("senders-nic-ignored", "a message arrives although its sender's NIC has not passed it", (
        CHANNEL, "EmulatedChannel._deliver_due", "max(head.received, head.sent + nic.latency_seconds)", "head.received")),
)  # fmt: skip
