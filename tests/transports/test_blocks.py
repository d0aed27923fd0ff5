"""The block memory of large received tensors, tested without a channel."""

from __future__ import annotations

import resource
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.transports.channel.blocks import MADV_POPULATE_WRITE, SMALLEST_BYTES, Block, BlockPool, block_bytes, placement


@given(st.integers(0, 1 << 34))
def test_a_block_is_large_enough_and_not_much_larger(nbytes: int) -> None:
    size = block_bytes(nbytes)
    assert size >= nbytes
    assert size <= max(SMALLEST_BYTES, nbytes * 9 // 8 + 1)
    assert block_bytes(size) == size
    assert size % 4096 == 0


def test_a_block_given_back_is_taken_again() -> None:
    pool = BlockPool(1 << 20)
    block = pool.take(100_000)
    pool.give_back(block)
    assert pool.take(90_000) is not block  # of another size
    assert pool.take(99_000) is block
    assert pool.take(99_000) is not block


def test_no_more_than_the_bound_is_kept() -> None:
    pool = BlockPool(2 * SMALLEST_BYTES)
    blocks = [pool.take(1) for _ in range(5)]
    for block in blocks:
        pool.give_back(block)
    repeated = [pool.take(1) for _ in range(5)]
    assert sum(block in blocks for block in repeated) == 2


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_lease_ends_with_its_last_view(elsewhere: bool) -> None:
    pool = BlockPool(1 << 20)
    block = pool.take(1000)
    views = [pool.lease(block)[100:200]]
    views.append(views[0][5:6].toreadonly())
    views[0][5] = 77
    assert pool.num_leases == 1
    del views[0]
    assert (views[0][0], pool.num_leases) == (77, 1)
    if elsewhere:
        thread = threading.Thread(target=views.clear)
        thread.start()
        thread.join()
    else:
        views.clear()
    assert pool.num_leases == 0
    assert pool.take(1000) is block


def test_a_lease_outlives_the_pool() -> None:
    pool = BlockPool(1 << 20)
    view = pool.lease(pool.take(1000))
    view[0] = 5
    pool.close()
    assert (view[0], pool.num_leases) == (5, 1)
    del view
    assert pool.num_leases == 0
    assert pool._idle_bytes == 0


def test_populated_pages_cost_no_fault_each() -> None:
    try:
        Block(-1, 4096).madvise(MADV_POPULATE_WRITE)
    except OSError:
        pytest.skip("this kernel does not allocate mapped memory on request")
    num_pages = 4096
    block = Block(-1, num_pages * 4096)
    block.populate(len(block) // 2)
    block.populate(len(block))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block[::4096] = bytes(num_pages)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < num_pages // 2


def test_tensors_are_placed_on_cache_lines_of_their_own() -> None:
    assert placement([0]) == ([0], 0)
    assert placement([7]) == ([0], 64)
    assert placement([1, 64, 65, 0, 5]) == ([0, 64, 128, 256, 256], 320)
