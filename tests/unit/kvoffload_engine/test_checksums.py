"""The checksum of a page: of all pages or of a sample, and found wrong where a byte of a page that has one changed."""

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.layout.pages import PartLayout, build_part_layout
from kvoffload.layout.rows import RankPart, plan_row
from kvoffload_engine.transfer.checksums import SAMPLED_PAGES, PageChecksums
from kvoffload_engine.transfer.plan import WHOLE, CopyPlan, DeviceTensors, Stripe, plan_copy

PAGE_BYTES = 72


class Region:
    """Slots of one replicated row in memory of this process, full of random bytes, also where checksums go."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.layout: PartLayout = build_part_layout(
            [[(page, PAGE_BYTES) for page in range(num_pages)]], blocks_per_chunk=1, has_checksums=True
        )
        self.slot_bytes = plan_row([RankPart("all", self.layout.part_bytes)] * 2).slot_bytes
        self.num_slots = num_slots
        self._map = mmap.mmap(-1, num_slots * self.slot_bytes)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.bytes[:] = np.random.default_rng(1).integers(0, 256, self.bytes.size, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def plan(self, stripe: Stripe = WHOLE) -> CopyPlan:
        """Every page of every slot, as a store or load of them all."""
        tensors = DeviceTensors(
            np.zeros(len(self.layout.groups[0].page_bytes), dtype=np.int64),
            np.full(len(self.layout.groups[0].page_bytes), PAGE_BYTES, dtype=np.int64),
            self.num_slots,
        )
        return plan_copy(
            layout=self.layout,
            tensors=tensors,
            block_ids=np.arange(self.num_slots),
            group_sizes=[self.num_slots],
            block_indices=[0],
            slot_offsets=np.arange(self.num_slots, dtype=np.int64) * self.slot_bytes,
            slot_bytes=self.slot_bytes,
            part_offset=0,
            region_address=self.address,
            region_bytes=self.bytes.size,
            stripe=stripe,
        )

    def sums(self) -> np.ndarray:
        """The sum that stands beside each page, by slot and page; 0 where the writer took none."""
        places = (self.plan().checksum_addresses - self.address)[:, None] + np.arange(8)
        return self.bytes[places].reshape(-1, 8).copy().view("<u8").reshape(self.num_slots, -1)

    def flip(self, page_number: int) -> None:
        """Change one byte of one page of the plan; again: change it back."""
        self.bytes[int(self.plan().host_addresses[page_number]) - self.address + PAGE_BYTES // 2] ^= 0xFF


def test_a_flipped_byte_in_a_sampled_page_is_found_and_in_an_unsampled_one_is_not() -> None:
    region, checksums = Region(num_pages=40, num_slots=4), PageChecksums("sampled")
    checksums.write(region.plan())
    assert checksums.verify(region.plan()) == ""
    sampled = region.sums().ravel() != 0
    assert 0 < sampled.sum() < sampled.size
    for number, is_sampled in enumerate(sampled.tolist()):
        region.flip(number)
        assert bool(checksums.verify(region.plan())) == is_sampled
        region.flip(number)
    assert checksums.verify(region.plan()) == ""


def test_with_full_a_flipped_byte_in_any_page_is_found() -> None:
    region, checksums = Region(num_pages=5, num_slots=3), PageChecksums("full")
    checksums.write(region.plan())
    assert checksums.verify(region.plan()) == ""
    for number in range(15):
        region.flip(number)
        assert checksums.verify(region.plan()) == f"a page of {PAGE_BYTES} bytes does not have the checksum that its " \
            "writer took"  # fmt: skip
        region.flip(number)


@pytest.mark.parametrize("num_pages", [1, 2, 8, 15, 16, 17, 61])
def test_a_sample_is_one_page_in_sixteen_and_leaves_no_page_of_a_chunk_out(num_pages: int) -> None:
    """One page a chunk is a packed tensor; which layers are checked must not depend on how the slots are aligned."""
    region = Region(num_pages, num_slots=1600)
    PageChecksums("sampled").write(region.plan())
    share = (region.sums() != 0).mean(axis=0) * SAMPLED_PAGES
    assert (share > 1 / 2).all()
    assert (share < 2).all()


@pytest.mark.parametrize("mode", ["sampled", "full"])
@given(sharers=st.integers(1, 9))
def test_ranks_that_share_the_writing_leave_the_sums_of_one_writer(mode: str, sharers: int) -> None:
    region, checksums = Region(num_pages=21, num_slots=30), PageChecksums(mode)
    checksums.write(region.plan())
    alone = region.sums()
    places = (region.plan().checksum_addresses - region.address)[:, None] + np.arange(8)
    region.bytes[places] = 0xEE
    for index in range(sharers):
        checksums.write(region.plan(Stripe(index, sharers)))
    assert np.array_equal(region.sums(), alone)
    assert checksums.verify(region.plan()) == ""


def test_a_slot_that_is_used_again_keeps_no_sum_of_before() -> None:
    region = Region(num_pages=33, num_slots=8)
    PageChecksums("full").write(region.plan())
    PageChecksums("sampled").write(region.plan())
    region.bytes[(region.plan().host_addresses - region.address)[region.sums().ravel() == 0]] ^= 0xFF
    assert PageChecksums("sampled").verify(region.plan()) == ""
