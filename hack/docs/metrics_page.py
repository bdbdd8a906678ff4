"""docs/reference/metrics.md: the daemon's metrics as a running daemon shows them, and the operator's from its registry.

Called by `reference.py`.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from hack.docs.settings_page import HEADER
from kvoffload_node.metrics import HELP, LABELS
from kvoffload_operator import metrics as operator_metrics

START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric family."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def build_page() -> str:
    """The page."""
    parts = [
        HEADER,
        "# Metrics",
        "All in base units. Prometheus adds the target labels `pool` and `node` to the daemon's (see "
        "[Monitoring](../monitoring.md)).",
        "## Node daemon",
        "Port 9420 of every daemon's pod.",
        table(daemon_metrics()),
        "## Operator and webhook",
        "Port `metrics` of their pods.",
        table(operator_rows()),
    ]
    return "\n\n".join(parts) + "\n"


def table(rows: list[MetricRow]) -> str:
    """A table in order of the names."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda one: one.name):
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.help} |")
    return "\n".join(lines)


def daemon_metrics() -> list[MetricRow]:
    """What a real daemon's /metrics holds, ours only."""
    of_pages = "kvoffload_hugepages"  # absent from a daemon on /dev/shm, as this one
    rows = [MetricRow(name=of_pages, kind="gauge", labels=LABELS[of_pages], help=HELP[of_pages])]
    with running_daemon() as text:
        return rows + [
            MetricRow(
                name=family.name + ("_total" if family.type == "counter" else ""),
                kind=family.type,
                labels=LABELS.get(family.name, ()),
                help=family.documentation,
            )
            for family in text_string_to_metric_families(text)
            if family.name.startswith("kvoffload_")
        ]


@contextlib.contextmanager
def running_daemon() -> Iterator[str]:
    """Start a daemon on /dev/shm and give its /metrics."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as probe:
        folder, pool = Path(name), f"docs-{os.getpid()}"
        port = probe.getsockname()[1]
        probe.close()
        spec = {
            "poolName": pool,
            "nodeName": "node",
            "capacityBytes": 64 << 20,
            "pageSizeBytes": 2 << 20,
            "fallback": "SharedMemory",
        }
        (folder / "region.json").write_text(json.dumps(spec))
        (folder / "state").mkdir()
        environment = os.environ | {
            "KVOFFLOAD_POOL": pool,
            "KVOFFLOAD_NODE_NAME": "node",
            "KVOFFLOAD_REGION_FILE": str(folder / "region.json"),
            "KVOFFLOAD_HUGEPAGES": "/dev/shm",
            "KVOFFLOAD_STATE": str(folder / "state"),
            "KVOFFLOAD_HANDOFF": name,
            "KVOFFLOAD_METRICS_PORT": str(port),
        }
        command = [sys.executable, "-m", "kvoffload_node", "daemon"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield _scrape(port, process, folder / "log")
        finally:
            process.terminate()
            process.wait(timeout=30)
            shutil.rmtree(Path("/dev/shm") / f"kvoffload-{pool}", ignore_errors=True)


def _scrape(port: int, process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
                text = str(answer.read().decode())
            if "kvoffload_pool_capacity_bytes" in text:
                return text
        time.sleep(0.1)
    raise RuntimeError(f"the daemon shows no metrics after {START_SECONDS} s:\n{log.read_text()[-2000:]}")


def operator_rows() -> list[MetricRow]:
    """The operator's own families."""
    rows = []
    for metric in vars(operator_metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = tuple(metric._labelnames)
            rows.append(MetricRow(name=name, kind=family.type, labels=labels, help=family.documentation))
    return rows
