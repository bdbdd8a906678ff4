"""Pages: what one rank's part of one chunk is made of, and where each page stands in it.

Pure, standard library only. The engine's workers build a `PartLayout` from their KV cache tensors and copy by it; its
`part_bytes` goes to the daemon in `Hello`.

A page is one block of one layer (or of one packed tensor, which holds all layers of a block). A chunk is
`blocks_per_chunk` blocks of one KV cache group, and one key. A part holds them block by block, layer by layer:

    part   | block 0: layer 0 | layer 1 | ... | block 1: layer 0 | ... |  checksums (optional, one for each page)  |
    page        0                  1               num_layers

Groups differ in their bytes for a chunk; every slot is as large as the largest group needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

CHECKSUM_BYTES = 8
"""One little-endian unsigned integer a page, in the part's trailer; 0 means that this page has none."""


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of one KV cache group, in the order of its layers.

    `tensor_indices[i]` is the tensor that layer i's blocks stand in and `page_bytes[i]` how many bytes of it are
    copied.
    """

    tensor_indices: tuple[int, ...]
    page_bytes: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(self.page_bytes)

    @property
    def page_offsets(self) -> tuple[int, ...]:
        """Where each layer's page begins in its block."""
        offsets, end = [], 0
        for num_bytes in self.page_bytes:
            offsets.append(end)
            end += num_bytes
        return tuple(offsets)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One rank's part of a slot, for every group."""

    groups: tuple[GroupPages, ...]
    blocks_per_chunk: int
    has_checksums: bool

    @property
    def data_bytes(self) -> int:
        """Bytes of the largest group's chunk, without checksums, rounded up so that the checksums are aligned."""
        largest = max(group.block_bytes for group in self.groups) * self.blocks_per_chunk
        return -(-largest // CHECKSUM_BYTES) * CHECKSUM_BYTES

    @property
    def checksum_offset(self) -> int:
        """Where the checksums begin in the part."""
        return self.data_bytes

    @property
    def part_bytes(self) -> int:
        """Length of the part, checksums included."""
        most_pages = max(len(group.page_bytes) for group in self.groups) * self.blocks_per_chunk
        return self.data_bytes + (CHECKSUM_BYTES * most_pages if self.has_checksums else 0)


def build_part_layout(
    pages: Sequence[Sequence[tuple[int, int]]], *, blocks_per_chunk: int, has_checksums: bool = False
) -> PartLayout:
    """From each group's (tensor index, page bytes) pairs. Raises ValueError for a group or page without bytes."""
    if blocks_per_chunk < 1:
        raise ValueError(f"{blocks_per_chunk} blocks a chunk, needed at least 1")
    if not pages or any(not group for group in pages):
        raise ValueError(f"{len(pages)} KV cache groups, of which at least one has no page")
    if any(num_bytes < 1 for group in pages for _, num_bytes in group):
        raise ValueError("a page of 0 bytes")
    groups = tuple(
        GroupPages(tuple(index for index, _ in group), tuple(num_bytes for _, num_bytes in group)) for group in pages
    )
    return PartLayout(groups, blocks_per_chunk, has_checksums)
