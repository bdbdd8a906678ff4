"""Daemons whose metrics or status the engine's tests read."""

import socket
import urllib.request
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class PoolDaemon(DaemonProcess):
    """`DaemonProcess` with a metrics port of its own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.metrics_port = free_port()
        super().__init__(folder, environment={"KVOFFLOAD_METRICS_PORT": str(self.metrics_port)}, **options)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name with labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


class RegionDaemon(PoolDaemon):
    """One that writes its status to a (scripted) API server."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, from_api=True, **options)

    def __enter__(self) -> "RegionDaemon":
        assert self.api is not None
        self.api.make_region("first")
        self.api.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        assert self.api is not None
        self.api.stop()

    def engines(self) -> list[dict[str, Any]]:
        """The region's `status.engines`, as it was last told."""
        assert self.api is not None
        return list(self.api.statuses[-1].get("engines", [])) if self.api.statuses else []
