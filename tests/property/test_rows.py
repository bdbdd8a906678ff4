"""Rows: ranks that name one part share its bytes, all others never meet; whatever the number and lengths of the
parts."""

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.layout.rows import ALIGNMENT_BYTES, RankPart, align_up, plan_row

RANKS = st.lists(
    st.builds(RankPart, st.sampled_from(["all", "head-0", "head-1", "rank-0", "rank-1"]), st.integers(1, 5000)),
    min_size=1,
    max_size=16,
)


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
