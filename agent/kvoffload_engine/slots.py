"""What the scheduler tells the workers about one job: which slots, and how a slot is laid out. Pickled by vLLM.

Made by `kvoffload_engine.manager` (scheduler process), read by `kvoffload_engine.worker` and `worker_link`; so a worker
needs no message of its own to copy.
"""

from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(frozen=True)
class SlotRow:
    """The row of `EngineReady`; worker r uses entry r of each tuple."""

    slot_bytes: int
    part_offsets: tuple[int, ...]
    sharers: tuple[int, ...]
    sharer_index: tuple[int, ...]


@dataclass(frozen=True)
class RegionSlots(LoadStoreSpec):
    """Slots of one store or load job, in the order of its chunks: byte offsets into the region, packed little-endian
    int64.

    `epoch` is the daemon's when it gave them out. `pageable`: a rank's device registers no pages, so none uses
    registration.
    """

    epoch: int
    offsets: bytes
    row: SlotRow
    pageable: bool = False
