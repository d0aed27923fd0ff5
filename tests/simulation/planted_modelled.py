"""Lists planted bugs of modelled time on emulated hardware. See planting.py."""

from __future__ import annotations

from simulation.planting import Bug, bug, with_graphs

EMULATION = "flowrt.emulation"
EMULATED = "flowrt.workers.emulated"
NIC, NIC_MODEL = "flowrt.transports.emulation.nic", "flowrt.transports.emulation.nic_model"
CHANNEL, LINKS = "flowrt.transports.emulation.channel", "flowrt.actors.emulated_links"

_ON_DEVICES: tuple[Bug, ...] = (
    bug("early-output-at-once", "outputs leave a computation before the modelled time of what gave them has passed", (
        EMULATION, "EmulatedCompute.at_modelled_time", "self._held.append((self.charged_seconds,", "self._held.append((0.0,")),
    bug("credit-takes-nothing", "a credit that overtakes takes no time of the receiver's NIC", (
        CHANNEL, "EmulatedChannel._read_overtaking", "nic.latency_seconds, work)", "nic.latency_seconds, 0.0)")),
    bug("bulk-beside-credits", "a NIC serves bulk while it serves credits", (
        NIC_MODEL, "SharedDirection._after", "for begin, end in self._pauses:", "for begin, end in ():")),
    bug("bytes-of-checkpoint", "messages have the bytes of the checkpoint, not those of the model that is emulated", (
        LINKS, "EmulatedLinks.wrap", "self.lateness.note, self._num_bytes)", "self.lateness.note)")),
    bug("first-layer-charged", "each layer is charged as the first, which stands for no other", (
        EMULATED, "modelled_seconds", "costs.seconds(operator, layer, ", "costs.seconds(operator, 0, ")),
    bug("device-of-another", "each process is charged as the first group, on whose device it is not", (
        EMULATED, "EmulatedWorker.__init__", "CallCosts(graph, process, checkpoint)", "CallCosts(graph, 'attention.0', checkpoint)")),
)  # fmt: skip
_ON_LINKS: tuple[Bug, ...] = (
    bug("modelled-wait-short", "a computation waits for half of its modelled time", (
        EMULATION, "EmulatedCompute.run", "self._timer.wait_until(start + modelled)", "self._timer.wait_until(start + modelled / 2)")),
    bug("charged-call-inline", "a charged computation counts as short and takes no modelled time", (
        EMULATION, "EmulatedCompute.is_short", "label not in self._charging and ", "")),
    bug("charges-add-up", "a call is charged for the calls before it, too", (
        EMULATION, "EmulatedCompute.run", "self._charged = self._held_late = 0.0", "self._held_late = 0.0")),
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
MODELLED_BUGS = (*with_graphs("devices", _ON_DEVICES), *with_graphs("emulated.yaml", _ON_LINKS))
