"""The worker's side of a transfer: one per vLLM worker process, called by vLLM's connector in the thread that runs
the model.

    submit_store   plan (this rank's pages) -> copy -> when done: Seal to the daemon, success to vLLM
    submit_load    plan (all pages of the part) -> copy -> when done: success to vLLM, or the job is a failed load
    get_finished   what is done; never waits

vLLM asserts the success of every job, so a job that failed is reported as done: a failed store was given to `Fail`
and is never sealed, a failed load is in `take_failed_loads`, which our connector turns into a recomputation.

    epochs   a store needs the session's own epoch (its Seal would be refused); a load needs a mapping of that epoch
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvoffload.errors import DaemonUnavailable, KVOffloadError
from kvoffload.layout.pages import PartLayout
from kvoffload.protocol.client import Connector, Session
from kvoffload.protocol.messages import (
    Drain,
    EngineLost,
    EngineReady,
    Fail,
    Hello,
    Mapped,
    Message,
    Refused,
    Report,
    Revoke,
    Revoked,
    Seal,
    build_reassertion,
)
from kvoffload_engine.attachment import AttachmentLock
from kvoffload_engine.log import logger
from kvoffload_engine.mapping import RegionMapping
from kvoffload_engine.slots import RegionSlots
from kvoffload_engine.transfer.checksums import PageChecksums
from kvoffload_engine.transfer.plan import (
    EMPTY_PLAN,
    WHOLE,
    CopyPlan,
    DeviceTensors,
    PlanError,
    Stripe,
    plan_copy,
)

REPORT_SECONDS = 1.0
MAX_UNSENT = 4096
"""Ends of stores that are kept for a session to come; older ones are freed by the daemon when this engine ends."""
START_WAIT_SECONDS = 2.0
"""How long a starting worker waits for the daemon; later it connects in the background."""


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


@dataclass(slots=True)
class Job:
    """One submitted job."""

    slots: RegionSlots
    is_store: bool
    plan: CopyPlan
    error: str = ""


class KVOffloadWorker(OffloadingWorker):
    """Copies between this worker's KV cache and the region, and talks with the daemon about what it has written."""

    def __init__(
        self,
        *,
        rank: int,
        socket_path: str,
        make_hello: Callable[[], Hello],
        layout: PartLayout,
        tensors: DeviceTensors,
        transfer: Transfer,
        checksums: PageChecksums | None = None,
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._tensors = tensors
        self._transfer = transfer
        self._checksums = checksums
        self._mapping: RegionMapping | None = None
        self._old_mappings: list[RegionMapping] = []
        self._lock = AttachmentLock()
        self._jobs: dict[int, Job] = {}
        self._failed: deque[tuple[int, bool]] = deque()
        self._done: deque[TransferResult] = deque()
        self._unsent: deque[Seal | Fail] = deque(maxlen=MAX_UNSENT)
        self._sending = threading.Lock()
        """For `_unsent`, which both threads send."""
        self._draining = False
        self._counters = threading.Lock()
        self._stored_bytes = self._loaded_bytes = self._failed_loads = self._failed_stores = 0
        self._next_report = 0.0
        self._connector = Connector(
            socket_path,
            make_hello=make_hello,
            on_connected=self._connected,
            on_event=lambda line: logger.info("kvoffload rank %d: %s", rank, line),
            on_readable=self._readable,
            on_tick=self._tick,
        )

    def start(self) -> None:
        """Connect; a daemon that is there is found before the engine is up."""
        self._connector.start(wait_seconds=START_WAIT_SECONDS)

    # --- vLLM's interface -------------------------------------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """KV cache -> region: this rank's share of the pages."""
        assert isinstance(dst_spec, RegionSlots)
        row = dst_spec.row
        stripe = Stripe(row.sharer_index[self._rank], row.sharers[self._rank])
        self._submit(job_id, src_spec, dst_spec, stripe, is_store=True)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002 - of vLLM 0.33; our loads queue behind loads only
    ) -> bool:
        """Region -> KV cache: the whole part."""
        assert isinstance(src_spec, RegionSlots)
        self._submit(job_id, dst_spec, src_spec, WHOLE, is_store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that are done, all as successes (see the module's docstring)."""
        self._collect()
        results = list(self._done)
        self._done.clear()
        self._report()
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs' copies are done; their results come by `get_finished`."""
        self._transfer.wait({job_id for job_id in job_ids if job_id in self._jobs})
        self._collect()

    def shutdown(self) -> None:
        """Finish what is under way, then end the session and unmap."""
        self._transfer.shutdown()
        self._collect()
        self._send_unsent()
        self._report(force=True)
        self._connector.close()
        for mapping in [*self._old_mappings, *([self._mapping] if self._mapping else [])]:
            mapping.close()
        self._old_mappings, self._mapping = [], None
        self._lock.close()

    def take_failed_loads(self) -> dict[int, bool]:
        """Loads that failed since the last call: job id -> whether the bytes were wrong (and not only
        unreachable)."""
        failed = dict(self._failed)
        self._failed.clear()
        return failed

    @property
    def registration_refused(self) -> str:
        """Why this rank's device registers no pages; the scheduler tells the other ranks."""
        return self._transfer.registration_refused

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _submit(
        self, job_id: int, device: GPULoadStoreSpec, slots: RegionSlots, stripe: Stripe, *, is_store: bool
    ) -> None:
        job = Job(slots, is_store, EMPTY_PLAN)
        # Known before the epoch is looked at: if the daemon restarts now, the re-assertion names these slots.
        self._jobs[job_id] = job
        try:
            if slots.pageable:
                self._transfer.use_pageable()
            mapping = self._usable_mapping(slots, is_store=is_store)
            job.plan = plan_copy(
                layout=self._layout,
                tensors=self._tensors,
                block_ids=device.block_ids,
                group_sizes=device.group_sizes,
                block_indices=device.block_indices,
                slot_offsets=np.frombuffer(slots.offsets, dtype="<i8"),
                slot_bytes=slots.row.slot_bytes,
                part_offset=slots.row.part_offsets[self._rank],
                region_address=mapping.address,
                region_bytes=mapping.num_bytes,
                stripe=stripe,
            )
            self._transfer.start(job_id, job.plan, to_region=is_store)
        except (KVOffloadError, PlanError) as error:
            job.error = str(error)
            self._finish(job_id, 0.0)

    def _usable_mapping(self, slots: RegionSlots, *, is_store: bool) -> RegionMapping:
        mapping, session = self._mapping, self._connector.current()
        if mapping is None or slots.epoch not in mapping.epochs:
            raise DaemonUnavailable(f"the slots are of epoch {slots.epoch}, which this worker has no region of")
        if is_store and (session is None or session.welcome.epoch != slots.epoch or self._draining):
            raise DaemonUnavailable("the daemon that gave these slots out is gone or stops")
        return mapping

    def _collect(self) -> None:
        for job_id, seconds in self._transfer.finished():
            self._finish(job_id, seconds)

    def _finish(self, job_id: int, seconds: float) -> None:
        job = self._jobs[job_id]
        moved = 0 if job.error else job.plan.total_bytes
        if job.is_store:
            self._finish_store(job)
        else:
            self._finish_load(job_id, job)
        with self._counters:
            if job.is_store:
                self._stored_bytes += moved
                self._failed_stores += bool(job.error)
            else:
                self._loaded_bytes += moved
                self._failed_loads += bool(job.error)
        del self._jobs[job_id]
        self._done.append(TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=seconds))

    def _finish_store(self, job: Job) -> None:
        if job.error:
            logger.warning("kvoffload rank %d: a store was dropped: %s", self._rank, job.error)
        elif self._checksums is not None:
            self._checksums.write(job.plan)
        epoch, offsets = job.slots.epoch, job.slots.offsets
        with self._sending:
            self._unsent.append(Fail(epoch, offsets) if job.error else Seal(epoch, offsets))
        self._send_unsent()  # or later, when the daemon, or another one, is there again

    def _finish_load(self, job_id: int, job: Job) -> None:
        bytes_are_wrong = False
        if not job.error and self._checksums is not None:
            job.error = self._checksums.verify(job.plan)
            bytes_are_wrong = bool(job.error)
        if job.error:
            self._failed.append((job_id, bytes_are_wrong))
            logger.warning("kvoffload rank %d: a load failed and is recomputed: %s", self._rank, job.error)

    # --- the session; `_connected` and `_readable` run in the connector's thread ------------------------------------

    def _connected(self, session: Session) -> None:
        region, lock = session.take_descriptors()
        with self._lock.succeeded_by(lock):
            try:
                old = self._map(region, session)
            finally:
                os.close(region)
            self._reassert(session, old)
        self._draining = False

    def _map(self, region: int, session: Session) -> RegionMapping | None:
        """Map the session's region, unless it is the one that is mapped; returns what was mapped before."""
        epoch, num_bytes = session.welcome.epoch, session.welcome.region_bytes
        old = self._mapping
        if old is not None and old.is_of(region, num_bytes):
            old.epochs.add(epoch)
            return old
        mapping = RegionMapping(region, num_bytes, epoch)
        self._transfer.region_mapped(mapping, session.welcome.extent_bytes)
        if old is not None:
            self._old_mappings.append(old)  # a copy may still be under way: unmapped at the end
        self._mapping = mapping
        return old

    def _reassert(self, session: Session, old: RegionMapping | None) -> None:
        """Say what copies may still read or write, and that this rank has mapped the region."""
        reassertion: Sequence[Message] = ()
        jobs = list(self._jobs.values())
        if jobs:
            oldest = min(job.slots.epoch for job in jobs)
            reads = b"".join(job.slots.offsets for job in jobs if not job.is_store)
            writes = b"".join(job.slots.offsets for job in jobs if job.is_store)
            reassertion = build_reassertion(oldest, reads, writes)
        elif old is not None:
            reassertion = build_reassertion(max(old.epochs), b"", b"")
        session.send(*reassertion, Mapped())

    def _tick(self) -> None:
        """In the connector's thread, while there is a session: what an idle engine's model thread does not send."""
        self._send_unsent()
        self._report()

    def _send_unsent(self) -> None:
        """Say what became of stores: at their end, or when there is a session again. In either thread."""
        session = self._connector.current()
        with self._sending:
            while session is not None and self._unsent:
                try:
                    session.send(self._unsent[0])
                except DaemonUnavailable:
                    return
                self._unsent.popleft()

    def _readable(self, session: Session) -> None:
        for message in session.receive():
            if isinstance(message, Revoke):
                self._revoke(session, message)
            elif isinstance(message, Drain):
                self._draining = True
                logger.info("kvoffload rank %d: the node daemon stops: %s", self._rank, message.message)
            elif isinstance(message, Refused):
                logger.warning(
                    "kvoffload rank %d: the node daemon refused: %s: %s", self._rank, message.reason, message.message
                )
            elif isinstance(message, EngineLost):
                logger.info("kvoffload rank %d: offload pauses: %s", self._rank, message.message)
            elif isinstance(message, EngineReady):
                self._draining = False  # a paused pool is active again
                self._log_row(message)

    def _revoke(self, session: Session, message: Revoke) -> None:
        self._transfer.extents_revoked(np.frombuffer(message.extents, dtype="<i8").tolist())
        session.send(Revoked(message.extents))

    def _log_row(self, ready: EngineReady) -> None:
        logger.info(
            "kvoffload rank %d: offload is on: %s, slots of %d bytes, this rank's part at %d, written by %d rank(s)%s",
            self._rank,
            "one copy for all ranks" if ready.replicated else "a part for each rank",
            ready.slot_bytes,
            ready.part_offsets[self._rank],
            ready.sharers[self._rank],
            f" ({ready.reason})" if ready.reason else "",
        )

    def _report(self, *, force: bool = False) -> None:
        """Tell the daemon what was moved since the last report: after a step, or from the connector's thread."""
        now = time.monotonic()
        session = self._connector.current()
        if session is None or (now < self._next_report and not force):
            return
        self._next_report = now + REPORT_SECONDS
        with self._counters:
            counts = (self._stored_bytes, self._loaded_bytes, self._failed_loads, self._failed_stores)
            self._stored_bytes = self._loaded_bytes = self._failed_loads = self._failed_stores = 0
        if not any(counts):
            return
        refused = self._transfer.registration_refused
        note = f"pages are not registered with the device of rank {self._rank}: {refused}" if refused else ""
        try:
            session.send(Report(*counts, note=note))
        except DaemonUnavailable as error:
            logger.debug("kvoffload rank %d: a report was not sent: %s", self._rank, error)
