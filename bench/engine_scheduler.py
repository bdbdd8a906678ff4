"""Scheduler time of one request with 1,000 keys, ours and vLLM's own manager, as JSON: run by vLLM's Python.

`python engine_scheduler.py SOCKET`: a daemon listens there. The same calls on both, in the order of vLLM's scheduler:
the look-ups of a request that is all hits, its prepared load and its completion; and a store of as many new keys. A
request comes when the daemon has done with the one before, as in an engine, whose steps take longer than that.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.protocol.client import Session
from kvoffload.protocol.messages import Hello, Mapped, Seal
from kvoffload_engine.manager import KVOffloadManager

KEYS = 1000
ROUNDS = 60
PART_BYTES = 4096
STEP_SECONDS = 0.01
"""Between two requests."""
END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def new_keys(first: int) -> list[Any]:
    return [make_offload_key(number.to_bytes(32, "little"), 0) for number in range(first, first + KEYS)]


class Ours:
    """Our manager with a daemon, and a worker that only seals."""

    def __init__(self, socket_path: str) -> None:
        common: dict[str, Any] = {"protocol_min": 1, "protocol_max": 1, "engine_id": "bench", "world_size": 1}
        common["identity"] = b"b" * 32
        worker = Hello(role="worker", rank=0, part="all", part_bytes=PART_BYTES, **common)
        self.worker = Session.connect(socket_path, worker)
        self.worker.send(Mapped())
        self.manager = KVOffloadManager(step_seconds=1.0)
        scheduler = Hello(role="scheduler", rank=-1, **common)
        self.manager.connect(socket_path, make_hello=lambda: scheduler, none_hash=lambda: b"none", chunks_per_step=KEYS)

    def begin(self, request: str, keys: list[Any]) -> None:
        self.manager.begin_request(request, is_private=False)
        self.manager.begin_lookup(request, keys)

    def end_step(self) -> None:
        self.manager.on_schedule_end(END)
        self.manager.end_step()

    def loaded(self, context: ReqContext, keys: list[Any]) -> None:  # noqa: ARG002
        self.manager.receives_finished([context.req_id])

    def stored(self, output: Any) -> None:
        """What the worker does, in its own process: not part of the scheduler's time."""
        if output is not None and output.keys_to_store:
            self.worker.send(Seal(output.store_spec.epoch, output.store_spec.offsets))


class Theirs:
    """vLLM's manager: a dictionary in the process."""

    def __init__(self) -> None:
        self.manager = CPUOffloadingManager(num_chunks=8192)

    def begin(self, request: str, keys: list[Any]) -> None:
        """Nothing to ask ahead."""

    def end_step(self) -> None:
        self.manager.on_schedule_end(END)

    def loaded(self, context: ReqContext, keys: list[Any]) -> None:
        self.manager.complete_load(keys, context)

    def stored(self, output: Any) -> None:
        """Nobody to tell."""


def timed(times: list[float], function: Callable[[], Any]) -> Any:
    begun = time.perf_counter()
    result = function()
    times.append((time.perf_counter() - begun) * 1e3)
    return result


def measure(side: Any) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"lookup": [], "load": [], "store": []}
    resident = new_keys(0)
    fill(side, resident)
    for number in range(1, ROUNDS + 1):
        measure_load(side, f"load-{number}", resident, figures)
    for number in range(1, ROUNDS + 1):
        measure_store(side, f"store-{number}", new_keys(number * KEYS), figures)
    return figures


def fill(side: Any, keys: list[Any]) -> None:
    """Store all of these keys, in as many steps as it takes until there are slots for them."""
    manager, context = side.manager, ReqContext(req_id="fill")
    manager.on_new_request(context)
    deadline = time.monotonic() + 20
    missing = dict.fromkeys(keys)
    while missing:
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(missing)} of {KEYS} keys were not stored in 20 s")
        side.begin("fill", list(missing))
        output = manager.prepare_store(list(missing), context)
        side.end_step()
        side.stored(output)
        stored = output.keys_to_store if output is not None else []
        manager.complete_store(stored, context)
        for key in stored:
            del missing[key]
        time.sleep(STEP_SECONDS)
    manager.on_request_finished(context)


def measure_store(side: Any, request: str, keys: list[Any], figures: dict[str, list[float]]) -> None:
    manager, context = side.manager, ReqContext(req_id=request)
    manager.on_new_request(context)

    def store() -> Any:
        side.begin(request, keys)
        for key in keys:
            if manager.lookup(key, context) is LookupResult.MISS:
                break
        output = manager.prepare_store(keys, context)
        side.end_step()
        return output

    output = timed(figures["store"], store)
    side.stored(output)
    stored = output.keys_to_store if output is not None else []
    timed(figures["store"], partial(manager.complete_store, stored, context))
    figures["store"][-2:] = [sum(figures["store"][-2:])]
    manager.on_request_finished(context)
    time.sleep(STEP_SECONDS)


def measure_load(side: Any, request: str, keys: list[Any], figures: dict[str, list[float]]) -> None:
    manager, context = side.manager, ReqContext(req_id=request)
    manager.on_new_request(context)

    def look_up() -> bool:
        side.begin(request, keys)
        return all(manager.lookup(key, context) is LookupResult.HIT for key in keys)

    while not timed(figures["lookup"], look_up):
        figures["lookup"].pop()
        side.end_step()
        manager.on_request_finished(context)
        manager.on_new_request(context)

    def load() -> None:
        manager.prepare_load(keys, context)
        side.end_step()
        side.loaded(context, keys)
        manager.on_request_finished(context)

    timed(figures["load"], load)
    time.sleep(STEP_SECONDS)


def main() -> None:
    os.sched_setaffinity(0, {0})
    ours = Ours(sys.argv[1])
    print(json.dumps({"ours": measure(ours), "theirs": measure(Theirs())}))


main()
