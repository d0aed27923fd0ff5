"""Weights in a memory file that processes share: filled once, sealed, the same bits for each process that maps them."""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from flowrt.operators.experts import Experts
from flowrt.operators.families.registry import read_model_config
from flowrt.operators.model_config import KeptWeights
from flowrt.operators.products import COPIED, Form, can_share, form_for, lay_out
from flowrt.operators.weight_memory import HUGE_FROM_BYTES, WeightMemory
from flowrt.operators.weights import Checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")


_open: list[WeightMemory] = []


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)
    while _open:
        _open.pop().close()


def opened(file: int, content: str = "model") -> WeightMemory:
    _open.append(WeightMemory(os.dup(file), content))
    return _open[-1]


def fill_with(value: float) -> Callable[[Tensor], None]:
    def fill(out: Tensor) -> None:
        out.fill_(value)

    return fill


def never(out: Tensor) -> NoReturn:
    raise AssertionError("filled again")


def test_second_process_maps_what_the_first_has_filled(file: int) -> None:
    sizes = {"small": (3, 5), "large": (HUGE_FROM_BYTES // 4 + 3,), "empty": (0, 4)}
    first = opened(file)
    held = {name: first.hold(name, shape, torch.float32, lambda out: out.normal_()) for name, shape in sizes.items()}
    assert first.note("form", lambda: {"loads": [1, 2]}) == {"loads": [1, 2]}
    first.seal()
    second = opened(file)
    for name, shape in sizes.items():
        mapped = second.hold(name, shape, torch.float32, never if name != "empty" else fill_with(0))
        assert torch.equal(mapped, held[name])
    assert second.note("form", lambda: None) == {"loads": [1, 2]}


def test_sealed_file_cannot_be_changed(file: int) -> None:
    first = opened(file)
    first.hold("w", (1024,), torch.float32, fill_with(1.0))
    first.seal()
    for change in (lambda: os.pwrite(file, b"x", 0), lambda: os.ftruncate(file, 0), lambda: mmap.mmap(file, 4096)):
        with pytest.raises(PermissionError):
            change()


def test_write_to_mapped_weights_ends_the_process_that_writes(file: int) -> None:
    first = opened(file)
    held = first.hold("w", (1024,), torch.float32, fill_with(1.0))
    first.seal()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        opened(file).hold("w", (1024,), torch.float32, never).add_(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    assert held.eq(1.0).all()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "content"),
    [
        ("v", (4,), torch.float32, "model"),
        ("w", (5,), torch.float32, "model"),
        ("w", (4,), torch.int32, "model"),
        ("w", (4,), torch.float32, "x"),
    ],
)
def test_other_weights_are_read_into_private_memory(file: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, content: str) -> None:
    first = opened(file)
    first.hold("w", (4,), torch.float32, fill_with(1.0))
    first.note("form", lambda: "plain")
    first.seal()
    other = opened(file, content)
    assert other.hold(name, shape, dtype, fill_with(2.0)).eq(2).all()
    assert other.note("form", lambda: "packed") == ("plain" if content == "model" else "packed")
    other.seal()
    assert opened(file).hold("w", (4,), torch.float32, never).eq(1.0).all()


def test_process_that_dies_while_it_fills_leaves_the_file_to_the_next(file: int) -> None:
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        opened(file).hold("w", (1 << 16,), torch.float32, fill_with(1.0))
        theirs.send("filled")
        signal.pause()
    assert ours.recv() == "filled"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    after = opened(file)
    assert not after.is_complete
    after.hold("w", (8,), torch.float32, fill_with(2.0))
    after.seal()
    assert opened(file).hold("w", (8,), torch.float32, never).eq(2.0).all()


def test_process_waits_for_the_one_that_fills(file: int) -> None:
    first = opened(file)
    with pytest.raises(BlockingIOError), open(f"/proc/self/fd/{file}", "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    pid = os.fork()
    if pid == 0:
        os.close(first._lock)  # a fork shares the opening of the file that has the lock
        os._exit(0 if opened(file).hold("w", (8,), torch.float32, never).eq(1.0).all() else 1)
    first.hold("w", (8,), torch.float32, fill_with(1.0))
    first.seal()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_file_that_its_writer_cannot_seal_against_writes_is_left_to_it(file: int) -> None:
    first, kept = opened(file), []
    held = first.hold("w", (8,), torch.float32, lambda out: kept.append(out.fill_(1.0)))
    first.seal()
    assert opened(file).hold("w", (8,), torch.float32, fill_with(2.0)).eq(2.0).all()
    kept[0].fill_(3.0)  # as a process that writes to weights of its own
    assert held.eq(3.0).all()


@pytest.mark.parametrize("damage", [b"", b"x" * 64, b"\xff" * 16, b"[]" + (0).to_bytes(8, "little") + (2).to_bytes(8, "little")])
def test_of_a_broken_index_nothing_is_taken(file: int, damage: bytes) -> None:
    os.pwrite(file, damage, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    assert opened(file).hold("w", (8,), torch.float32, fill_with(3.0)).eq(3.0).all()


@pytest.mark.parametrize("form", sorted(COPIED))
def test_copied_forms_give_the_same_bits_from_given_memory(form: Form) -> None:
    if form_for(torch.float32, "cpu", (32, 64)) != "panels" and form == "panels":
        pytest.skip("this processor has no instructions for panels")
    if not can_share(form):
        pytest.skip("this build of torch does not take packed matrices in given memory")
    weight, other, x = torch.randn(48, 64), torch.randn(48, 64), torch.randn(5, 64)
    product: Any = lay_out(other, form)
    memory = torch.empty(product.num_bytes, dtype=torch.uint8)
    product.write(weight, memory)
    assert torch.equal(product.over(memory)(x), lay_out(weight, form)(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("measured", "kept"), [(False, "dtype"), (True, "dtype"), (False, "int8"), (True, "fp8")])
def test_experts_are_the_same_from_memory_as_from_files(
    models: Any, file: int, dtype: str, measured: bool, kept: KeptWeights, monkeypatch: Any
) -> None:
    directory, held = Path(models["wide"]), {1: (3, 0, 5)}
    config = read_model_config(directory, dtype, expert_weights=kept)
    ticks = iter(range(1, 1_000_000))
    now = (lambda: next(ticks)) if measured else None

    def built(memory: WeightMemory | None) -> Experts:
        experts = Experts(config, Checkpoint(directory, memory), held, now=now)
        if memory is not None:
            memory.seal()
        return experts

    filled = built(opened(file))
    monkeypatch.setattr(Checkpoint, "read_part", never)
    mapped = built(opened(file))
    monkeypatch.undo()
    read = built(None)
    x, rows = torch.randn(6, config.hidden_size).to(getattr(torch, dtype)), torch.arange(6)
    experts = torch.tensor([3, 5, 0, 0, 5, 3])
    results = [each.forward_pairs(1, x, rows, experts) for each in (filled, mapped, read)]
    assert torch.equal(results[0], results[1])
    assert measured or torch.equal(results[0], results[2])
