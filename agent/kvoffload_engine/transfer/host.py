"""Copies for KV caches in host memory (vLLM's CPU platform): done at once, in the calling thread.

Runs in vLLM's workers on the CPU platform, called by `kvoffload_engine.worker` and, about the region, by `worker_link`.
The model has run in the same thread, so there is nothing to wait for.
"""

import ctypes
import time

from kvoffload_engine.mapping import RegionMapping
from kvoffload_engine.transfer.plan import CopyPlan


class HostTransfer:
    """Copies a plan page by page; a job is finished when `start` returns."""

    def __init__(self) -> None:
        self._finished: list[tuple[int, float]] = []

    def start(self, job_id: int, plan: CopyPlan, *, to_region: bool) -> None:
        """Copy all of it now."""
        begin = time.monotonic()
        host, device = plan.host_addresses.tolist(), plan.device_addresses.tolist()
        targets, sources = (host, device) if to_region else (device, host)
        for target, source, num_bytes in zip(targets, sources, plan.num_bytes.tolist(), strict=True):
            ctypes.memmove(target, source, num_bytes)
        self._finished.append((job_id, time.monotonic() - begin))

    def finished(self) -> list[tuple[int, float]]:
        """Jobs since the last call, with their seconds."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def region_mapped(self, mapping: RegionMapping, extent_bytes: int) -> None:
        """Host memory needs no registration."""

    def extents_revoked(self, offsets: list[int]) -> None:
        """As `region_mapped`."""

    def use_pageable(self) -> None:
        """As `region_mapped`."""

    @property
    def registration_refused(self) -> str:
        """Never: nothing is registered."""
        return ""

    def shutdown(self) -> None:
        """Nothing is ever under way."""
