"""vLLM's own manager, in process: run by vLLM's Python, prints microseconds a key as JSON. No module of ours."""

import json
import os
import sys
import time
from typing import Any

BATCH = 256
NUM_CHUNKS = 8192
SECONDS = 2.0


def main() -> None:
    os.sched_setaffinity(0, {0})
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager = CPUOffloadingManager(num_chunks=NUM_CHUNKS)
    made = 0

    def new_keys() -> list[Any]:
        nonlocal made
        made += BATCH
        return [make_offload_key(number.to_bytes(32, "little"), 0) for number in range(made - BATCH, made)]

    def context() -> ReqContext:
        request = ReqContext(req_id=str(made))
        manager.on_new_request(request)
        return request

    def store(keys: list[Any]) -> None:
        request = context()
        manager.prepare_store(keys, request)
        manager.complete_store(keys, request)

    for _ in range(NUM_CHUNKS // BATCH):
        resident = new_keys()
        store(resident)
    figures: dict[str, list[float]] = {"lookup": [], "pin": [], "store": []}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        request = context()
        begun = time.perf_counter()
        for key in resident:
            manager.lookup(key, request)
        figures["lookup"].append((time.perf_counter() - begun) / BATCH * 1e6)
        begun = time.perf_counter()
        manager.prepare_load(resident, request)
        manager.complete_load(resident, request)
        figures["pin"].append((time.perf_counter() - begun) / BATCH * 1e6)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        keys = new_keys()
        begun = time.perf_counter()
        store(keys)
        figures["store"].append((time.perf_counter() - begun) / BATCH * 1e6)
    json.dump(figures, sys.stdout)


main()
