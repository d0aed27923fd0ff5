"""Cover: which responses complete a tag, in which order and how often."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.dataflow.parts import Cover


@pytest.fixture
def cover() -> Cover[str]:
    return Cover()


def test_an_empty_plan_is_complete_at_once(cover: Cover[str]):
    assert cover.complete() is None
    cover.expect(())
    assert cover.complete() == []


def test_duplicate_and_unexpected_parts_are_refused(cover: Cover[str]):
    cover.expect((0,))
    assert cover.arrive(0, "a")
    assert not cover.arrive(0, "b")
    assert not cover.arrive(7, "c")
    assert cover.complete() == ["a"]


def test_replacements_cover_a_lost_part_in_its_place(cover: Cover[str]):
    cover.expect((0, 1))
    cover.arrive(1, "one")
    cover.supersede(0, (2, 3))
    assert cover.missing() == [2, 3]
    cover.arrive(3, "three")
    assert cover.complete() is None
    cover.arrive(2, "two")
    assert cover.complete() == ["two", "three", "one"]


def test_late_response_before_its_replacements_counts(cover: Cover[str]):
    cover.expect((0,))
    cover.supersede(0, (1, 2))
    cover.arrive(1, "half")
    cover.arrive(0, "late but whole")
    assert cover.complete() == ["late but whole"]


@pytest.mark.parametrize("by", [(), (0,), (1,)])
def test_superseding_needs_new_ids(by, cover: Cover[str]):
    cover.expect((0, 1))
    with pytest.raises(ValueError, match="new ids"):
        cover.supersede(0, by)


def test_a_part_is_superseded_once_and_only_if_awaited(cover: Cover[str]):
    cover.expect((0,))
    cover.supersede(0, (1,))
    with pytest.raises(ValueError, match="superseded"):
        cover.supersede(0, (2,))
    with pytest.raises(ValueError, match="not awaited"):
        cover.supersede(9, (3,))


def test_anonymous_responses_are_counted(cover: Cover[str]):
    cover.arrive(None, "a")
    cover.expect_count(2)
    assert cover.complete() is None
    cover.arrive(None, "b")
    assert cover.complete() == ["a", "b"]


@given(st.data())
def test_every_pair_is_covered_exactly_once_whatever_is_lost_split_and_late(data):
    """Pairs 0..n-1 are partitioned, lost parts are partitioned again; responses come in any order, some twice."""
    num_pairs = data.draw(st.integers(1, 12))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_pairs - 1), max_size=3))) if num_pairs > 1 else []
    bounds = [0, *cuts, num_pairs]
    pairs_of = {part: range(a, b) for part, (a, b) in enumerate(itertools.pairwise(bounds))}
    cover: Cover[range] = Cover()
    cover.expect(tuple(pairs_of))
    lost = [part for part in list(pairs_of) if data.draw(st.booleans())]
    for part in lost:
        pairs = pairs_of[part]
        middle = data.draw(st.integers(pairs.start, pairs.stop))
        pieces = [piece for piece in (range(pairs.start, middle), range(middle, pairs.stop)) if len(piece)]
        new = [len(pairs_of) + place for place in range(len(pieces))]
        pairs_of.update(zip(new, pieces, strict=True))
        cover.supersede(part, new)
    responses = data.draw(st.permutations([*pairs_of, *pairs_of]))
    for part in responses:
        cover.arrive(part, pairs_of[part])
        whole = cover.complete()
        if whole is not None:
            assert [pair for piece in whole for pair in piece] == list(range(num_pairs))
            return
    pytest.fail("every part arrived and the tag is not whole")
