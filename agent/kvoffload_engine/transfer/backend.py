"""What a backend of copies is: `transfer.host` where the KV cache is in host memory, `transfer.cuda` where on a device.

Runs in vLLM's workers. `kvoffload_engine.worker` begins jobs and asks what is done, in the thread that runs the model;
`kvoffload_engine.worker_link` says what becomes of the region, in the connector's.
"""

from typing import Protocol

from kvoffload_engine.mapping import RegionMapping
from kvoffload_engine.transfer.plan import CopyPlan


class Transfer(Protocol):
    """A backend: `transfer.host` or `transfer.cuda`."""

    def start(self, job_id: int, plan: CopyPlan, *, to_region: bool) -> None:
        """Begin to copy."""

    def finished(self) -> list[tuple[int, float]]:
        """Jobs done since the last call, with the seconds that they took."""

    def wait(self, job_ids: set[int]) -> None:
        """Return when these are done."""

    def region_mapped(self, mapping: RegionMapping, extent_bytes: int) -> None:
        """A region was mapped: register its extents with the device as they come into use."""

    def extents_revoked(self, offsets: list[int]) -> None:
        """These extents lose their pages: unregister them."""

    def use_pageable(self) -> None:
        """Another rank cannot register: undo all registrations."""

    @property
    def registration_refused(self) -> str:
        """Why the device registers nothing, empty while it does (or needs not)."""

    def shutdown(self) -> None:
        """Wait for what is under way and give everything back."""
