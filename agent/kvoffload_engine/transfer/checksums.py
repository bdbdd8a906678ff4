"""The optional checksum of each page, in the slot itself: written after the copy, verified before a load counts as
done.

Runs in vLLM's workers, called by `kvoffload_engine.worker` when `KVOFFLOAD_CHECKSUM` is `sampled` or `full`. It
stands in a trailer of the part (`kvoffload.layout.pages`), so it needs no message: whoever loads a page finds its
sum beside it.

    trailer  | sum of page 0 | sum of page 1 | ...   8 bytes each: a marker and CRC-32; 0: the writer took none
"""

import ctypes
import zlib

import numpy as np
import numpy.typing as npt

from kvoffload_engine.transfer.plan import CopyPlan

MARKER = 0x6B766F_00000000
"""In the upper half of every sum, so that a sum is never 0."""
SAMPLED_PAGES = 16
"""With `sampled`, one page of so many has a sum."""
MODES = ("off", "sampled", "full")


def page_sum(address: int, num_bytes: int) -> int:
    """The sum of so many bytes of this process's memory."""
    return MARKER | zlib.crc32((ctypes.c_char * num_bytes).from_address(address))


class PageChecksums:
    """Takes and verifies sums, of all pages or of a sample."""

    def __init__(self, mode: str) -> None:
        self._every = 1 if mode == "full" else SAMPLED_PAGES

    def write(self, plan: CopyPlan) -> None:
        """After a store's copy: a sum, or 0, for each page that this rank wrote."""
        sampled = self._sample(plan)
        rows = zip(
            plan.host_addresses.tolist(),
            plan.num_bytes.tolist(),
            plan.checksum_addresses.tolist(),
            sampled.tolist(),
            strict=True,
        )
        for address, num_bytes, target, is_sampled in rows:
            ctypes.c_uint64.from_address(target).value = page_sum(address, num_bytes) if is_sampled else 0

    def verify(self, plan: CopyPlan) -> str:
        """After a load's copy: what is wrong with the region's bytes, empty if nothing."""
        rows = zip(plan.host_addresses.tolist(), plan.num_bytes.tolist(), plan.checksum_addresses.tolist(), strict=True)
        for address, num_bytes, source in rows:
            expected = ctypes.c_uint64.from_address(source).value
            if expected and expected != page_sum(address, num_bytes):
                return f"a page of {num_bytes} bytes does not have the checksum that its writer took"
        return ""

    def _sample(self, plan: CopyPlan) -> npt.NDArray[np.bool_]:
        """Chosen by the page's place, the same for every store to it."""
        chosen: npt.NDArray[np.bool_] = _scattered(plan.checksum_addresses) % np.uint64(self._every) == 0
        return chosen


def _scattered(places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The places as numbers in which no step from slot to slot is left (splitmix64's end): slots are multiples of 64
    bytes, so without it the same pages of every slot would be chosen, and where slots have few pages, none."""
    mixed = places.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
