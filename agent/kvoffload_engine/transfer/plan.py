"""The copy plan: which bytes go where, for one store or load job of one rank.

Pure: arrays in, arrays out. Runs in vLLM's workers, called by `kvoffload_engine.worker`. No Python loop over blocks;
one iteration for each KV cache group.

    job: GPU block ids [7 3 9 | 4 ...] by group, slots [s0 s1 | s2 ...], one for each chunk of each group
    first block in the middle of a chunk: block_indices[g] % blocks_per_chunk blocks of the first slot are skipped

    device address  tensor base + block id * block stride
    host address    region base + slot + part offset + block in chunk * block bytes + page offset
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.layout.pages import CHECKSUM_BYTES, PartLayout

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DeviceTensors:
    """Addresses of block 0 and bytes from block to block, one entry for each KV cache tensor of this worker."""

    base_addresses: Int64Array
    block_strides: Int64Array
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Stripe:
    """This rank's share of the writing: number `index` of `sharers` ranks that hold the part. Loads take all: (0,
    1)."""

    index: int
    sharers: int


WHOLE = Stripe(0, 1)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One row for each page to copy: addresses, bytes, and where the page's checksum stands (an address; of no meaning
    where the layout has none)."""

    device_addresses: Int64Array
    host_addresses: Int64Array
    num_bytes: Int64Array
    checksum_addresses: Int64Array

    @property
    def total_bytes(self) -> int:
        """Bytes that the plan moves."""
        return int(self.num_bytes.sum())


EMPTY_PLAN = CopyPlan(*(np.empty(0, dtype=np.int64) for _ in range(4)))


class PlanError(ValueError):
    """Block ids, slots and layout do not fit together: nothing is copied."""


def plan_copy(
    *,
    layout: PartLayout,
    tensors: DeviceTensors,
    block_ids: npt.NDArray[np.integer],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    slot_offsets: Int64Array,
    slot_bytes: int,
    part_offset: int,
    region_address: int,
    region_bytes: int,
    stripe: Stripe,
) -> CopyPlan:
    """Plan one job of one rank. Raises PlanError before anything could be written outside its slot or block."""
    if not len(group_sizes) == len(block_indices) == len(layout.groups):
        raise PlanError(f"job of {len(group_sizes)} groups, {len(layout.groups)} known")
    if part_offset + layout.part_bytes > slot_bytes:
        raise PlanError(f"part of {layout.part_bytes} bytes at {part_offset} ends outside a slot of {slot_bytes} bytes")
    ids = np.asarray(block_ids, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= tensors.num_blocks):
        raise PlanError(f"block ids {ids.min()} to {ids.max()}, the cache has {tensors.num_blocks} blocks")
    slots = np.asarray(slot_offsets, dtype=np.int64)
    if slots.size and (slots.min() < 0 or slots.max() > region_bytes - slot_bytes):
        raise PlanError(f"slot offsets {slots.min()} to {slots.max()} of {slot_bytes} bytes, region of {region_bytes}")

    pieces: list[tuple[Int64Array, ...]] = []
    next_block = next_slot = 0
    for group, num_blocks, first_index in zip(layout.groups, group_sizes, block_indices, strict=True):
        if num_blocks == 0:
            continue
        position = np.arange(num_blocks, dtype=np.int64) + first_index % layout.blocks_per_chunk
        chunk = position // layout.blocks_per_chunk + next_slot
        in_chunk = position % layout.blocks_per_chunk
        if int(chunk[-1]) >= slots.size:
            raise PlanError(
                f"{num_blocks} blocks from block {first_index} need {int(chunk[-1]) + 1} slots, got {slots.size}"
            )
        layers = np.arange(len(group.page_bytes), dtype=np.int64)
        tensor = np.array(group.tensor_indices, dtype=np.int64)
        page = in_chunk[:, None] * layers.size + layers[None, :]
        part_begin = slots[chunk][:, None] + (region_address + part_offset)
        device = tensors.base_addresses[tensor][None, :] + (
            ids[next_block : next_block + num_blocks][:, None] * tensors.block_strides[tensor][None, :]
        )
        host = (
            part_begin + in_chunk[:, None] * group.block_bytes + np.array(group.page_offsets, dtype=np.int64)[None, :]
        )
        # pages go round the ranks in turns that begin with another rank from slot to slot: where a chunk has one page
        # (a packed tensor), the ranks take turns by chunk
        mine = (slots[chunk][:, None] // slot_bytes + page) % stripe.sharers == stripe.index
        pieces.append(
            (
                device[mine],
                host[mine],
                np.broadcast_to(np.array(group.page_bytes, dtype=np.int64), page.shape)[mine],
                (part_begin + layout.checksum_offset + CHECKSUM_BYTES * page)[mine],
            )
        )
        next_block += num_blocks
        next_slot = int(chunk[-1]) + 1
    if next_block != ids.size or next_slot != slots.size:
        raise PlanError(f"{ids.size} blocks and {slots.size} slots, of which the job uses {next_block} and {next_slot}")
    if not pieces:
        return EMPTY_PLAN
    return CopyPlan(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
