"""A real node daemon for tests and benches: its process, its pages, and pods handed over as the attacher does.

    with hugetlb_mount(64 << 20) as mount, DaemonProcess(tmp_path, capacity_bytes=64 << 20, mount=mount) as daemon:
        path = daemon.attach("pod-a")          # the socket that a pod's engine would find in its emptyDir
        session = Session.connect(str(path), hello(...))
        daemon.kill(); daemon.start()          # the pods are handed over again

Without `mount` it runs on /dev/shm (`fallback: SharedMemory`), which needs neither root nor pages.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import endpoints
from kvoffload.errors import DaemonUnavailable, SessionRefused
from kvoffload.protocol.client import Session
from kvoffload.protocol.messages import (
    OFFSET_BYTES,
    PROTOCOL_VERSION,
    AttachPod,
    Bind,
    Bound,
    EngineReady,
    Fail,
    Hello,
    Mapped,
    Reserve,
    Reserved,
)
from kvoffload_node.attach.handoff import Handoff
from scripted_api_server import ScriptedApiServer

PAGE_BYTES = 2 << 20
GIGANTIC_PAGE_BYTES = 1 << 30
_HUGEPAGES = Path("/sys/kernel/mm/hugepages")
_START_SECONDS = 120.0


@contextlib.contextmanager
def hugetlb_mount(num_bytes: int, *, limit: bool = False, page_bytes: int = PAGE_BYTES) -> Iterator[Path]:
    """A hugetlbfs in a new folder, with so many bytes of huge pages added to the node and taken away after.

    With `limit` the mount itself gives no more than that. Raises RuntimeError where the node has not so much memory in
    one piece.
    """
    num_pages = -(-num_bytes // page_bytes)
    folder = Path(f"/run/kvoffload-test-{uuid.uuid4().hex[:12]}")
    _add_pages(num_pages, page_bytes)
    try:
        folder.mkdir()
        options = f"pagesize={page_bytes >> 20}M" + (f",size={num_bytes}" if limit else "")
        subprocess.run(["mount", "-t", "hugetlbfs", "-o", options, "none", str(folder)], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
            folder.rmdir()
    finally:
        _add_pages(-num_pages, page_bytes)


def _add_pages(num_pages: int, page_bytes: int) -> None:
    """Change the node's number of pages; other tests do the same at the same time, so only by the difference.

    Surplus pages are counted out: they are taken away already and only wait until their last user lets go.
    """
    folder = _HUGEPAGES / f"hugepages-{page_bytes // 1024}kB"
    total, surplus = folder / "nr_hugepages", folder / "surplus_hugepages"
    with Path("/tmp/kvoffload-nr-hugepages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = int(total.read_text()) - int(surplus.read_text())
        total.write_text(str(max(0, before + num_pages)))
        after = int(total.read_text()) - int(surplus.read_text())
        if after < before + num_pages:
            total.write_text(str(before))
            raise RuntimeError(f"the node gave {after - before} of {num_pages} huge pages of {page_bytes} bytes")


class DaemonProcess:
    """One daemon with its state folder, restarted at will."""

    def __init__(
        self,
        folder: Path,
        *,
        capacity_bytes: int,
        mount: Path | None = None,
        program: list[str] | None = None,
        environment: dict[str, str] | None = None,
        from_api: bool = False,
        **spec: Any,
    ) -> None:
        """`spec`: more fields of the region's spec, in JSON names; `program` replaces `python -m kvoffload_node`.

        With `from_api` the daemon asks `api`, which the caller starts, and not a file.
        """
        self.folder = folder
        self.pool = f"test-{uuid.uuid4().hex[:12]}"
        self.mount = mount or Path("/dev/shm")
        self.state = folder / "state"
        self.handoff = folder / "handoff"
        self.log_path = folder / "daemon.log"
        for path in (self.state, self.handoff, folder / "pods"):
            path.mkdir(parents=True, exist_ok=True)
        self.spec: dict[str, Any] = {
            "poolName": self.pool,
            "nodeName": "node",
            "capacityBytes": capacity_bytes,
            "pageSizeBytes": PAGE_BYTES,
            "fallback": "None" if mount else "SharedMemory",
            "sharing": "Pool",
            **spec,
        }
        self.api = ScriptedApiServer(folder, self.spec) if from_api else None
        self._program = program or [sys.executable, "-m", "kvoffload_node"]
        self.environment = environment or {}
        self._listening: dict[str, tuple[AttachPod, socket.socket]] = {}
        self._attacher = Handoff(self.handoff / "attach.sock")
        self.process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0

    def __enter__(self) -> "DaemonProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.pods_are_gone()
        shutil.rmtree(self.mount / f"kvoffload-{self.pool}", ignore_errors=True)

    def write_spec(self, **changes: Any) -> None:
        """Change the region's spec, as the operator would."""
        self.spec.update(changes)
        path = self.folder / "region.json"
        path.with_suffix(".new").write_text(json.dumps(self.spec))
        path.with_suffix(".new").rename(path)

    def delete_spec(self) -> None:
        """Delete the region, as the end of its pool would."""
        (self.folder / "region.json").unlink()

    def start(self) -> None:
        """Start the daemon, wait until it takes pods, and hand over those that it had."""
        self.write_spec()
        source = {"KVOFFLOAD_REGION_FILE": str(self.folder / "region.json")}
        if self.api is not None:
            source = {"KUBECONFIG": self.api.kubeconfig, "KVOFFLOAD_DAEMONSET": "d", "KVOFFLOAD_NAMESPACE": "n"}
        environment = {
            **os.environ,
            "KVOFFLOAD_POOL": self.pool,
            "KVOFFLOAD_NODE_NAME": "node",
            **source,
            "KVOFFLOAD_HUGEPAGES": str(self.mount),
            "KVOFFLOAD_STATE": str(self.state),
            "KVOFFLOAD_HANDOFF": str(self.handoff),
            "KVOFFLOAD_METRICS_PORT": "0",
            "KVOFFLOAD_QUARANTINE_SECONDS": "0.2",
            **self.environment,
        }
        self._log_begin = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            # A test that is killed must not leave a daemon behind, which would keep the node's pages.
            command = ["setpriv", "--pdeathsig", "KILL", *self._program, "daemon"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        for uid in list(self._listening):
            self._hand_over(uid)

    def attach(self, uid: str, *, namespace: str = "default", name: str = "", predicted: str = "auto") -> Path:
        """Hand a pod over, now or when the daemon starts; returns the socket that its engines connect to."""
        path = self.folder / "pods" / f"{uid}.sock"
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listening.bind(str(path))
        listening.listen(128)
        if uid in self._listening:  # the pod came again; its old socket is of no use to anybody
            self._listening.pop(uid)[1].close()
        self._listening[uid] = (AttachPod(uid, namespace, name or uid, predicted), listening)
        if self.process is not None:
            self._hand_over(uid)
        return path

    def pods_are_gone(self) -> None:
        """While no daemon runs: the next one is handed nobody."""
        while self._listening:
            self._listening.popitem()[1][1].close()

    def detach(self, uid: str) -> None:
        """The pod's folder is gone, as the attacher would tell."""
        _, listening = self._listening.pop(uid)
        listening.close()
        self._attacher.detach(uid)

    def _hand_over(self, uid: str) -> None:
        request, listening = self._listening[uid]
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._attacher.ensure_connected()
                self._attacher.attach(request, listening)
                return
            except DaemonUnavailable:
                if self.process is not None and self.process.poll() is not None:
                    raise RuntimeError(f"the daemon ended with {self.process.returncode}:\n{self.log}") from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @property
    def log(self) -> str:
        """What the daemon has logged."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def metrics_port(self) -> int:
        """Where the daemon that was started last answers; waits until it says so."""
        said: list[bytes] = []

        def is_said() -> bool:
            said[:] = re.findall(rb"endpoints on port (\d+)\n", self.log_path.read_bytes()[self._log_begin :])
            return bool(said)

        wait_until(is_said)
        return int(said[-1])

    def scrape(self) -> str:
        """The text of its /metrics."""
        return endpoints.scrape(self.metrics_port)

    def metrics(self) -> dict[str, float]:
        """Every sample of its /metrics by its name with labels."""
        return endpoints.samples(self.scrape())

    def readyz(self) -> tuple[int, str]:
        """HTTP status of its /readyz, and what it says."""
        return endpoints.readyz(self.metrics_port)

    def kill(self) -> None:
        """SIGKILL, as the kernel or a crash would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, as the kubelet would."""
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(timeout=30)
            self.process = None
        self._attacher.close()


def connect(path: Path, hello: Hello, timeout_seconds: float = _START_SECONDS) -> Session:
    """A session, waiting while the daemon reserves its pages."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return Session.connect(str(path), hello)
        except SessionRefused as error:
            if error.reason.value != "NotReady" or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class TestEngine:
    """An engine as the daemon sees it: a scheduler and its ranks, all in this process, without any copying."""

    __test__ = False

    def __init__(
        self,
        path: Path,
        *,
        engine_id: str = "engine",
        ranks: int = 2,
        part_bytes: int = 65536,
        replicated: bool = True,
        identity: bytes = b"i" * 32,
        key_bytes: int = 32,
        process: bytes = b"",
        reason: str = "",
        message: str = "",
    ) -> None:
        """`reason` and `message`: why the ranks' bytes differ, as the gate of an engine says it."""
        common: dict[str, Any] = {
            "protocol_min": PROTOCOL_VERSION,
            "protocol_max": PROTOCOL_VERSION,
            "engine_id": engine_id,
            "world_size": ranks,
        }
        self.workers = [
            connect(
                path,
                Hello(
                    role="worker",
                    rank=rank,
                    identity=identity,
                    part="all" if replicated else f"rank-{rank}",
                    part_bytes=part_bytes,
                    process=process and process[:15] + bytes([rank + 1]),
                    model="test-model",
                    reason=reason,
                    message=message,
                    **common,
                ),
            )
            for rank in range(ranks)
        ]
        for worker in self.workers:
            worker.send(Mapped())
        self.scheduler = connect(
            path,
            Hello(role="scheduler", rank=-1, identity=identity, process=process and process[:15] + b"\0", **common),
        )
        self.ready = self.scheduler.wait_for(EngineReady, _START_SECONDS)
        self.scheduler.send(Bind(b"none", key_bytes))
        self.bound = self.scheduler.wait_for(Bound, _START_SECONDS)

    @property
    def epoch(self) -> int:
        """The daemon's epoch when this engine attached."""
        return self.scheduler.welcome.epoch

    def reserve(self, count: int) -> bytes:
        """So many slots to write, packed. A region that has just begun, or is full, has fewer at first."""
        offsets = b""

        def are_all_there() -> bool:
            nonlocal offsets
            self.scheduler.send(Reserve(1, count))
            reserved = self.scheduler.wait_for(Reserved, _START_SECONDS)
            offsets = reserved.offsets
            if len(offsets) < count * OFFSET_BYTES:
                self.scheduler.send(Fail(reserved.epoch, offsets))
            return len(offsets) == count * OFFSET_BYTES

        wait_until(are_all_there)
        return offsets

    def close(self) -> None:
        """End all sessions, as the engine's death would."""
        for session in (self.scheduler, *self.workers):
            session.close()
            for descriptor in session.take_descriptors():
                os.close(descriptor)


def wait_until(holds: Callable[[], bool], timeout_seconds: float = 60.0, pause_seconds: float = 0.01) -> None:
    """Wait for a condition; fails with where it was asked."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not become true within {timeout_seconds:g} s")
        time.sleep(pause_seconds)
