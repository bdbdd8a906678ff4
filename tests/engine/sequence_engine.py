"""A toy engine that knows what every block must hold: jobs that are prepared, submitted rank by rank and ended in any
order, and the bytes of each load checked against what its keys stand for. Used by `sequence_checks.py`.

No pytest here: it runs under the Python of a vLLM environment.

    prepare ──> submitted to each rank ──> held, or done at once ──> every rank has reported ──> bytes checked
       └──> the request may end at any of these points
"""

import hashlib
import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from toy_engine import NUM_BLOCKS, PAGE_BYTES, HeldTransfer, ToyEngine, keys_of
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext

JUNK = 0x55
"""In blocks that a load is about to fill."""
STORED: dict[tuple[object, ...], dict[int, set[object]]] = {}
"""Keys that some engine has begun to store, by what they mean, and who has: an engine's life and its resets."""
_names = itertools.count()


class SometimesHeld(HeldTransfer):
    """Copies are done at once, or stay under way until somebody waits for them."""

    is_holding = False

    def start(self, job_id: int, plan: Any, *, to_region: bool) -> None:
        super().start(job_id, plan, to_region=to_region)
        if not self.is_holding:
            self.wait({job_id})

    def forget(self) -> None:
        """The process is dead: nothing of it is copied any more."""
        self._held = []


@dataclass(eq=False)
class Job:
    """A store or a load, from its preparation until every rank has reported it."""

    number: int
    name: str
    is_store: bool
    numbers: list[int]
    blocks: list[int]
    world: tuple[object, ...]
    slots: Any
    submitted: set[int] = field(default_factory=set)
    reported: set[int] = field(default_factory=set)
    is_forgotten: bool = False
    """The cache was reset since: vLLM does not tell the manager of its end."""
    failed: dict[int, bool] = field(default_factory=dict)
    """Ranks whose load failed, and whether the bytes were wrong."""


class SequenceEngine(ToyEngine):
    """See the module's docstring. `kind`: the meaning of its keys, shared by all engines of that kind."""

    def __init__(self, socket_path: str, *, kind: str, tenant: str, parts: Sequence[str], engine_id: str) -> None:
        self.kind, self.tenant = kind, tenant
        self.life = next(_names)
        self.num_resets = self.num_weights = 0
        self.is_forgiven = False
        """There was another daemon: which of the shared keys the engine stored itself in its time, nobody knows."""
        self.num_checked = 0
        """Blocks that were loaded and had the right bytes."""
        self.jobs_under_way: list[Job] = []
        self.waiting: list[str] = []
        """Requests that have asked and not been ended."""
        self.free_blocks = list(range(NUM_BLOCKS))
        self.parts = list(parts)
        self.transfers = [SometimesHeld() for _ in parts]
        super().__init__(
            socket_path,
            parts=parts,
            identity=hashlib.sha256(kind.encode()).digest(),
            step_seconds=0.02,
            transfers=self.transfers,
            engine_id=engine_id,
        )

    def wait_until_ready(self) -> None:
        """Not at all: the pool may be paused."""
        self.jobs = self.requests = 0

    # --- what keys mean -----------------------------------------------------------------------------------------------

    def world(self, *, is_private: bool) -> tuple[object, ...]:
        """All that the bytes of a key follow from, beside the key."""
        if is_private:
            return (self.life, "private", self.num_resets)
        return (self.life, self.num_weights) if self.num_weights else (self.tenant, self.kind)

    @property
    def _storer(self) -> tuple[int, int]:
        return self.life, self.num_resets

    def write(self, block: int, world: tuple[object, ...], number: int) -> None:
        for rank, cache in enumerate(self.caches):
            for layer, tensor in enumerate(cache):
                tensor[block] = _bytes_of(world, number, layer, self.parts[rank])

    def assert_holds(self, block: int, world: tuple[object, ...], number: int) -> None:
        for rank, cache in enumerate(self.caches):
            for layer, tensor in enumerate(cache):
                if not torch.equal(tensor[block], _bytes_of(world, number, layer, self.parts[rank])):
                    raise AssertionError(f"wrong bytes: {self} rank {rank} layer {layer} of key {number} in {world}")

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def begin_store(self, numbers: list[int], *, is_private: bool = False) -> Job | None:
        """Prepare it; None where nothing was taken."""
        name, world = self.new_name("s"), self.world(is_private=is_private)
        context, keys = ReqContext(req_id=name), keys_of(*numbers)
        self.waiting.append(name)
        blocks = [self.free_blocks.pop() for _ in numbers[: len(self.free_blocks)]]
        keys, numbers = keys[: len(blocks)], numbers[: len(blocks)]
        self.look_up(name, keys, is_private=is_private)
        while (output := self.manager.prepare_store(keys, context)) is None:
            self.step()
        taken = [keys.index(key) for key in output.keys_to_store]
        kept = [blocks[index] for index in taken]
        self.free_blocks += [block for block in blocks if block not in kept]
        if not taken:
            return None
        of_world = STORED.setdefault(world, {})
        for index in taken:
            of_world.setdefault(numbers[index], set()).add(self._storer)
        job = self._job(name, [numbers[index] for index in taken], kept, world, output.store_spec, is_store=True)
        for block, number in zip(kept, job.numbers, strict=True):
            self.write(block, world, number)
        return job

    def begin_load(self, numbers: list[int], *, is_private: bool = False) -> Job | None:
        """Look the keys up and prepare a load of those that are hit; None where none is."""
        name, world = self.new_name("l"), self.world(is_private=is_private)
        self.waiting.append(name)
        numbers = numbers[: len(self.free_blocks)]
        keys = keys_of(*numbers)
        if not keys:
            return None
        while LookupResult.RETRY in (results := self.look_up(name, keys, is_private=is_private)):
            self.step()
        hits = [number for number, result in zip(numbers, results, strict=True) if result is LookupResult.HIT]
        of_world = STORED.get(world, {})
        for number in hits:
            storers = of_world.get(number, set())
            assert storers, f"{self} hits key {number} of {world}, which nobody has stored"
            is_own = all(life == self.life and resets < self.num_resets for life, resets in storers)
            assert not is_own or self.is_forgiven, f"{self} hits key {number}, which it alone stored before a reset"
        if not hits:
            return None
        slots = self.manager.prepare_load(keys_of(*hits), ReqContext(req_id=name))
        blocks = [self.free_blocks.pop() for _ in hits]
        for cache in self.caches:
            for tensor in cache:
                tensor[blocks] = JUNK
        return self._job(name, hits, blocks, world, slots, is_store=False)

    def submit(self, job: Job, rank: int, *, is_held: bool = False) -> None:
        """vLLM tells the rank in a step after the one that prepared it."""
        spec = GPULoadStoreSpec(job.blocks, group_sizes=[len(job.blocks)], block_indices=[0])
        job.submitted.add(rank)
        self.transfers[rank].is_holding = is_held
        if job.is_store:
            self.workers[rank].submit_store(job.number, spec, job.slots)
        else:
            self.workers[rank].submit_load(job.number, job.slots, spec)

    def collect(self) -> None:
        """Take what the ranks report; a job that all have reported is over."""
        jobs = {job.number: job for job in self.jobs_under_way}
        for rank, worker in enumerate(self.workers):
            for result in worker.get_finished():
                assert result.success
                assert result.job_id in jobs, f"{self} rank {rank} reports job {result.job_id}, which is over"
                job = jobs[result.job_id]
                assert rank in job.submitted - job.reported, f"{self} rank {rank} reports {job} again"
                job.reported.add(rank)
            for number, wrong in worker.take_failed_loads().items():
                jobs[number].failed[rank] = wrong
        for job in list(self.jobs_under_way):
            if len(job.reported) == len(self.workers):
                self._end(job)

    def complete(self, job: Job) -> None:
        """Whatever is left to do of it."""
        for rank, worker in enumerate(self.workers):
            if rank not in job.submitted:
                self.submit(job, rank)
            worker.wait({job.number})
        self.collect()
        assert job not in self.jobs_under_way, f"{self}: {job} is not reported"

    def _job(self, name: str, numbers: list[int], blocks: list[int], world: Any, slots: Any, *, is_store: bool) -> Job:
        self.jobs += 1
        job = Job(self.jobs, name, is_store, numbers, blocks, world, slots)
        self.jobs_under_way.append(job)
        return job

    def _end(self, job: Job) -> None:
        self.jobs_under_way.remove(job)
        self.free_blocks += job.blocks
        if job.is_store and not job.is_forgotten:
            self.manager.complete_store(set(keys_of(*job.numbers)), ReqContext(req_id=job.name))
        elif not job.is_store:
            for wrong in job.failed.values():
                self.manager.load_failed(job.name, bytes_are_wrong=wrong)
            self.manager.receives_finished([job.name])
            if not job.failed:
                for block, number in zip(job.blocks, job.numbers, strict=True):
                    self.assert_holds(block, job.world, number)
                    self.num_checked += 1
        if job.name in self.waiting:
            self.end_request(job.name)

    # --- requests and ends --------------------------------------------------------------------------------------------

    def end_request(self, name: str) -> None:
        self.waiting.remove(name)
        self.manager.on_request_finished(ReqContext(req_id=name))

    def new_name(self, what: str) -> str:
        return f"{what}{next(_names)}"

    def reset(self) -> None:
        self.num_resets += 1
        for job in self.jobs_under_way:
            job.is_forgotten = True
        self.manager.reset_cache()

    def update_weights(self) -> None:
        self.num_resets += 1
        self.num_weights += 1
        self.manager.weights_changed()

    def settle(self) -> None:
        """End all that is under way, and every request."""
        for job in list(self.jobs_under_way):
            self.complete(job)
        for name in list(self.waiting):
            self.end_request(name)
        self.step()

    def die(self) -> None:
        """As by SIGKILL: nothing is said and no copy goes on; sockets and locks go with the processes."""
        for transfer in self.transfers:
            transfer.forget()
        links = [self.manager.link, *(worker.link for worker in self.workers)]
        for link in links:
            link._connector.close()
        for link in links:
            link._connector._thread.join(10)
        self.manager.link._reassertion.close()
        for worker in self.workers:
            worker.link._lock.close()

    def describe(self) -> str:
        """Where it stands with the daemon."""
        link = self.manager.link
        sessions = [one._connector.current() is not None for one in (link, *(worker.link for worker in self.workers))]
        refused = [str(one._connector.refused) for one in (link, *(worker.link for worker in self.workers))]
        return (
            f"{self}: sessions {sessions}, refused {refused}, row {link.row}, drains {link.is_draining}, "
            f"{len(link._credits)} unused slots"
        )

    def __repr__(self) -> str:
        return f"engine {self.engine_id} (life {self.life}, {self.kind})"


def draw(rng: random.Random, of: int, count: int, known: Collection[int] = ()) -> list[int]:
    """A run of keys, as a prompt's chunks are; often one of which the first is known."""
    begin = rng.choice(list(known)) if known and rng.random() < 0.7 else rng.randrange(of)
    return list(range(begin, begin + count))


def _bytes_of(world: tuple[object, ...], number: int, layer: int, part: str) -> torch.Tensor:
    digest = hashlib.sha256(repr((world, number, layer, part)).encode()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.int8).repeat(PAGE_BYTES // len(digest))
