"""A scheduler's manager and its ranks' workers in one process, on CPU tensors, for checks without a model.

No pytest here: it runs under the Python of a vLLM environment.
"""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, ScheduleEndContext, make_offload_key

from kvoffload.layout.pages import build_part_layout
from kvoffload.protocol.messages import PROTOCOL_VERSION, Hello
from kvoffload_engine.manager import KVOffloadManager
from kvoffload_engine.transfer.backend import Transfer
from kvoffload_engine.transfer.host import HostTransfer
from kvoffload_engine.transfer.plan import CopyPlan, DeviceTensors
from kvoffload_engine.worker import KVOffloadWorker

NUM_LAYERS, PAGE_BYTES, NUM_BLOCKS = 3, 4096, 64
REQUESTS_PER_STEP = 8
MODEL_SECONDS = 0.005
"""What a step of the model would take, between two steps of the scheduler."""
STUCK_SECONDS = 5.0
"""A step that takes so long waits for something; far above what a shared machine does to it."""
END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def keys_of(*numbers: int) -> list[bytes]:
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in numbers]


def wait_until(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.005)


class HeldTransfer(HostTransfer):
    """Copies stay under way until somebody waits for them, as those of a device can."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[int, CopyPlan, bool]] = []

    def start(self, job_id: int, plan: CopyPlan, *, to_region: bool) -> None:
        self._held.append((job_id, plan, to_region))

    def wait(self, job_ids: set[int]) -> None:
        for job_id, plan, to_region in self._held:
            if job_id in job_ids:
                super().start(job_id, plan, to_region=to_region)
        self._held = [one for one in self._held if one[0] not in job_ids]

    def shutdown(self) -> None:
        self.wait({job_id for job_id, _, _ in self._held})


class ToyEngine:
    """Some ranks and a scheduler in this process, on CPU tensors. `parts` names each rank's part, or `part` all of
    them; `transfers` are the ranks' own, where a check gives them."""

    def __init__(
        self,
        socket_path: str,
        *,
        ranks: int = 2,
        part: str = "all",
        parts: Sequence[str] = (),
        identity: bytes = b"i" * 32,
        none_hash: bytes = b"none",
        step_seconds: float = 0.5,
        transfers: Sequence[Transfer] = (),
        engine_id: str = "",
    ) -> None:
        self.engine_id = engine_id or f"toy-{time.monotonic_ns()}"
        parts = parts or [part if part == "all" else f"{part}-{rank}" for rank in range(ranks)]
        ranks = len(parts)
        self.caches = [
            [torch.zeros((NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8) for _ in range(NUM_LAYERS)] for _ in range(ranks)
        ]
        layout = build_part_layout([[(layer, PAGE_BYTES) for layer in range(NUM_LAYERS)]], blocks_per_chunk=1)
        common = {
            "protocol_min": PROTOCOL_VERSION,
            "protocol_max": PROTOCOL_VERSION,
            "engine_id": self.engine_id,
            "world_size": ranks,
            "identity": identity,
        }
        self.workers = []
        for rank, cache in enumerate(self.caches):
            hello = Hello(
                role="worker",
                rank=rank,
                part=parts[rank],
                part_bytes=layout.part_bytes,
                process=os.urandom(16),
                **common,
            )
            worker = KVOffloadWorker(
                rank=rank,
                socket_path=socket_path,
                make_hello=lambda hello=hello: hello,
                layout=layout,
                tensors=DeviceTensors(
                    np.array([tensor.data_ptr() for tensor in cache], dtype=np.int64),
                    np.array([tensor.stride(0) for tensor in cache], dtype=np.int64),
                    NUM_BLOCKS,
                ),
                transfer=transfers[rank] if transfers else HostTransfer(),
            )
            worker.start()
            self.workers.append(worker)
        self.manager = KVOffloadManager(step_seconds=step_seconds)
        self.record_waits(step_seconds)
        hello = Hello(role="scheduler", rank=-1, process=os.urandom(16), **common)
        self.manager.connect(socket_path, make_hello=lambda: hello, none_hash=lambda: none_hash, chunks_per_step=32)
        self.wait_until_ready()

    def record_waits(self, step_seconds: float) -> None:
        """From now on, for `assert_one_deadline_a_step`."""
        self.step_seconds = step_seconds
        self.waits: list[list[float]] = [[]]
        """How long the scheduler was ready to wait for the daemon each time it waited, seconds, for each step."""
        self._poll = self.manager.link.poll
        self.manager.link.poll = self._recorded_poll

    def wait_until_ready(self) -> None:
        """Until the daemon has told the row of all ranks."""
        self.jobs = self.requests = 0
        wait_until(lambda: self.manager.link.poll() is not None and self.manager.link.row is not None)

    def __enter__(self) -> "ToyEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def step(self) -> None:
        self.manager.on_schedule_end(END)
        self.manager.end_step()
        self.waits.append([])

    def _recorded_poll(self, timeout_seconds: float = 0.0) -> Any:
        if timeout_seconds > 0:
            self.waits[-1].append(timeout_seconds)
        return self._poll(timeout_seconds)

    def assert_one_deadline_a_step(self) -> None:
        """No step was ready to wait for longer than its one deadline, however many requests and keys it had: what is
        asked for is the deadline first and then only what is left of it."""
        assert any(self.waits), "no step waited at all"
        for waits in self.waits:
            assert waits[:1] in ([], [self.step_seconds]), waits
            assert all(later < earlier for earlier, later in itertools.pairwise(waits)), waits

    def look_up(self, name: str, keys: list[bytes], *, is_private: bool = False) -> list[LookupResult]:
        """As vLLM does for a request, in one step; the caller ends the step."""
        context = ReqContext(req_id=name)
        if name not in self.manager._requests:
            self.manager.begin_request(name, is_private=is_private)
            self.manager.on_new_request(context)
        self.manager.begin_lookup(name, keys)
        return [self.manager.lookup(key, context) for key in keys]

    def store(self, name: str, keys: list[bytes], blocks: list[int], ranks: list[int] | None = None) -> list[bytes]:
        """Store these blocks under these keys; returns the keys that were taken."""
        context = ReqContext(req_id=name)
        self.look_up(name, keys)
        while (output := self.manager.prepare_store(keys, context)) is None:
            self.step()  # its slots are late: vLLM asks again in the next step
        self.submit_store(name, output, [blocks[keys.index(key)] for key in output.keys_to_store], ranks)
        self.step()
        self.manager.on_request_finished(context)
        return output.keys_to_store

    def ensure_stored(self, keys: list[bytes]) -> list[bytes]:
        """Store them in the first blocks until the daemon has published them; returns them."""

        def is_there() -> bool:
            if not self.is_hit(keys):
                self.store(f"ensured-{time.monotonic_ns()}", keys, list(range(len(keys))))
                return False
            return True

        wait_until(is_there)
        return keys

    def submit_store(self, name: str, output: Any, blocks: list[int], ranks: list[int] | None = None) -> None:
        """The second half of a store: copies in all ranks, or in these."""
        if not blocks:
            return
        spec = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        self.jobs += 1
        for rank in range(len(self.workers)) if ranks is None else ranks:
            self.workers[rank].submit_store(self.jobs, spec, output.store_spec)
            assert [one.job_id for one in self.workers[rank].get_finished()] == [self.jobs]
        self.manager.complete_store(set(output.keys_to_store), ReqContext(req_id=name))

    def busy_steps(self, count: int, known: list[bytes]) -> None:
        """So many steps of a busy scheduler. Every step brings `REQUESTS_PER_STEP` requests that ask for `known` and
        for a chunk of their own, load the former and store the latter; where the answer is late they come again in the
        next step. None of them is held up by a call that waits for the daemon without asking for how long."""
        waiting: list[int] = []
        for _ in range(count):
            waiting += range(self.requests, self.requests + REQUESTS_PER_STEP)
            self.requests += REQUESTS_PER_STEP
            late, jobs = [], []
            begin = time.monotonic()
            for number in waiting:
                context, own = ReqContext(req_id=f"busy-{number}"), keys_of((1 << 64) + number)
                results = self.look_up(context.req_id, [*known, *own])
                if LookupResult.RETRY in results:
                    late.append(number)
                    continue
                is_hit = results[: len(known)] == [LookupResult.HIT] * len(known)
                slots = self.manager.prepare_load(known, context) if is_hit else None
                jobs.append((context, slots, self.manager.prepare_store(own, context)))
            self.step()
            assert time.monotonic() - begin < STUCK_SECONDS
            waiting = late
            for context, slots, output in jobs:
                if output is not None:
                    self.submit_store(context.req_id, output, [0] * len(output.keys_to_store))
                if slots is not None:
                    self.submit_load(context.req_id, slots, list(range(1, 1 + len(known))))
                self.manager.on_request_finished(context)
            time.sleep(MODEL_SECONDS)
        for number in waiting:
            self.manager.on_request_finished(ReqContext(req_id=f"busy-{number}"))

    def prepare_load(self, name: str, keys: list[bytes]) -> Any:
        results = self.look_up(name, keys)
        assert results == [LookupResult.HIT] * len(keys), results
        return self.manager.prepare_load(keys, ReqContext(req_id=name))

    def load(self, name: str, keys: list[bytes], blocks: list[int]) -> dict[int, bool]:
        """Load these keys into these blocks in all ranks; returns the failed loads of all."""
        slots = self.prepare_load(name, keys)
        self.step()
        return self.submit_load(name, slots, blocks)

    def submit_load(self, name: str, slots: Any, blocks: list[int]) -> dict[int, bool]:
        """The second half of a load: copies in all ranks, and the end of its request."""
        spec = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        self.jobs += 1
        failed: dict[int, bool] = {}
        for worker in self.workers:
            worker.submit_load(self.jobs, slots, spec)
            assert [one.job_id for one in worker.get_finished()] == [self.jobs]
            failed.update(worker.take_failed_loads())
        for wrong in failed.values():
            self.manager.load_failed(name, bytes_are_wrong=wrong)
        self.manager.receives_finished([name])
        self.manager.on_request_finished(ReqContext(req_id=name))
        return failed

    def fill(self, block: int, value: int) -> None:
        for cache in self.caches:
            for layer, tensor in enumerate(cache):
                tensor[block] = value + layer

    def holds(self, block: int, value: int) -> bool:
        return all(
            bool((tensor[block] == value + layer).all()) for cache in self.caches for layer, tensor in enumerate(cache)
        )

    def is_hit(self, keys: list[bytes]) -> bool:
        name = f"probe-{time.monotonic_ns()}"
        results = self.look_up(name, keys)
        self.step()
        self.manager.on_request_finished(ReqContext(req_id=name))
        return results == [LookupResult.HIT] * len(keys)
