"""A daemon with a pool of 16 MiB, and engines that fill it: for tests of the whole daemon."""

import time
from pathlib import Path
from typing import Any

from byte_engine import ByteEngine, key_of
from daemon_process import DaemonProcess, wait_until
from kvoffload.protocol.messages import PROTOCOL_VERSION, Hello

CAPACITY_BYTES = 16 << 20
NUM_SLOTS = CAPACITY_BYTES // 65536


def start(folder: Path, mount: Path | None, environment: dict[str, str] | None = None, **spec: Any) -> DaemonProcess:
    return DaemonProcess(folder, capacity_bytes=CAPACITY_BYTES, mount=mount, environment=environment, **spec)


def attach(path: Path, engine_id: str, **kwargs: Any) -> ByteEngine:
    engine = ByteEngine(path, engine_id, **kwargs)
    engine.connect()
    return engine


def fill(
    engine: ByteEngine, count: int, salt: int, others: tuple[ByteEngine, ...] = (), at_once: int = 16
) -> list[bytes]:
    """Store `count` keys, however long that takes; other engines answer what is asked of them meanwhile."""
    keys = [key_of(number, salt=salt) for number in range(count)]
    left = list(keys)
    deadline = time.monotonic() + 30
    while left:
        stored = engine.store(left[:at_once])
        del left[: len(stored)]
        for other in (engine, *others):
            other.acknowledge_revocations()
        if not stored:
            assert time.monotonic() < deadline, f"{len(left)} keys could not be stored: {engine.reason}"
            time.sleep(0.01)
    wait_until(lambda: hits(engine, keys[-4:]) == 4)
    return keys


def hits(engine: ByteEngine, keys: list[bytes]) -> int:
    count = 0
    for begin in range(0, len(keys), 64):
        found = [offset for offset in engine.lookup(keys[begin : begin + 64]) if offset >= 0]
        engine.unpin(found)
        count += len(found)
    return count


def hello(**changes: object) -> Hello:
    fields = {
        "protocol_min": PROTOCOL_VERSION, "protocol_max": PROTOCOL_VERSION,
        "engine_id": "e", "role": "scheduler", "rank": -1, "world_size": 1, "identity": b"i" * 32,
    }  # fmt: skip
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]
