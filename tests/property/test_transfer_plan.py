"""The copy plan against a naive reference, and stripes: whatever the shape, each page goes once, and to its own
place."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.layout.pages import CHECKSUM_BYTES, PartLayout, build_part_layout
from kvoffload.layout.rows import RankPart, plan_row
from kvoffload_engine.transfer.plan import WHOLE, DeviceTensors, PlanError, Stripe, plan_copy

REGION_ADDRESS = 1 << 40
DEVICE_ADDRESS = 1 << 44


@dataclass(frozen=True)
class Job:
    layout: PartLayout
    tensors: DeviceTensors
    block_ids: list[int]
    group_sizes: list[int]
    block_indices: list[int]
    slots: list[int]
    slot_bytes: int
    part_offset: int
    region_bytes: int


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    blocks_per_chunk = draw(st.integers(1, 4))
    num_groups = draw(st.integers(1, 3))
    page_table, next_tensor = [], 0
    if draw(st.booleans()):  # packed: one tensor, of which each group takes whole blocks
        page_table, next_tensor = [[(0, draw(st.integers(1, 9)) * 8)]] * num_groups, 1
    else:
        shares_tensors = draw(st.booleans())  # groups whose layers stand in the same tensors, in blocks of their own
        for _ in range(num_groups):
            layers = draw(st.integers(1, 5))
            first = 0 if shares_tensors else next_tensor
            page_table.append([(first + layer, draw(st.integers(1, 9)) * 8) for layer in range(layers)])
            next_tensor = max(next_tensor, first + layers)
    layout = build_part_layout(page_table, blocks_per_chunk=blocks_per_chunk, has_checksums=draw(st.booleans()))
    num_blocks = draw(st.integers(8, 40))
    strides = [draw(st.integers(9, 12)) * 8 for _ in range(next_tensor)]
    tensors = DeviceTensors(
        base_addresses=np.array([DEVICE_ADDRESS + (index << 30) for index in range(next_tensor)], dtype=np.int64),
        block_strides=np.array(strides, dtype=np.int64),
        num_blocks=num_blocks,
    )
    sizes = [draw(st.integers(0, 7)) for _ in range(num_groups)]
    indices = [draw(st.integers(0, 9)) if size else 0 for size in sizes]
    num_chunks = sum(
        -(-(size + index % blocks_per_chunk) // blocks_per_chunk) if size else 0
        for size, index in zip(sizes, indices, strict=True)
    )
    row = plan_row([RankPart("a", layout.part_bytes), RankPart("b", layout.part_bytes)])
    region_slots = num_chunks + 5
    slots = draw(st.permutations(range(region_slots)))[:num_chunks]
    return Job(
        layout,
        tensors,
        [draw(st.integers(0, num_blocks - 1)) for _ in range(sum(sizes))],
        sizes,
        indices,
        [slot * row.slot_bytes for slot in slots],
        row.slot_bytes,
        draw(st.sampled_from(row.part_offsets)),
        region_slots * row.slot_bytes,
    )


def naive(job: Job, stripe: Stripe) -> list[tuple[int, int, int, int]]:
    copies, block, slot = [], 0, 0
    for group, size, first in zip(job.layout.groups, job.group_sizes, job.block_indices, strict=True):
        position = first % job.layout.blocks_per_chunk
        begin = slot
        for _ in range(size):
            slot = begin + position // job.layout.blocks_per_chunk
            in_chunk = position % job.layout.blocks_per_chunk
            for layer, (tensor, num_bytes) in enumerate(zip(group.tensor_indices, group.page_bytes, strict=True)):
                page = in_chunk * len(group.page_bytes) + layer
                if (job.slots[slot] // job.slot_bytes + page) % stripe.sharers != stripe.index:
                    continue
                device = int(job.tensors.base_addresses[tensor])
                device += job.block_ids[block] * int(job.tensors.block_strides[tensor])
                part = REGION_ADDRESS + job.slots[slot] + job.part_offset
                host = part + in_chunk * sum(group.page_bytes) + sum(group.page_bytes[:layer])
                copies.append((device, host, num_bytes, part + job.layout.checksum_offset + page * CHECKSUM_BYTES))
            block += 1
            position += 1
        slot = slot + 1 if size else begin
    return copies


def planned(job: Job, stripe: Stripe) -> list[tuple[int, int, int, int]]:
    plan = plan_copy(
        layout=job.layout,
        tensors=job.tensors,
        block_ids=np.array(job.block_ids, dtype=np.int32),
        group_sizes=job.group_sizes,
        block_indices=job.block_indices,
        slot_offsets=np.array(job.slots, dtype=np.int64),
        slot_bytes=job.slot_bytes,
        part_offset=job.part_offset,
        region_address=REGION_ADDRESS,
        region_bytes=job.region_bytes,
        stripe=stripe,
    )
    columns = (plan.device_addresses, plan.host_addresses, plan.num_bytes, plan.checksum_addresses)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(jobs(), st.integers(1, 9), st.data())
def test_the_plan_is_the_naive_one(job: Job, sharers: int, data: st.DataObject) -> None:
    stripe = Stripe(data.draw(st.integers(0, sharers - 1)), sharers)
    assert planned(job, stripe) == naive(job, stripe)


@given(jobs(), st.integers(1, 9))
def test_the_stripes_of_all_ranks_are_the_whole_and_no_page_is_written_twice(job: Job, sharers: int) -> None:
    whole = planned(job, WHOLE)
    parts = [copy for index in range(sharers) for copy in planned(job, Stripe(index, sharers))]
    assert sorted(parts) == sorted(whole)


@given(jobs())
def test_every_byte_stays_in_its_part_of_a_slot_and_no_two_pages_overlap(job: Job) -> None:
    taken: dict[int, list[tuple[int, int]]] = {}
    for _, host, num_bytes, _ in planned(job, WHOLE):
        slot, begin = divmod(host - REGION_ADDRESS, job.slot_bytes)
        assert slot * job.slot_bytes in job.slots
        assert job.part_offset <= begin
        assert begin + num_bytes <= job.part_offset + job.layout.data_bytes
        taken.setdefault(slot, []).append((begin, begin + num_bytes))
    for spans in taken.values():
        spans.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def pages_by_rank(num_pages: int, *, num_chunks: int, sharers: int) -> list[int]:
    """How many pages each of `sharers` ranks copies of so many chunks of one block of `num_pages` layers."""
    layout = build_part_layout([[(0, 8)] * num_pages], blocks_per_chunk=1)
    job = Job(
        layout,
        DeviceTensors(np.array([DEVICE_ADDRESS]), np.array([8]), num_chunks),
        list(range(num_chunks)),
        [num_chunks],
        [0],
        [chunk * layout.part_bytes for chunk in range(num_chunks)],
        layout.part_bytes,
        0,
        num_chunks * layout.part_bytes,
    )
    return [len(planned(job, Stripe(index, sharers))) for index in range(sharers)]


@given(st.integers(1, 80), st.integers(1, 16))
def test_a_chunk_is_shared_out_evenly(num_pages: int, sharers: int) -> None:
    shares = pages_by_rank(num_pages, num_chunks=1, sharers=sharers)
    assert sum(shares) == num_pages
    assert max(shares) - min(shares) <= 1


@given(st.integers(2, 16), st.integers(1, 8))
def test_ranks_take_turns_where_a_chunk_is_one_page(sharers: int, rounds: int) -> None:
    assert pages_by_rank(1, num_chunks=sharers * rounds, sharers=sharers) == [rounds] * sharers


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"block_ids": np.array([40])}, "the cache has 8 blocks"),
        ({"block_ids": np.array([-1])}, "the cache has 8 blocks"),
        ({"slot_offsets": np.array([-1])}, "slot offsets -1"),
        ({"slot_offsets": np.array([65])}, "slot offsets 65"),
        ({"slot_offsets": np.array([0, 64])}, "2 slots, of which the job uses 1 and 1"),
        ({"slot_offsets": np.array([], dtype=np.int64)}, "need 1 slots, got 0"),
        ({"group_sizes": [1, 0], "block_indices": [0, 0]}, "job of 2 groups, 1 known"),
        ({"part_offset": 32}, "ends outside a slot"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_before_a_byte_is_copied(change: dict, complaint: str) -> None:
    arguments = {
        "layout": build_part_layout([[(0, 64)]], blocks_per_chunk=1),
        "tensors": DeviceTensors(np.array([DEVICE_ADDRESS]), np.array([64]), 8),
        "block_ids": np.array([3]),
        "group_sizes": [1],
        "block_indices": [0],
        "slot_offsets": np.array([64]),
        "slot_bytes": 64,
        "part_offset": 0,
        "region_address": REGION_ADDRESS,
        "region_bytes": 128,
        "stripe": WHOLE,
    }
    assert len(plan_copy(**arguments).num_bytes) == 1
    with pytest.raises(PlanError, match=complaint):
        plan_copy(**{**arguments, **change})
