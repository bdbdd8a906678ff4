"""Layout of a part, and what a fingerprint is made of."""

import pytest

from kvoffload.layout.fingerprint import fingerprint
from kvoffload.layout.pages import build_part_layout


def test_a_part_holds_blocks_one_after_the_other_and_each_blocks_layers() -> None:
    layout = build_part_layout([[(0, 100), (1, 60)]], blocks_per_chunk=3)
    (group,) = layout.groups
    assert (group.block_bytes, group.page_offsets) == (160, (0, 100))
    assert layout.part_bytes == layout.data_bytes == 480


def test_a_slot_is_as_large_as_its_largest_group_needs() -> None:
    layout = build_part_layout([[(0, 64)], [(1, 64), (2, 64)], [(3, 100)]], blocks_per_chunk=1)
    assert layout.part_bytes == 128


def test_checksums_stand_behind_the_data_aligned_and_one_for_each_page() -> None:
    layout = build_part_layout([[(0, 9), (1, 9)]], blocks_per_chunk=2, has_checksums=True)
    assert layout.data_bytes == 40
    assert layout.checksum_offset % 8 == 0
    assert layout.part_bytes == 40 + 4 * 8


@pytest.mark.parametrize(("pages", "blocks_per_chunk"), [([], 1), ([[]], 1), ([[(0, 0)]], 1), ([[(0, 64)]], 0)])
def test_what_has_no_bytes_is_refused(pages: list[list[tuple[int, int]]], blocks_per_chunk: int) -> None:
    with pytest.raises(ValueError):
        build_part_layout(pages, blocks_per_chunk=blocks_per_chunk)


def test_the_order_of_fields_does_not_matter_and_every_value_does() -> None:
    one = fingerprint({"a": 1, "b": [1, 2], "c": {"x": None}})
    assert one.digest == fingerprint({"c": {"x": None}, "b": [1, 2], "a": 1}).digest
    others = [{"a": 2, "b": [1, 2], "c": {"x": None}}, {"a": 1, "b": [2, 1], "c": {"x": None}}, {"a": 1, "b": [1, 2]}]
    assert len({one.digest, *(fingerprint(other).digest for other in others)}) == 4


def test_a_value_without_a_stable_form_is_refused() -> None:
    with pytest.raises(TypeError):
        fingerprint({"a": object()})
    with pytest.raises(ValueError):
        fingerprint({"a": float("nan")})
