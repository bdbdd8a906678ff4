"""Runs inside vLLM's workers in tests (`worker_extension_cls`): looks at what our worker copies, and makes it fail
on demand.

Every page that is stored is recorded as it was in the KV cache of the rank that wrote it, every page that is loaded
as it is in the KV cache afterwards; the test compares them over all ranks.
"""

import ctypes
import hashlib
from typing import Any


def page_digest(address: int, num_bytes: int) -> str:
    return hashlib.blake2b(ctypes.string_at(address, num_bytes), digest_size=8).hexdigest()


class Probe:
    """Methods of vLLM's Worker, called by `collective_rpc`."""

    def probe_install(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group().connector_worker.worker
        transfer = worker._transfer
        self.kvo_worker = worker
        self.kvo_stored: list[list[Any]] = []
        self.kvo_loaded: list[list[Any]] = []
        self.kvo_fault = ""
        self.kvo_held: list[tuple[int, Any, bool]] = []
        self.kvo_preempted = 0
        start = transfer.start

        def probed(job_id: int, plan: Any, *, to_region: bool) -> None:
            from kvoffload.errors import KVOffloadError

            if self.kvo_fault == "hold":
                self.kvo_held.append((job_id, plan, to_region))
                return
            if self.kvo_fault == "fail" and not to_region:
                raise KVOffloadError("a test makes this load fail")
            start(job_id, plan, to_region=to_region)
            if self.kvo_fault == "zeros" and not to_region:
                for address, num_bytes in zip(plan.device_addresses.tolist(), plan.num_bytes.tolist(), strict=True):
                    ctypes.memset(address, 0, num_bytes)
            base = worker.link.mapping.address
            for device, host, num_bytes in zip(
                plan.device_addresses.tolist(), plan.host_addresses.tolist(), plan.num_bytes.tolist(), strict=True
            ):
                record = [host - base, num_bytes, page_digest(device, num_bytes)]
                (self.kvo_stored if to_region else self.kvo_loaded).append(record)

        wait = transfer.wait

        def release_and_wait(job_ids: set[int]) -> None:
            self.probe_release(job_ids)
            wait(job_ids)

        execute = self.model_runner.execute_model

        def execute_and_count(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
            self.kvo_preempted += len(scheduler_output.preempted_req_ids or ()) if self.kvo_held else 0
            return execute(scheduler_output, *arguments, **options)

        transfer.start = self.kvo_start = probed
        transfer.wait = release_and_wait
        self.model_runner.execute_model = execute_and_count

    def probe_fault(self, fault: str, ranks: list[int] | None = None) -> None:
        """`fail`, `zeros`: of loads. `hold`: copies of both directions stay under way until the fault is another one,
        or vLLM waits for them."""
        self.kvo_fault = fault if ranks is None or self.rank in ranks else ""
        if self.kvo_fault != "hold":
            self.probe_release()

    def probe_release(self, job_ids: set[int] | None = None) -> None:
        """Do the copies that are held, of these jobs or of all."""
        fault, self.kvo_fault = self.kvo_fault, ""
        held, self.kvo_held = self.kvo_held, []
        for job_id, plan, to_region in held:
            if job_ids is None or job_id in job_ids:
                self.kvo_start(job_id, plan, to_region=to_region)
            else:
                self.kvo_held.append((job_id, plan, to_region))
        self.kvo_fault = fault

    def probe_held(self) -> list[int]:
        """How many stores and how many loads are held."""
        stores = sum(to_region for _, _, to_region in self.kvo_held)
        return [stores, len(self.kvo_held) - stores]

    def probe_preempted(self) -> int:
        """How many requests were preempted while copies were held."""
        return self.kvo_preempted

    def probe_take(self) -> dict[str, list[list[Any]]]:
        taken = {"stored": self.kvo_stored, "loaded": self.kvo_loaded}
        self.kvo_stored, self.kvo_loaded = [], []
        return taken

    def probe_update_weights(self, factor: float) -> None:
        """Change the weights in place, as a trainer would; vLLM's engine core sees only the name of this call."""
        import torch

        with torch.no_grad():
            for name, parameter in self.model_runner.model.named_parameters():
                if "o_proj" in name:
                    parameter.mul_(factor)

    def probe_flip_byte(self, offset: int) -> None:
        """Change one byte of the region behind everybody's back; once, whatever the number of ranks."""
        if self.rank != 0:
            return
        address = self.kvo_worker.link.mapping.address + offset
        ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 0xFF, 1)
