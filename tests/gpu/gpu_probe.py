"""Runs inside vLLM's workers in the GPU's tests (`worker_extension_cls`): what was stored and what was loaded, page by
page.

Copies stay asynchronous: a page is looked at when its job is found to be done, and before vLLM hears of it. Until then
vLLM keeps the blocks of a store from being written again, and runs no model on those of a load.
"""

import ctypes
import hashlib
from typing import Any


def digest(page: bytes) -> str:
    return hashlib.blake2b(page, digest_size=8).hexdigest()


class DeviceMemory:
    """Bytes at an address of the KV cache, by vLLM's own handle of the CUDA runtime; of this process's memory where
    there is no device."""

    def __init__(self) -> None:
        import torch

        self._runtime: Any = None
        if torch.cuda.is_available():
            from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

            self._runtime = CudaRTLibrary()

    def read(self, address: int, num_bytes: int) -> bytes:
        if self._runtime is None:
            return ctypes.string_at(address, num_bytes)
        page = ctypes.create_string_buffer(num_bytes)
        self._runtime.cudaMemcpy(ctypes.c_void_p(ctypes.addressof(page)), ctypes.c_void_p(address), num_bytes)
        return page.raw


class GpuProbe:
    """Methods of vLLM's Worker, called by `collective_rpc`."""

    def probe_install(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.kvo_worker = worker = get_kv_transfer_group().connector_worker.worker
        transfer, memory = worker._transfer, DeviceMemory()
        self.kvo_pages: list[list[Any]] = []
        self.kvo_zeros = False
        plans: dict[int, tuple[Any, bool]] = {}
        start, finished = transfer.start, transfer.finished

        def probed_start(job_id: int, plan: Any, *, to_region: bool) -> None:
            plans[job_id] = (plan, to_region)
            if self.kvo_zeros and not to_region:
                for host, num_bytes in zip(plan.host_addresses.tolist(), plan.num_bytes.tolist(), strict=True):
                    ctypes.memset(host, 0, num_bytes)
            start(job_id, plan, to_region=to_region)

        def probed_finished() -> list[tuple[int, float]]:
            done = finished()
            for job_id, _ in done:
                plan, to_region = plans.pop(job_id)
                columns = (plan.device_addresses.tolist(), plan.host_addresses.tolist(), plan.num_bytes.tolist())
                for device, host, num_bytes in zip(*columns, strict=True):
                    page = digest(memory.read(device, num_bytes))
                    in_region = digest(ctypes.string_at(host, num_bytes))
                    self.kvo_pages.append([to_region, host - worker.link.mapping.address, page, in_region])
            return list(done)

        transfer.start, transfer.finished = probed_start, probed_finished

    def probe_zeros(self) -> None:
        """From now on a load finds zeros in the region."""
        self.kvo_zeros = True

    def probe_take(self) -> dict[str, Any]:
        """Pages since the last call, in the order in which their jobs ended: [is a store, offset, digest in the KV
        cache, digest in the region]; how many extents are registered with the device, and why not."""
        pages, self.kvo_pages = self.kvo_pages, []
        pinning = getattr(self.kvo_worker._transfer, "_pinning", None)
        return {
            "pages": pages,
            "registered": pinning.num_registered if pinning is not None else 0,
            "refused": self.kvo_worker.registration_refused,
        }
