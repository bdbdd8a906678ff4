"""The daemon's rows about pods: how soon a pod has its socket, and what another pod's flood costs it."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.rows import Measured, Row
from kvoffload.protocol.messages import Found, Lookup
from tests.daemon_process import DaemonProcess, TestEngine, wait_until
from tests.toy_node import running_node

NUM_PODS = 30
NUM_LOOKUPS = 1000
NUM_KEYS = 64
TESTS = Path(__file__).resolve().parents[1] / "tests"


def run(folder: Path) -> list[Row]:
    """Both rows."""
    return [_measure_attach(), _measure_beside_flood(folder)]


def _measure_attach() -> Row:
    """From the moment that the kubelet has made a pod's folder until the pod may connect."""
    milliseconds = []
    with running_node() as node:
        for number in range(NUM_PODS):
            begun = time.perf_counter()
            folder = node.create_pod(f"pod-{number}")
            wait_until((folder / "daemon.sock").exists, pause_seconds=0.001)
            milliseconds.append(1000 * (time.perf_counter() - begun))
    ours = Measured.of(milliseconds)
    return Row("a pod's socket after its folder", "ms", ours, None, "", "at most 100", met=ours.median <= 100)


def _measure_beside_flood(folder: Path) -> Row:
    """One pod's look-ups while another sends as much as the daemon takes over 17 connections, and alone."""
    with DaemonProcess(folder, capacity_bytes=32 << 20) as daemon:
        engine = TestEngine(daemon.attach("good"), part_bytes=4096)
        alone = _measure_lookups(engine)
        with _flood(daemon.attach("bad")):
            beside = _measure_lookups(engine)
        engine.close()
    name = f"look-up of {NUM_KEYS} keys beside a pod that floods the daemon"
    return Row(name, "us", beside, alone, "alone", "within 3 x", met=beside.median <= 3 * alone.median)


def _measure_lookups(engine: TestEngine) -> Measured:
    microseconds = []
    for number in range(NUM_LOOKUPS):
        begun = time.perf_counter()
        engine.scheduler.send(Lookup(number, bytes(32 * NUM_KEYS)))
        engine.scheduler.wait_for(Found, 30)
        microseconds.append(1e6 * (time.perf_counter() - begun))
    return Measured.of(microseconds)


@contextlib.contextmanager
def _flood(path: Path) -> Iterator[None]:
    command = [sys.executable, str(TESTS / "concurrency" / "flood.py"), str(path), "16"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it floods now
            yield
        finally:
            process.kill()
