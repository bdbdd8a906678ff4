"""The daemon's rows: a real daemon process, its real client, and the references measured in the same run."""

import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench import pods
from bench.rows import Measured, Row
from hack.vllm.environment import environment_path
from kvoffload.layout.pages import build_part_layout
from kvoffload.protocol.messages import Assign, Found, Lookup, Reserve, Reserved, Seal, Unpin
from kvoffload_engine.mapping import RegionMapping
from kvoffload_engine.transfer.host import HostTransfer
from kvoffload_engine.transfer.plan import WHOLE, DeviceTensors, plan_copy
from tests.daemon_process import DaemonProcess, TestEngine, hugetlb_mount

BATCH = 256
SECONDS = 2.0
VLLM_PYTHON = environment_path() / "bin" / "python"
_MISS = (-1).to_bytes(8, "little", signed=True)
_PIECE_BYTES = 1 << 20
_NUM_PIECES = 64
_COPY_ROUNDS = 42


def run() -> list[Row]:
    """Every row of the daemon."""
    vllm = _measure_vllm()
    with tempfile.TemporaryDirectory(prefix="kvo-bench-") as folder:
        rows = _measure_index(Path(folder) / "a", vllm)
        rows += _measure_copies(Path(folder) / "b")
        rows.append(_measure_eight_engines(Path(folder) / "c"))
        rows += pods.run(Path(folder) / "d")
    return rows


def _measure_vllm() -> dict[str, Measured] | None:
    """vLLM's own manager in its own process; None where there is no vLLM."""
    if not VLLM_PYTHON.exists():
        return None
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    script = Path(__file__).with_name("vllm_manager.py")
    command = [str(VLLM_PYTHON), str(script)]
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    figures = json.loads(out.splitlines()[-1])
    return {name: Measured.of(values) for name, values in figures.items()}


def _keys(first: int) -> bytes:
    return b"".join(number.to_bytes(32, "little") for number in range(first, first + BATCH))


def _repeat(measure: Callable[[], float]) -> Measured:
    """Microseconds a key of a function that returns seconds a batch, NaN for a batch that does not count."""
    for _ in range(20):
        measure()
    values = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        seconds = measure()
        if not math.isnan(seconds):
            values.append(seconds / BATCH * 1e6)
    return Measured.of(values)


def _measure_index(folder: Path, vllm: dict[str, Measured] | None) -> list[Row]:
    """Look-up, pin and unpin, reserve and seal: one engine of one rank, both processes on one core."""
    with hugetlb_mount(32 << 20) as mount, DaemonProcess(folder, capacity_bytes=32 << 20, mount=mount) as daemon:
        engine = TestEngine(daemon.attach("pod"), ranks=1, part_bytes=4096)
        assert daemon.process is not None
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(daemon.process.pid, {0})
        os.sched_setaffinity(0, {0})
        try:
            return _measure_engine(engine, vllm)
        finally:
            os.sched_setaffinity(0, before)
            engine.close()


def _measure_engine(engine: TestEngine, vllm: dict[str, Measured] | None) -> list[Row]:
    scheduler, worker = engine.scheduler, engine.workers[0]
    next_key = 0

    def store() -> float:
        nonlocal next_key
        next_key += BATCH
        begun = time.perf_counter()
        scheduler.send(Reserve(1, BATCH))
        reserved = scheduler.wait_for(Reserved, 5)
        keys = _keys(next_key)[: 4 * len(reserved.offsets)]
        scheduler.send(Assign(reserved.epoch, reserved.offsets, keys))
        worker.send(Seal(reserved.epoch, reserved.offsets))
        # The look-up of one key is answered after the seal was handled: both are in the daemon's queue before it.
        worker_done(reserved.offsets, keys)
        elapsed = time.perf_counter() - begun
        return elapsed if len(reserved.offsets) == 8 * BATCH else float("nan")

    def worker_done(offsets: bytes, keys: bytes) -> None:
        while offsets:
            scheduler.send(Lookup(2, keys[-32:]))
            found = scheduler.wait_for(Found, 5)
            if found.offsets != _MISS:
                scheduler.send(Unpin(found.offsets))
                return

    deadline = time.monotonic() + 30
    while math.isnan(store()) and time.monotonic() < deadline:
        pass  # extents are still being allocated
    for _ in range(2 * (32 << 20) // 4096 // BATCH):
        store()
    stored = _repeat(store)
    resident = _keys(next_key)

    def lookup() -> float:
        begun = time.perf_counter()
        scheduler.send(Lookup(1, resident))
        found = scheduler.wait_for(Found, 5)
        elapsed = time.perf_counter() - begun
        assert _MISS not in [found.offsets[i : i + 8] for i in range(0, len(found.offsets), 8)]
        scheduler.send(Unpin(found.offsets))
        settle()
        return elapsed

    def settle() -> None:
        """Wait until the daemon has nothing left to do for us."""
        scheduler.send(Lookup(3, resident[:32]))
        scheduler.send(Unpin(scheduler.wait_for(Found, 5).offsets))

    def pin_and_unpin() -> float:
        """A look-up, which leases, and its unpin, until the daemon has nothing left to do for us."""
        begun = time.perf_counter()
        scheduler.send(Lookup(1, resident))
        found = scheduler.wait_for(Found, 5)
        scheduler.send(Unpin(found.offsets))
        settle()
        return time.perf_counter() - begun

    looked_up = _repeat(lookup)
    pinned = _repeat(pin_and_unpin)
    rows = []
    for name, ours, key, limit in (
        ("look-up, from another process", looked_up, "lookup", 0.6),
        ("reserve + seal, evicting", stored, "store", 7.0),
        ("pin + unpin", pinned, "pin", 3.0),
    ):
        reference = vllm[key] if vllm else None
        rows.append(
            Row(name, "us/key", ours, reference, "vLLM, in process", f"at most {limit}", met=ours.median <= limit)
        )
    return rows


def _measure_copies(folder: Path) -> list[Row]:
    """Store and load of 1 MiB pieces through the region by two engines, each with the agent's own mapping, plan and
    transfer, beside a plain copy of the same bytes."""
    capacity = 4 * _NUM_PIECES * _PIECE_BYTES
    with hugetlb_mount(capacity) as mount, DaemonProcess(folder, capacity_bytes=capacity, mount=mount) as daemon:
        path = daemon.attach("pod")
        first = TestEngine(path, engine_id="a", ranks=1, part_bytes=_PIECE_BYTES)
        second = TestEngine(path, engine_id="b", ranks=1, part_bytes=_PIECE_BYTES)
        source = np.random.default_rng(1).integers(0, 255, _NUM_PIECES * _PIECE_BYTES, dtype=np.uint8)
        target = np.zeros_like(source)
        pieces = range(0, source.nbytes, _PIECE_BYTES)
        copied, stores, loads = [], [], []
        mappings = [
            RegionMapping(engine.workers[0].descriptors[0], engine.workers[0].welcome.region_bytes, engine.epoch)
            for engine in (first, second)
        ]
        for number in range(_COPY_ROUNDS):
            keys = b"".join((number * 1000 + i).to_bytes(32, "little") for i in range(_NUM_PIECES))
            target[:] = 0
            begun = time.perf_counter()
            for at in pieces:
                ctypes.memmove(target.ctypes.data + at, source.ctypes.data + at, _PIECE_BYTES)
            copied.append(time.perf_counter() - begun)
            reserved = _reserve(first, _NUM_PIECES)
            begun = time.perf_counter()
            first.scheduler.send(Assign(reserved.epoch, reserved.offsets, keys))
            _transfer(source, mappings[0], reserved.offsets, to_region=True)
            first.workers[0].send(Seal(reserved.epoch, reserved.offsets))
            stores.append(time.perf_counter() - begun)
            second.scheduler.send(Unpin(_wait_found(second, keys)))  # the seals are handled
            target[:] = 0
            begun = time.perf_counter()
            found = _wait_found(second, keys)
            _transfer(target, mappings[1], found, to_region=False)
            second.scheduler.send(Unpin(found))
            loads.append(time.perf_counter() - begun)
            assert np.array_equal(source, target)
        first.close()
        second.close()
    total = source.nbytes / 1e9
    reference = Measured.of([total / seconds for seconds in copied[2:]])
    rows = []
    for name, seconds in (("store, 1 MiB pieces", stores), ("load by a second engine, 1 MiB pieces", loads)):
        ours = Measured.of([total / value for value in seconds[2:]])
        met = ours.median >= 0.95 * reference.median
        rows.append(Row(name, "GB/s", ours, reference, "one-thread copy, same run", "0.95 of the copy", met))
    return rows


def _transfer(
    blocks: "np.ndarray[tuple[int], np.dtype[np.uint8]]", mapping: RegionMapping, offsets: bytes, *, to_region: bool
) -> None:
    """What a worker on the CPU platform does with a job of whole blocks: plan it, copy it."""
    plan = plan_copy(
        layout=build_part_layout([[(0, _PIECE_BYTES)]], blocks_per_chunk=1),
        tensors=DeviceTensors(np.array([blocks.ctypes.data]), np.array([_PIECE_BYTES]), _NUM_PIECES),
        block_ids=np.arange(_NUM_PIECES),
        group_sizes=[_NUM_PIECES],
        block_indices=[0],
        slot_offsets=np.frombuffer(offsets, np.int64),
        slot_bytes=_PIECE_BYTES,
        part_offset=0,
        region_address=mapping.address,
        region_bytes=mapping.num_bytes,
        stripe=WHOLE,
    )
    HostTransfer().start(1, plan, to_region=to_region)


def _reserve(engine: TestEngine, count: int) -> Reserved:
    offsets = b""
    while True:
        engine.scheduler.send(Reserve(1, count - len(offsets) // 8))
        reserved = engine.scheduler.wait_for(Reserved, 5)
        offsets += reserved.offsets
        if len(offsets) == 8 * count:
            return Reserved(1, reserved.epoch, offsets)
        time.sleep(0.01)


def _wait_found(engine: TestEngine, keys: bytes) -> bytes:
    while True:
        engine.scheduler.send(Lookup(1, keys))
        found = engine.scheduler.wait_for(Found, 5)
        parts = [found.offsets[i : i + 8] for i in range(0, len(found.offsets), 8)]
        if _MISS not in parts:
            return found.offsets
        engine.scheduler.send(Unpin(b"".join(part for part in parts if part != _MISS)))


def _measure_eight_engines(folder: Path) -> Row:
    """Eight engines look up at once; beside a server that answers the same messages without looking."""
    folder.mkdir(parents=True)
    echo_path = folder / "echo.sock"
    echo = subprocess.Popen([sys.executable, "-m", "bench.echo", str(echo_path)], stdout=subprocess.PIPE)
    assert echo.stdout is not None
    echo.stdout.readline()
    try:
        reference = _run_clients(str(echo_path), "echo")
    finally:
        echo.kill()
        echo.wait()
    with DaemonProcess(folder, capacity_bytes=32 << 20) as daemon:
        ours = _run_clients(str(daemon.attach("pod")), "daemon")
    name = "8 engines at once, 256-key look-ups, p99"
    met = ours.median <= 1.5 * reference.median
    return Row(name, "ms", ours, reference, "bare msgspec echo server", "within 1.5 x", met=met)


def _run_clients(path: str, mode: str) -> Measured:
    """p99 of all clients' look-ups, in milliseconds, in each tenth of the time."""
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.client", path, mode, "4", f"engine-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": "tests"},
        )
        for number in range(8)
    ]
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(b"\n")
        client.stdin.flush()
    tenths: list[list[float]] = [[] for _ in range(10)]
    for client in clients:
        latencies = json.loads(client.communicate()[0])
        for number, latency in enumerate(latencies):
            tenths[10 * number // len(latencies)].append(1000 * latency)
    return Measured.of([sorted(values)[len(values) * 99 // 100] for values in tenths])
