"""Named tensors that travel with the KV of a prompt: what a prefill worker keeps of them, and how a group checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from flowrt.dataflow.payload import Payload
from flowrt.dataflow.schemas import Spec, check_tensor
from flowrt.operators.kernels.torch.pages import digest_of

Step = tuple[int, int, int]  # epoch, micro-batch, number
Key = tuple[str, int]  # request and attempt


@dataclass(eq=False, slots=True)
class _OfPrompt:
    """`row`: that of the prompt's last token in `step`. `fault`: why tensors that are missing will not come."""

    step: Step
    row: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    fault: str = ""


class SentExtras:
    """The extra tensors of the prompts that a prefill worker computes, in host memory, until their attempts end. `specs`: by name."""

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self._specs = specs
        self._prompts: dict[Key, _OfPrompt] = {}

    def begin_step(self, step: Step, last_rows: Mapping[Key, int]) -> None:
        """A step begins that computes the last tokens of these prompts in these rows. Of one that is computed again, earlier tensors are
        void."""
        if self._specs:
            self._prompts |= {key: _OfPrompt(step, row) for key, row in last_rows.items()}

    def add(self, name: str, step: Step, payload: Payload) -> list[Key]:
        """Keep the rows of the last tokens of prompts. Returns the prompts of the step. What does not fit is their fault."""
        spec, (rows,) = self._specs[name], payload.tensors
        found = {key: each for key, each in self._prompts.items() if each.step == step}
        for each in found.values():
            row = rows[each.row] if rows.ndim and each.row < len(rows) else rows
            if (fault := check_tensor(spec, row, {})) is not None:
                each.fault = f"the row of {name} is {fault}, {spec} is declared"
            else:
                each.tensors[name] = row.to("cpu", copy=True)
        return list(found)

    def fail(self, step: Step, why: str) -> list[Key]:
        """The rows of this step will not come, unless it is computed again. Returns its prompts."""
        found = {key: each for key, each in self._prompts.items() if each.step == step}
        for each in found.values():
            each.fault = each.fault or why
        return list(found)

    def of(self, key: Key) -> tuple[Tensor, ...] | None:
        """The tensors of a prompt, in the order of the specs; None while some are missing."""
        if not self._specs:
            return ()
        each = self._prompts.get(key)
        return tuple(each.tensors[name] for name in self._specs) if each is not None and len(each.tensors) == len(self._specs) else None

    def fault_of(self, key: Key, epoch: int) -> str:
        """Why some tensor of a prompt that is committed will not come; "": none is known to be missing. `epoch`: that of the worker."""
        each = self._prompts.get(key)
        if each is None or len(each.tensors) == len(self._specs):
            return ""
        return each.fault or ("a rollback has dropped the rows of its extra tensors" if each.step[0] < epoch else "")

    def leftovers(self) -> list[str]:
        """What is left when all requests have ended."""
        return [f"extra tensors of {key[0]}, attempt {key[1]}" for key in self._prompts]

    def forget_ended(self, is_alive: Callable[[str, int], bool]) -> None:
        """Free the tensors of attempts for which `is_alive` is false."""
        for key in [key for key in self._prompts if not is_alive(*key)]:
            del self._prompts[key]


def received(specs: Mapping[str, Spec], tensors: Sequence[Tensor], digest: int) -> tuple[dict[str, Tensor], str]:
    """Copies of the tensors in host memory, by name, and what is wrong with them. The sender can still write into the message, but not
    into the copies, whose hash is compared."""
    if len(tensors) != len(specs):
        return {}, f"it has {len(tensors)} extra tensors, expected {len(specs)}"
    for (name, spec), tensor in zip(specs.items(), tensors, strict=True):
        if (fault := check_tensor(spec, tensor, {})) is not None:
            return {}, f"its extra tensor {name} is {fault}, expected {spec}"
    own = {name: tensor.to("cpu", copy=True) for name, tensor in zip(specs, tensors, strict=True)}
    return own, "" if not own or digest_of(list(own.values())) == digest else "the bytes of its extra tensors do not match their hash"
