"""Copies for KV caches on a GPU: batched, asynchronous, on streams of their own, in vLLM's own way.

Runs in vLLM's workers, called by `kvoffload_engine.worker` and, about the region, by `worker_link`. Order, for each
direction:

    compute stream   ──model──┐ wait_stream       (a store reads what the model wrote; a load's target may still be
    transfer stream           └─ start event ─ copies ─ end event                          zeroed or written by it)
    next transfer                                           └ wait_event: in the order of submission

A job is finished when its end event is. Only the device calls are vLLM's and torch's (`VllmDevice`); tests put a
recorder in their place.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvoffload_engine.log import logger
from kvoffload_engine.mapping import RegionMapping
from kvoffload_engine.transfer.pinning import Pinning
from kvoffload_engine.transfer.plan import CopyPlan


class Device(Protocol):
    """The calls of a device that a transfer makes."""

    def current_stream(self) -> Any:
        """The stream that the model runs on."""

    def new_stream(self) -> Any:
        """A stream for one transfer."""

    def new_event(self) -> Any:
        """An event that keeps time."""

    def new_descriptors(self, num_copies: int) -> Any:
        """Host memory for so many copies: three rows of int64, to be given back as it is."""

    def copy(self, stream: Any, descriptors: Any, plan: CopyPlan, *, to_region: bool) -> None:
        """Submit the plan's copies on the stream."""

    def register(self, address: int, num_bytes: int) -> str:
        """Register host memory; says what was wrong, empty if nothing."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""


@dataclass(slots=True)
class Submitted:
    """One transfer under way."""

    job_id: int
    stream: Any
    start: Any
    end: Any
    descriptors: Any


class DeviceTransfer:
    """Copies plans on streams; `start` returns at once."""

    def __init__(self, device: Device | None = None) -> None:
        self._device: Device = device if device is not None else VllmDevice()
        self._under_way: dict[bool, deque[Submitted]] = {True: deque(), False: deque()}
        self._streams: list[Any] = []
        self._events: list[Any] = []
        self._pinning: Pinning | None = None
        self._mapping: RegionMapping | None = None
        self._extent_bytes = 0

    def start(self, job_id: int, plan: CopyPlan, *, to_region: bool) -> None:
        """Submit the copies; the job is done when its end event is."""
        device, queue = self._device, self._under_way[to_region]
        self._want_registered(plan)
        stream = self._streams.pop() if self._streams else device.new_stream()
        start = self._events.pop() if self._events else device.new_event()
        end = self._events.pop() if self._events else device.new_event()
        descriptors = device.new_descriptors(plan.num_bytes.size)
        stream.wait_stream(device.current_stream())
        if queue:
            stream.wait_event(queue[-1].end)
        start.record(stream)
        if plan.num_bytes.size:
            device.copy(stream, descriptors, plan, to_region=to_region)
        end.record(stream)
        queue.append(Submitted(job_id, stream, start, end, descriptors))

    def finished(self) -> list[tuple[int, float]]:
        """Jobs whose end event is done, with the seconds between their events."""
        finished = []
        for queue in self._under_way.values():
            while queue and queue[0].end.query():
                done = queue.popleft()
                finished.append((done.job_id, done.start.elapsed_time(done.end) * 1e-3))
                self._streams.append(done.stream)
                self._events += [done.start, done.end]
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs' copies are done."""
        for queue in self._under_way.values():
            for one in queue:
                if one.job_id in job_ids:
                    one.end.synchronize()

    def region_mapped(self, mapping: RegionMapping, extent_bytes: int) -> None:
        """A (new) region: register its extents as they come into use."""
        self._synchronize()
        if self._pinning is not None:
            self._pinning.close()
        self._mapping, self._extent_bytes = mapping, extent_bytes
        self._pinning = Pinning(
            base_address=mapping.address,
            extent_bytes=extent_bytes,
            register=self._device.register,
            unregister=self._device.unregister,
        )

    def extents_revoked(self, offsets: list[int]) -> None:
        """Unregister these extents before the daemon takes their pages."""
        self._synchronize()
        if self._pinning is not None:
            self._pinning.revoke({offset // self._extent_bytes for offset in offsets})

    def use_pageable(self) -> None:
        """Another rank cannot register: all ranks go on in one mode."""
        if self._pinning is not None and not self._pinning.refused:
            self._synchronize()
            self._pinning.give_up("another rank's device registers no pages")
            logger.warning("kvoffload: another rank's device registers no pages: copies go through pageable memory")

    @property
    def registration_refused(self) -> str:
        """Why this rank's device registers nothing, empty while it does."""
        return self._pinning.refused if self._pinning is not None else ""

    def shutdown(self) -> None:
        """Wait for every copy, then undo all registrations."""
        self._synchronize()
        if self._pinning is not None:
            self._pinning.close()
            self._pinning = None

    def _synchronize(self) -> None:
        for queue in self._under_way.values():
            for one in list(queue):
                one.end.synchronize()

    def _want_registered(self, plan: CopyPlan) -> None:
        if self._pinning is not None and self._mapping is not None and not self._pinning.refused:
            extents = np.unique((plan.host_addresses - self._mapping.address) // self._extent_bytes)
            self._pinning.want(set(extents.tolist()))


class VllmDevice:
    """A CUDA or ROCm device, by torch and vLLM's batched copy."""

    def __init__(self) -> None:
        import torch
        from vllm import _custom_ops

        self._torch = torch
        self._swap = _custom_ops.swap_blocks_batch
        self._index = torch.cuda.current_device()
        """This rank's device. A thread that is not the worker's own begins on device 0, where a call would make a
        context of its own and take hundreds of MB from another rank."""

    def current_stream(self) -> Any:
        """As vLLM sees it."""
        from vllm.utils.torch_utils import current_stream

        return current_stream()

    def new_stream(self) -> Any:
        """A stream of the worker's device."""
        return self._torch.cuda.Stream()

    def new_event(self) -> Any:
        """With timing, for vLLM's transfer statistics."""
        return self._torch.Event(enable_timing=True)

    def new_descriptors(self, num_copies: int) -> Any:
        """Pinned: the batched copy reads them asynchronously."""
        return self._torch.empty((3, num_copies), dtype=self._torch.int64, pin_memory=num_copies > 0)

    def copy(self, stream: Any, descriptors: Any, plan: CopyPlan, *, to_region: bool) -> None:
        """One call for the whole plan. The region's bytes do not change under a load: its reads may go in any
        order."""
        host, device = plan.host_addresses, plan.device_addresses
        rows = descriptors.numpy()
        rows[0], rows[1] = (device, host) if to_region else (host, device)
        rows[2] = plan.num_bytes
        with self._torch.cuda.stream(stream):
            self._swap(descriptors[0], descriptors[1], descriptors[2], is_src_access_order_any=not to_region)

    def register(self, address: int, num_bytes: int) -> str:
        """`cudaHostRegister`, through torch's own runtime."""
        with self._torch.cuda.device(self._index):
            status = self._torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        return "" if int(status) == 0 else f"cudaHostRegister of {num_bytes} bytes: {status}"

    def unregister(self, address: int) -> None:
        """`cudaHostUnregister`."""
        with self._torch.cuda.device(self._index):
            status = self._torch.cuda.cudart().cudaHostUnregister(address)
        if int(status) != 0:
            logger.warning("kvoffload: cudaHostUnregister: %s", status)
