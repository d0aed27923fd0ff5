"""Lists planted bugs of the states of recurrent layers. See planting.py."""

# ruff: noqa: E501  (code within strings)

from __future__ import annotations

from simulation.planting import Bug, bug

BATCH = "flowrt.engine.batch"
CACHE = "flowrt.engine.prefix_cache"
ENGINE = "flowrt.engine.engine"
MEMORY = "flowrt.engine.group_memory"
STATES = "flowrt.engine.state_memory"
TRANSFER = "flowrt.exchange.kv_transfer"

RECURRENT_BUGS: tuple[Bug, ...] = (
    bug("state-in-place", "a step writes to the slot of the committed state", (
        STATES, "HeldMemory.step_slots", "self.spare[0]", "self.spare[0] if self.state is None else self.state")),
    bug("state-of-dropped-step", "a rollback commits the states of the steps that it drops", (
        ENGINE, "Engine.roll_back", "sequence.in_step = False", "sequence.in_step = False\n            self._scheduler.memory.commit(sequence)")),
    bug("state-not-committed", "a step begins with the state before the one that is committed", (
        STATES, "Slots.commit", "holding.spare.pop(0)", "holding.spare.pop(0) if holding.state is None else holding.state")),
    bug("state-kept-and-written", "a state that is kept for others is written to again", (
        STATES, "Slots.commit", "before is not None and before not in holding.kept.values()", "before is not None"), (
        STATES, "Slots.commit", "if holding.spare:", "if holding.spare and before not in holding.kept.values():")),
    bug("state-kept-elsewhere", "a state is kept under the border before it", (
        CACHE, "PrefixCache.insert", "prefix.segments[end // self.segment_tokens - 1]", "prefix.segments[end // self.segment_tokens - 2]")),
    bug("state-not-found", "a prompt begins with pages behind its state", (
        MEMORY, "GroupMemory._cached", "Reuse(len(found) * self._share_tokens, segments=found", "Reuse(border, segments=found")),
    bug("state-shared-as-spare", "a slot that another sequence reads counts as one's own", (
        STATES, "Slots._is_own", "self.units.holders_of(slot) == {holding.holder}", "True"), (
        STATES, "Slots.commit", "if holding.spare:", "if False:")),
    bug("state-pulled-elsewhere", "a pulled state goes to another slot", (
        STATES, "HeldMemory.pulled_slot", "self.spare[0]", "self.spare[-1]")),
    bug("state-sent-early", "the state of a prompt that runs is sent", (
        TRANSFER, "_PromptOffer._num_computed", "return 0 if self.prompt.slot == NO_STATE else self.units.total(layer, self.prompt.num_tokens)", "return self.units.total(layer, self.prompt.num_tokens)")),
    bug("state-replayed-from-start", "each token of an output that is replayed begins with the committed state", (
        BATCH, "build_batch", "StepSlots(slots.target, slots.target)", "slots")),
    bug("slot-lost", "a held prompt keeps the slots that only steps need, and its end frees one", (
        STATES, "HeldMemory.slots", "*self.spare", "*self.spare[1:]")),
)  # fmt: skip
