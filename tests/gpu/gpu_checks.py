"""Checks of the device backend on a real GPU, run by vLLM's Python (a CUDA build): bytes, order, registration,
bandwidth.

`python gpu_checks.py` prints one JSON object, {check: figures or the traceback}. It needs no daemon and no model: the
region is a memfd, mapped as a worker maps it.
"""

import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvoffload.layout.pages import build_part_layout
from kvoffload_engine.mapping import RegionMapping
from kvoffload_engine.transfer.cuda import DeviceTransfer
from kvoffload_engine.transfer.plan import WHOLE, CopyPlan, DeviceTensors, Stripe, plan_copy

NUM_LAYERS, PAGE_BYTES, NUM_BLOCKS = 32, 73728, 512
"""A page of latent attention: 64 tokens of 576 numbers."""
SMALL_PAGE_BYTES = 18432
"""The same of 16 tokens: below 28 KiB vLLM's worker loads by a kernel, and not by the copy engine."""
NUM_SLOTS = 256
ROUNDS = 7
EXTENT_BYTES = 64 << 20
CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


class Rig:
    """KV caches on the GPU and a region in host memory."""

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        self.layout = build_part_layout([[(layer, page_bytes) for layer in range(NUM_LAYERS)]], blocks_per_chunk=1)
        self.slot_bytes = self.layout.part_bytes
        self.region_bytes = -(-NUM_SLOTS * self.slot_bytes // EXTENT_BYTES) * EXTENT_BYTES
        descriptor = os.memfd_create("kvoffload-gpu")
        os.ftruncate(descriptor, self.region_bytes)
        self.mapping = RegionMapping(descriptor, self.region_bytes, 1)
        os.close(descriptor)
        self.caches = [
            torch.randint(-128, 127, (NUM_BLOCKS, page_bytes), dtype=torch.int8, device="cuda")
            for _ in range(NUM_LAYERS)
        ]
        self.tensors = DeviceTensors(
            np.array([cache.data_ptr() for cache in self.caches], dtype=np.int64),
            np.array([cache.stride(0) for cache in self.caches], dtype=np.int64),
            NUM_BLOCKS,
        )
        self.transfer = DeviceTransfer()
        self.transfer.region_mapped(self.mapping, EXTENT_BYTES)
        self.jobs = 0

    def plan(self, blocks: list[int], slots: list[int], stripe: Stripe = WHOLE) -> CopyPlan:
        return plan_copy(
            layout=self.layout,
            tensors=self.tensors,
            block_ids=np.array(blocks),
            group_sizes=[len(blocks)],
            block_indices=[0],
            slot_offsets=np.array(slots, dtype=np.int64) * self.slot_bytes,
            slot_bytes=self.slot_bytes,
            part_offset=0,
            region_address=self.mapping.address,
            region_bytes=self.region_bytes,
            stripe=stripe,
        )

    def run(self, plan: CopyPlan, *, to_region: bool) -> float:
        """Copy and wait; seconds on the device."""
        self.jobs += 1
        self.transfer.start(self.jobs, plan, to_region=to_region)
        self.transfer.wait({self.jobs})
        ((job_id, seconds),) = self.transfer.finished()
        assert job_id == self.jobs
        return seconds

    def wait_until_registered(self) -> int:
        """Until every extent that a copy has touched is registered, or the device refuses: how many were touched."""
        pinning = self.transfer._pinning
        assert pinning is not None
        wanted, deadline = len(pinning._known), time.monotonic() + 20
        while pinning.num_registered < wanted and not pinning.refused:
            assert time.monotonic() < deadline, f"{pinning.num_registered} of {wanted} extents are registered"
            time.sleep(0.01)
        return wanted

    def close(self) -> None:
        self.transfer.shutdown()
        self.mapping.close()


@check
def stored_and_loaded_bytes_are_equal_striped_over_four_ranks() -> dict[str, Any]:
    rig = Rig()
    blocks, targets, slots = list(range(64)), list(range(256, 320)), list(range(100, 164))
    for rank in range(4):
        rig.run(rig.plan(blocks, slots, Stripe(rank, 4)), to_region=True)
    rig.run(rig.plan(targets, slots), to_region=False)
    torch.cuda.synchronize()
    for cache in rig.caches:
        assert torch.equal(cache[blocks], cache[targets])
        assert not torch.equal(cache[blocks], cache[[block + 1 for block in blocks]])
    registered = rig.transfer.registration_refused or "registered"
    rig.close()
    return {"pages": 64 * NUM_LAYERS, "registration": registered}


@check
def a_store_waits_for_the_compute_stream() -> dict[str, Any]:
    """The block is written by slow work that is still queued when the store is submitted."""
    rig = Rig()
    slow = torch.randn(8192, 8192, device="cuda")
    for round_number in range(20):
        value = round_number + 1
        for _ in range(8):
            slow = slow @ slow / 90.0
        for cache in rig.caches:
            cache[7] = value
        rig.jobs += 1
        rig.transfer.start(rig.jobs, rig.plan([7], [3]), to_region=True)
        rig.transfer.wait({rig.jobs})
        assert rig.transfer.finished()
        region = np.frombuffer(rig.mapping._map, dtype=np.int8, count=rig.slot_bytes, offset=3 * rig.slot_bytes)
        assert (region == value).all(), f"round {round_number}: an older value was stored"
        del region
    rig.close()
    return {"rounds": 20}


@check
def a_load_lands_after_the_zeroing_that_was_queued_before_it() -> dict[str, Any]:
    rig = Rig()
    rig.run(rig.plan([1], [1]), to_region=True)
    expected = [cache[1].clone() for cache in rig.caches]
    slow = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        for _ in range(8):
            slow = slow @ slow / 90.0
        for cache in rig.caches:
            cache[400].zero_()
        rig.run(rig.plan([400], [1]), to_region=False)
        torch.cuda.synchronize()
        assert all(torch.equal(cache[400], wanted) for cache, wanted in zip(rig.caches, expected, strict=True))
    rig.close()
    return {"rounds": 20}


@check
def extents_are_registered_in_the_background_and_given_back() -> dict[str, Any]:
    rig = Rig()
    pinning = rig.transfer._pinning
    assert pinning is not None
    rig.run(rig.plan(list(range(64)), list(range(64))), to_region=True)
    wanted = rig.wait_until_registered()
    registered, refused = pinning.num_registered, pinning.refused
    rig.transfer.extents_revoked([0])
    after = pinning.num_registered
    rig.close()
    assert refused or (registered == wanted and after == registered - 1)
    return {"registered_extents": registered, "refused": refused}


@check
def bandwidth_beside_one_large_pinned_copy() -> dict[str, Any]:
    rig = Rig()
    blocks, slots = list(range(256)), list(range(256))
    store, load = rig.plan(blocks, slots), rig.plan(blocks, slots)
    pageable = store.total_bytes / rig.run(store, to_region=True) / 1e9
    rig.wait_until_registered()
    stored = max(store.total_bytes / rig.run(store, to_region=True) for _ in range(5)) / 1e9
    loaded = max(load.total_bytes / rig.run(load, to_region=False) for _ in range(5)) / 1e9
    host = torch.empty(store.total_bytes, dtype=torch.int8, pin_memory=True)
    device = torch.empty(store.total_bytes, dtype=torch.int8, device="cuda")
    rates = {}
    for name, target, source in (("store", host, device), ("load", device, host)):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        best = 0.0
        for _ in range(5):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best = max(best, store.total_bytes / (begin.elapsed_time(end) * 1e-3) / 1e9)
        rates[name] = best
    registered = rig.transfer._pinning.num_registered if rig.transfer._pinning else 0
    rig.close()
    return {
        "bytes": store.total_bytes,
        "registered_extents": registered,
        "store_first_gb_per_s": pageable,
        "store_gb_per_s": stored,
        "load_gb_per_s": loaded,
        "one_copy_store_gb_per_s": rates["store"],
        "one_copy_load_gb_per_s": rates["load"],
        "device": torch.cuda.get_device_name(),
    }


class Theirs:
    """vLLM's own offload worker over the same KV caches, with host memory as its spec makes it: the shared
    region, which it registers; or pinned tensors where /dev/shm has no room."""

    def __init__(self, rig: Rig) -> None:
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(cache, cache.shape[1]) for cache in rig.caches],
            [[CanonicalKVCacheRef(layer, cache.shape[1]) for layer, cache in enumerate(rig.caches)]],
        )
        self.memory = "its shared region"
        try:
            region = SharedOffloadRegion(
                engine_id=f"kvoffload-gpu-{os.getpid()}-{rig.slot_bytes}",
                num_chunks=NUM_SLOTS,
                rank=0,
                kv_bytes_per_chunk=rig.slot_bytes,
                cpu_page_size=rig.slot_bytes,
                barrier=lambda: None,
            )
        except Exception as error:  # noqa: BLE001 - a container's /dev/shm may be 64 MiB
            region, self.memory = None, f"pinned tensors ({type(error).__name__}: {error})"
        self.worker = CPUOffloadingWorker(caches, 1, NUM_SLOTS, mmap_region=region)
        if region is not None and not region.is_pinned:
            self.memory += ", not registered"
        self.jobs = 0

    def run(self, blocks: list[int], chunks: list[int], *, is_store: bool) -> float:
        """Copy and wait; seconds on the device, as its own statistics have them."""
        self.jobs += 1
        device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        if is_store:
            self.worker.submit_store(self.jobs, device, CPULoadStoreSpec(chunks))
        else:
            self.worker.submit_load(self.jobs, CPULoadStoreSpec(chunks), device)
        self.worker.wait({self.jobs})
        (result,) = self.worker.get_finished()
        assert result.job_id == self.jobs
        return float(result.transfer_time)


def compare_with_vllm(page_bytes: int) -> dict[str, Any]:
    """Seconds on the device of the same copies by both workers, in turns; a rate of ours by the rate of theirs."""
    rig = Rig(page_bytes)
    theirs = Theirs(rig)
    blocks, slots = list(range(NUM_SLOTS)), list(range(NUM_SLOTS))
    plan = rig.plan(blocks, slots)
    rig.run(plan, to_region=True)
    rig.wait_until_registered()
    wanted = [cache[:NUM_SLOTS].clone() for cache in rig.caches]
    figures: dict[str, Any] = {"bytes": plan.total_bytes, "page_bytes": page_bytes, "vllm_memory": theirs.memory}
    for name, is_store in (("store", True), ("load", False)):
        rig.run(plan, to_region=is_store), theirs.run(blocks, slots, is_store=is_store)  # warm both
        seconds = [
            (rig.run(plan, to_region=is_store), theirs.run(blocks, slots, is_store=is_store)) for _ in range(ROUNDS)
        ]
        ours, vllms = (statistics.median(column) for column in zip(*seconds, strict=True))
        figures[f"{name}_gb_per_s"] = plan.total_bytes / ours / 1e9
        figures[f"{name}_vllm_gb_per_s"] = plan.total_bytes / vllms / 1e9
        figures[f"{name}_rate_by_vllms"] = vllms / ours
    torch.cuda.synchronize()
    assert all(torch.equal(cache[:NUM_SLOTS], one) for cache, one in zip(rig.caches, wanted, strict=True))
    pinning = rig.transfer._pinning
    figures["registered_extents"] = pinning.num_registered if pinning is not None else 0
    figures["registration_refused"] = rig.transfer.registration_refused
    theirs.worker.shutdown()
    rig.close()
    return figures


@check
def bandwidth_beside_vllms_own_worker() -> dict[str, Any]:
    return compare_with_vllm(PAGE_BYTES)


@check
def bandwidth_beside_vllms_own_worker_with_small_pages() -> dict[str, Any]:
    return compare_with_vllm(SMALL_PAGE_BYTES)


def main() -> None:
    results = {}
    for name, function in CHECKS.items():
        try:
            results[name] = {"ok": function()}
        except Exception:  # noqa: BLE001 - the test that started this prints it
            results[name] = {"error": traceback.format_exc()}
    print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
