"""What sequences hold of the memory in which layers keep their state. Pure; only GroupMemory calls it.

A layer keeps what it needs of the tokens before a row in one of two kinds of memory:

- Pages, for layers that read all tokens, such as attention: a step writes the keys and values of its rows behind those of older tokens.
- Slots, for layers with a recurrent state of fixed size: a slot has the state of all such layers behind some number of tokens. A step reads
  the slot of the committed state and writes another one, the working copy. The commit exchanges the two.

So in both a step writes nothing that a step after a rollback reads: to drop a step is no operation. Units that several hold, sequences or
the prefix cache, are only read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from flowrt.engine.offered_prompt import NO_STATE
from flowrt.engine.page_allocator import PageAllocator
from flowrt.engine.validation import num_pages_for
from flowrt.graph.settings import SLOTS_OF_SEQUENCE


class StepSlots(NamedTuple):
    """A step of a sequence reads the state in `source` (NO_STATE: there is none yet), and writes its own to `target`."""

    source: int
    target: int


@dataclass(eq=False, slots=True)
class HeldMemory:
    """What one sequence holds, as `holder`. Empty until it is admitted.

    `pages`: those of its tokens, in order. `state`: the slot with the state behind its committed tokens; None: there are none, or the model
    has no recurrent layer. `spare`: the slots that only it holds and that have no state to keep; a step writes to the first. `kept`: by
    number of tokens, the slots with the states behind them that the prefix cache may get. `borders`: the numbers of tokens of its prompt at
    which a state is to be kept.
    """

    holder: str
    pages: list[int] = field(default_factory=list)
    state: int | None = None
    spare: list[int] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    borders: tuple[int, ...] = ()

    @property
    def pulled_slot(self) -> int:
        """The slot that a KV transfer writes to; NO_STATE: the model has no recurrent layer."""
        return self.spare[0] if self.spare else NO_STATE

    @property
    def step_slots(self) -> StepSlots | None:
        """None: the model has no recurrent layer."""
        return StepSlots(NO_STATE if self.state is None else self.state, self.spare[0]) if self.spare else None

    def slots(self) -> list[int]:
        return [*dict.fromkeys((*(() if self.state is None else (self.state,)), *self.spare, *self.kept.values()))]


class CachedUnits(Protocol):
    """The prefix cache as a holder of units. `num_idle`: those that no sequence holds."""

    @property
    def num_idle(self) -> int: ...

    def evict(self, num_units: int) -> None:
        """Free at least so many idle units, or all."""

    def release(self, units: Sequence[int]) -> None:
        """A sequence has freed these units."""


class StateMemory(ABC):
    """One kind of memory, in units. `cached` are the units that the prefix cache holds."""

    def __init__(self, units: PageAllocator, cached: CachedUnits) -> None:
        self.units, self._cached = units, cached

    @property
    def num_free(self) -> int:
        """Units that no sequence holds."""
        return self.units.num_free + self._cached.num_idle

    def reserve(self, holding: HeldMemory, num_tokens: int) -> bool:
        """Take what the steps of a sequence need up to `num_tokens`. False, with no change: there is not enough."""
        missing = self.num_missing(holding, num_tokens)
        if missing > self.num_free:
            return False
        if missing > self.units.num_free:
            self._cached.evict(missing - self.units.num_free)
        self._take(holding, missing)
        return True

    @abstractmethod
    def num_missing(self, holding: HeldMemory, num_tokens: int) -> int:
        """Units that `reserve` takes."""

    @abstractmethod
    def _take(self, holding: HeldMemory, num_units: int) -> None: ...

    @abstractmethod
    def share(self, holding: HeldMemory, units: Sequence[int]) -> None:
        """Begin a sequence that has no state yet with that in units of others. It only reads them."""

    @abstractmethod
    def commit(self, holding: HeldMemory) -> None:
        """A step has computed the sequence's next tokens. From now on their state counts."""

    @abstractmethod
    def release(self, holding: HeldMemory) -> None:
        """Free all that a sequence holds. It must not be in a step."""

    def _free(self, units: Sequence[int], holder: str) -> None:
        self.units.free(units, holder)
        self._cached.release(units)


class Pages(StateMemory):
    """A page has what paged layers keep of `page_size` tokens. A sequence grows by pages."""

    def __init__(self, units: PageAllocator, cached: CachedUnits, page_size: int) -> None:
        super().__init__(units, cached)
        self.page_size = page_size

    def num_missing(self, holding: HeldMemory, num_tokens: int) -> int:
        return max(0, num_pages_for(num_tokens, self.page_size) - len(holding.pages))

    def _take(self, holding: HeldMemory, num_units: int) -> None:
        taken = self.units.allocate(num_units, holding.holder, holding.pages[-1] if holding.pages else None)
        assert taken is not None, holding.holder
        holding.pages += taken

    def share(self, holding: HeldMemory, units: Sequence[int]) -> None:
        self.units.share(units, holding.holder)
        holding.pages += units

    def commit(self, holding: HeldMemory) -> None:
        """No-op: what counts follows from the number of committed tokens."""

    def release(self, holding: HeldMemory) -> None:
        self._free(holding.pages, holding.holder)
        holding.pages = []


class Slots(StateMemory):
    """A slot has the state of all recurrent layers behind some number of tokens. A sequence takes at once all that it will need: two of its
    own, beside one that it only reads."""

    def num_missing(self, holding: HeldMemory, num_tokens: int) -> int:
        return max(0, SLOTS_OF_SEQUENCE - len(holding.spare) - (holding.state is not None and self._is_own(holding, holding.state)))

    def _take(self, holding: HeldMemory, num_units: int) -> None:
        taken = self.units.allocate(num_units, holding.holder)
        assert taken is not None, holding.holder
        holding.spare += taken

    def share(self, holding: HeldMemory, units: Sequence[int]) -> None:
        (holding.state,) = units
        self.units.share(units, holding.holder)

    def commit(self, holding: HeldMemory) -> None:
        before, holding.state = holding.state, holding.spare.pop(0)
        if before is not None and before not in holding.kept.values():
            if holding.spare:
                self._free([before], holding.holder)
            else:
                holding.spare.append(before)

    def keep(self, holding: HeldMemory, num_tokens: int, *, may_evict: bool) -> None:
        """Keep the committed state, behind `num_tokens`, until `give`, if there is another slot to write to."""
        if holding.state is not None and (self.num_free if may_evict else self.units.num_free):
            holding.kept[num_tokens] = holding.state
            self.reserve(holding, num_tokens)

    def give(self, holding: HeldMemory) -> None:
        """Keep no states but the committed one: the prefix cache holds those that it has taken."""
        kept, holding.kept = holding.kept, {}
        if past := [slot for slot in kept.values() if slot != holding.state]:
            self._free(past, holding.holder)

    def release_spare(self, holding: HeldMemory) -> None:
        """Free what only steps need."""
        spare, holding.spare = holding.spare, []
        self._free(spare, holding.holder)

    def release(self, holding: HeldMemory) -> None:
        self._free(holding.slots(), holding.holder)
        holding.state, holding.spare, holding.kept, holding.borders = None, [], {}, ()

    def _is_own(self, holding: HeldMemory, slot: int) -> bool:
        return slot not in holding.kept.values() and self.units.holders_of(slot) == {holding.holder}
