"""The worker's side of a transfer: one per vLLM worker process, called by vLLM's connector in the thread that runs
the model.

    submit_store   plan (this rank's pages) -> copy -> when done: Seal to the daemon, success to vLLM
    submit_load    plan (all pages of the part) -> copy -> when done: success to vLLM, or the job is a failed load
    get_finished   what is done; never waits

What the daemon says and hears, and which region is mapped, is the link's (`kvoffload_engine.worker_link`).

vLLM asserts the success of every job, so a job that failed is reported as done: a failed store was given to `Fail`
and is never sealed, a failed load is in `take_failed_loads`, which our connector turns into a recomputation.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvoffload.errors import KVOffloadError
from kvoffload.layout.pages import PartLayout
from kvoffload.protocol.messages import Hello
from kvoffload_engine.log import logger
from kvoffload_engine.offsets import unpack
from kvoffload_engine.slots import RegionSlots
from kvoffload_engine.transfer.backend import Transfer
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
from kvoffload_engine.worker_link import WorkerLink


@dataclass(slots=True)
class Job:
    """One submitted job."""

    slots: RegionSlots
    is_store: bool
    plan: CopyPlan
    error: str = ""


class KVOffloadWorker(OffloadingWorker):
    """Copies between this worker's KV cache and the region, and says through its link what it has written."""

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
        self._jobs: dict[int, Job] = {}
        self._failed: deque[tuple[int, bool]] = deque()
        self._done: deque[TransferResult] = deque()
        self.link = WorkerLink(
            rank=rank, socket_path=socket_path, make_hello=make_hello, transfer=transfer, copying=self._copying
        )

    def start(self) -> None:
        """Connect; a daemon that is there is found before the engine is up."""
        self.link.start()

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
        self.link.report()
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs' copies are done; their results come by `get_finished`."""
        self._transfer.wait({job_id for job_id in job_ids if job_id in self._jobs})
        self._collect()

    def shutdown(self) -> None:
        """Finish what is under way, then end the session and unmap."""
        self._transfer.shutdown()
        self._collect()
        self.link.close()

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
            mapping = self.link.usable_mapping(slots, is_store=is_store)
            job.plan = plan_copy(
                layout=self._layout,
                tensors=self._tensors,
                block_ids=device.block_ids,
                group_sizes=device.group_sizes,
                block_indices=device.block_indices,
                slot_offsets=unpack(slots.offsets),
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
        self.link.count(moved, is_store=job.is_store, failed=bool(job.error))
        del self._jobs[job_id]
        self._done.append(TransferResult(job_id=job_id, success=True, transfer_size=moved, transfer_time=seconds))

    def _finish_store(self, job: Job) -> None:
        if job.error:
            logger.warning("kvoffload rank %d: a store was dropped: %s", self._rank, job.error)
        elif self._checksums is not None:
            self._checksums.write(job.plan)
        self.link.end_store(job.slots, failed=bool(job.error))

    def _finish_load(self, job_id: int, job: Job) -> None:
        bytes_are_wrong = False
        if not job.error and self._checksums is not None:
            job.error = self._checksums.verify(job.plan)
            bytes_are_wrong = bool(job.error)
        if job.error:
            self._failed.append((job_id, bytes_are_wrong))
            logger.warning("kvoffload rank %d: a load failed and is recomputed: %s", self._rank, job.error)

    def _copying(self) -> list[tuple[RegionSlots, bool]]:
        """What copies may still read and write, for a daemon that came back; called from the connector's thread."""
        return [(job.slots, job.is_store) for job in list(self._jobs.values())]
