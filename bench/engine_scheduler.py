"""Scheduler time of one request with 1,000 keys, and of one step at saturation, ours and vLLM's own manager, as JSON:
run by vLLM's Python.

`python engine_scheduler.py SOCKET`: a daemon listens there. The same calls on both, in the order of vLLM's scheduler:
the look-ups of a request that is all hits, its prepared load and its completion; and a store of as many new keys. A
request comes when the daemon has done with the one before, as in an engine, whose steps take longer than that. At
saturation each step has several of them.

Ours has the deadline of an engine. What misses it costs no more than the deadline and finds nothing, so it is not
measured but counted: `dropped`.
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
from kvoffload.protocol.messages import PROTOCOL_VERSION, Hello, Mapped, Seal
from kvoffload_engine.manager import KVOffloadManager

KEYS = 1000
ROUNDS = 60
PART_BYTES = 4096
STEP_SECONDS = 0.01
"""Between two stores, two steps at saturation, and two loads whose look-ups are `rested`: the core, which both sides
share, has slept."""
SETTLE_SECONDS = 0.001
"""Between two other loads: the daemon has released the last one by then, and the core is awake."""
SATURATED_STEPS = 300
LOADS_IN_STEP, KEYS_OF_LOAD = 4, 250
STORES_IN_STEP, KEYS_OF_STORE = 8, 8
"""A saturated step: requests that arrive with a prefix to load, and running ones that each fill some blocks."""
END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def new_keys(first: int, count: int = KEYS) -> list[Any]:
    return [make_offload_key(number.to_bytes(32, "little"), 0) for number in range(first, first + count)]


class Ours:
    """Our manager with a daemon, and a worker that only seals."""

    def __init__(self, socket_path: str) -> None:
        common: dict[str, Any] = {
            "protocol_min": PROTOCOL_VERSION,
            "protocol_max": PROTOCOL_VERSION,
            "engine_id": "bench",
            "world_size": 1,
        }
        common["identity"] = b"b" * 32
        worker = Hello(role="worker", rank=0, part="all", part_bytes=PART_BYTES, **common)
        self.worker = Session.connect(socket_path, worker)
        self.worker.send(Mapped())
        self.manager = KVOffloadManager()
        self.waits = 0
        """Times that the scheduler had to wait for a message of the daemon's."""
        wait_until = self.manager.link._wait_until

        def counted(is_done: Callable[[], bool]) -> None:
            self.waits += not is_done()
            wait_until(is_done)

        self.manager.link._wait_until = counted  # type: ignore[method-assign]
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
        self.waits = 0

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


class Figures:
    """Milliseconds of what was done as asked, waits of each request, and how often the deadline came first."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {"lookup": [], "load": [], "store": [], "step": []}
        self.waits: list[int] = []
        self.dropped = dict.fromkeys(self.times, 0)


def measure(side: Any) -> dict[str, Any]:
    figures = Figures()
    resident = new_keys(0)
    fill(side, resident)
    for number in range(1, ROUNDS + 1):
        measure_load(side, f"load-{number}", resident, figures, SETTLE_SECONDS)
    rested = Figures()
    for number in range(1, ROUNDS + 1):
        measure_load(side, f"rested-{number}", resident, rested, STEP_SECONDS)
    measure_steps(side, resident, figures)  # before the stores: vLLM's manager holds too few chunks for both
    for number in range(1, ROUNDS + 1):
        measure_store(side, f"store-{number}", new_keys(number * KEYS), figures)
    figures.times["rested"], figures.dropped["rested"] = rested.times["lookup"], rested.dropped["lookup"]
    return {**figures.times, "waits": figures.waits + rested.waits, "dropped": figures.dropped}


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


def measure_store(side: Any, request: str, keys: list[Any], figures: Figures) -> None:
    manager, context, waits = side.manager, ReqContext(req_id=request), side.waits
    manager.on_new_request(context)
    times: list[float] = []

    def store() -> Any:
        side.begin(request, keys)
        results = [manager.lookup(key, context) for key in keys[:1]]
        output = manager.prepare_store(keys, context) if results == [LookupResult.MISS] else None
        side.end_step()
        return output

    output = timed(times, store)
    side.stored(output)
    stored = output.keys_to_store if output is not None else []
    timed(times, partial(manager.complete_store, stored, context))
    if len(stored) == len(keys):
        figures.times["store"].append(sum(times))
        figures.waits.append(side.waits - waits)
    else:
        figures.dropped["store"] += 1
    manager.on_request_finished(context)
    time.sleep(STEP_SECONDS)


def measure_load(side: Any, request: str, keys: list[Any], figures: Figures, pause_seconds: float) -> None:
    manager, context = side.manager, ReqContext(req_id=request)
    manager.on_new_request(context)

    def look_up() -> bool:
        side.begin(request, keys)
        return all(manager.lookup(key, context) is LookupResult.HIT for key in keys)

    waits = side.waits
    while not timed(figures.times["lookup"], look_up):
        figures.times["lookup"].pop()
        figures.dropped["lookup"] += 1
        side.end_step()
        manager.on_request_finished(context)
        time.sleep(pause_seconds)
        manager.on_new_request(context)
        waits = side.waits

    def load() -> None:
        manager.prepare_load(keys, context)
        side.end_step()
        side.loaded(context, keys)
        manager.on_request_finished(context)

    timed(figures.times["load"], load)
    figures.waits.append(side.waits - waits)
    time.sleep(pause_seconds)


def measure_steps(side: Any, resident: list[Any], figures: Figures) -> None:
    """Each step loads several prefixes, stores for several running requests, and ends what the one before it began."""
    manager = side.manager
    running = [ReqContext(req_id=f"running-{number}") for number in range(STORES_IN_STEP)]
    prefixes = [resident[at : at + KEYS_OF_LOAD] for at in range(0, LOADS_IN_STEP * KEYS_OF_LOAD, KEYS_OF_LOAD)]
    for context in running:
        manager.on_new_request(context)
    loading: list[tuple[ReqContext, list[Any]]] = []
    storing: list[tuple[ReqContext, Any]] = []

    def step(number: int, chunks: list[list[Any]]) -> bool:
        ended, written = list(loading), list(storing)
        loading.clear()
        storing.clear()
        is_whole = True
        for index, keys in enumerate(prefixes):
            context = ReqContext(req_id=f"arrived-{number}-{index}")
            manager.on_new_request(context)
            side.begin(context.req_id, keys)
            if all(manager.lookup(key, context) is LookupResult.HIT for key in keys):
                manager.prepare_load(keys, context)
                loading.append((context, keys))
            else:
                manager.on_request_finished(context)
                is_whole = False
        for context, keys in zip(running, chunks, strict=True):
            output = manager.prepare_store(keys, context)
            storing.append((context, output))
            is_whole = is_whole and output is not None and len(output.keys_to_store) == len(keys)
        side.end_step()
        for context, keys in ended:
            side.loaded(context, keys)
            manager.on_request_finished(context)
        for context, output in written:
            manager.complete_store(output.keys_to_store if output is not None else [], context)
        return is_whole

    for number in range(SATURATED_STEPS):
        first = (ROUNDS + 1) * KEYS + number * STORES_IN_STEP * KEYS_OF_STORE
        chunks = [new_keys(first + index * KEYS_OF_STORE, KEYS_OF_STORE) for index in range(STORES_IN_STEP)]
        if not timed(figures.times["step"], partial(step, number, chunks)):
            figures.times["step"].pop()
            figures.dropped["step"] += 1
        for _, output in storing:
            side.stored(output)
        time.sleep(STEP_SECONDS)


def main() -> None:
    os.sched_setaffinity(0, {0})
    ours = Ours(sys.argv[1])
    print(json.dumps({"ours": measure(ours), "theirs": measure(Theirs())}))


main()
