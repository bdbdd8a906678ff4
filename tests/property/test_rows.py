"""Rows: ranks share bytes only if they are unanimous, and parts never meet otherwise; whatever the number and lengths
of the parts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.layout.rows import ALIGNMENT_BYTES, RankPart, align_up, plan_row

PARTS = ["all", "head-0", "head-1", "rank-0", "rank-1"]
LENGTHS = st.integers(1, 5000)
MIXED = st.lists(st.builds(RankPart, st.sampled_from(PARTS), LENGTHS), min_size=1, max_size=16)


@st.composite
def agreeing_ranks(draw: st.DrawFn) -> list[RankPart]:
    """Ranks of one length that say one kind of part, or all but one do."""
    kind = draw(st.sampled_from([["all"], ["head-0"], ["head-0", "head-1"], ["rank-0"]]))
    names = [name for name in kind for _ in range(draw(st.integers(1, 4)))]
    length = draw(LENGTHS)
    ranks = [RankPart(name, length) for name in names]
    if draw(st.booleans()):
        ranks[draw(st.integers(0, len(ranks) - 1))] = RankPart(draw(st.sampled_from(PARTS)), length)
    return ranks


RANKS = MIXED | agreeing_ranks()


def may_share(ranks: list[RankPart]) -> bool:
    """The rule in words: one length for each name, and all say `all`, or all say a head and each head has as many."""
    if any(one.part == other.part and one.num_bytes != other.num_bytes for one in ranks for other in ranks):
        return False
    ranks_of = Counter(one.part for one in ranks)
    if "all" in ranks_of:
        return len(ranks_of) == 1
    return "rank-0" not in ranks_of and "rank-1" not in ranks_of and len(set(ranks_of.values())) == 1


@given(RANKS)
def test_ranks_share_what_they_name_if_they_are_unanimous_and_nothing_otherwise(ranks: list[RankPart]) -> None:
    row = plan_row(ranks)
    for one, place in zip(ranks, row.part_offsets, strict=True):
        for other, other_place in zip(ranks, row.part_offsets, strict=True):
            if one is not other:
                assert (place == other_place) == (may_share(ranks) and one.part == other.part)


@pytest.mark.parametrize(
    "parts",
    [
        ["all", "all", "all", "rank-3"],
        ["rank-0", "all", "all", "all"],
        ["all", "head-0"],
        ["all", "all", "head-0", "head-0"],
        ["head-0", "head-0", "head-1", "rank-3"],
        ["head-0", "head-0", "head-1", "head-0"],
        ["rank-0", "rank-0"],
    ],
    ids=lambda parts: " ".join(parts),
)
def test_ranks_that_are_not_unanimous_get_a_part_each(parts: list[str]) -> None:
    row = plan_row([RankPart(part, 4096) for part in parts])
    assert row == plan_row([RankPart(f"rank-{rank}", 4096) for rank in range(len(parts))])
    assert row.sharers == (1,) * len(parts)
    assert row.slot_bytes == row.plain_bytes


@given(RANKS, st.booleans())
def test_parts_are_equal_or_apart_and_inside_the_slot(ranks: list[RankPart], sharing_allowed: bool) -> None:
    row = plan_row(ranks, sharing_allowed=sharing_allowed)
    spans = [(offset, offset + length) for offset, length in zip(row.part_offsets, row.part_bytes, strict=True)]
    for begin, end in spans:
        assert begin % ALIGNMENT_BYTES == 0
        assert 0 <= begin < end <= row.slot_bytes
    for one in spans:
        for other in spans:
            assert one == other or one[1] <= other[0] or other[1] <= one[0]


@given(RANKS, st.booleans())
def test_sharers_of_a_part_are_numbered_from_zero(ranks: list[RankPart], sharing_allowed: bool) -> None:
    row = plan_row(ranks, sharing_allowed=sharing_allowed)
    for offset in set(row.part_offsets):
        members = [rank for rank, place in enumerate(row.part_offsets) if place == offset]
        assert [row.sharer_index[rank] for rank in members] == list(range(len(members)))
        assert {row.sharers[rank] for rank in members} == {len(members)}


@given(RANKS)
def test_nothing_is_shared_where_it_is_not_allowed(ranks: list[RankPart]) -> None:
    row = plan_row(ranks, sharing_allowed=False)
    assert set(row.sharers) == {1}
    assert row.slot_bytes == row.plain_bytes


@given(st.integers(2, 16), st.integers(1, 10**6))
def test_a_replicated_row_holds_the_bytes_once(ranks: int, num_bytes: int) -> None:
    row = plan_row([RankPart("all", num_bytes)] * ranks)
    assert row.is_replicated
    assert row.slot_bytes == align_up(num_bytes)
    assert row.plain_bytes == ranks * row.slot_bytes


def test_pipeline_ranks_of_different_lengths_share_one_slot_size() -> None:
    # case 3: the number of slots is the region's by the slot's bytes, the same for all ranks
    row = plan_row([RankPart(f"rank-{rank}", length) for rank, length in enumerate((1000, 1026, 1026, 967))])
    assert row.part_offsets == (0, 1024, 2112, 3200)
    assert row.slot_bytes == 4224


def test_ranks_that_name_one_part_and_differ_in_length_do_not_share() -> None:
    row = plan_row([RankPart("all", 4096), RankPart("all", 4095)])
    assert not row.is_replicated
    assert row.part_offsets == (0, 4096)
