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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from hack.docs.settings_page import HEADER
from kvoffload.api.pool import NodeCounts
from kvoffload_node.metrics import LABELS
from kvoffload_operator import metrics as operator_metrics
from kvoffload_operator.reconcilers.pod import UNATTACHED_REASONS

START_SECONDS = 30.0


OPEN_LABELS = {
    "pool": "name of a KVOffloadPool",
    "tenant": "whose blocks: `namespace/NAME`, `pool` or `pod/UID`, as the pool's `sharing` says",
    "rank": "number of a worker of an engine, from 0",
    "numa_node": "number of a NUMA node",
    "version": "of kvoffload",
}
"""Labels whose values are no closed set, with what they are."""
DEGRADED_REASONS = "those of the condition `Degraded`, see [Conditions](conditions.md)"
NOT_FROM_THE_START: dict[tuple[str, str], Iterable[str]] = {
    ("kvoffload_operator_admission_duration_seconds", "webhook"): ("mutate-pods", "validate-pools"),
    ("kvoffload_operator_reconcile_duration_seconds", "kind"): ("pool", "pod"),
    ("kvoffload_operator_unattached_pods", "reason"): UNATTACHED_REASONS,
    ("kvoffload_operator_pool_nodes", "state"): NodeCounts.model_fields,
}
"""Values of the operator's labels that its registry does not have before the first event."""
UNITS = {
    "_timestamp_seconds": "seconds since 1970",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_ratio": "0 to 1",
    "_info": "always 1",
    "_ready": "1 or 0",
    "_active": "1 or 0",
    "_leader": "1 or 0",
}
"""By the end of a metric's name without `_total`; all others count."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric family. `labels`: each with its values, none where they are no closed set."""

    name: str
    kind: str
    labels: Mapping[str, tuple[str, ...]]
    help: str

    @property
    def unit(self) -> str:
        """What one of it is."""
        name = self.name.removesuffix("_total")
        return next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "count")


def build_page() -> str:
    """The page."""
    parts = [
        HEADER,
        "# Metrics",
        "All in base units. Prometheus adds the target labels `pool` and `node` to the daemon's (see "
        "[Monitoring](../monitoring.md)). A label has the values behind it and no others; those without are: "
        + "; ".join(f"`{label}`, {what}" for label, what in OPEN_LABELS.items())
        + ".",
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
    lines = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda one: one.name):
        labels = "; ".join(_label(row.name, label, values) for label, values in row.labels.items())
        lines.append(f"| `{row.name}` | {row.kind} | {row.unit} | {labels} | {row.help} |")
    return "\n".join(lines)


def _label(metric: str, label: str, values: Iterable[str]) -> str:
    if label in OPEN_LABELS:
        return f"`{label}`"
    if (metric, label) == ("kvoffload_operator_pool_degraded", "reason"):
        return f"`{label}`: {DEGRADED_REASONS}"
    known = [value or "(empty)" for value in values]
    if not known:
        raise ValueError(f"{metric} has no value of {label}: begin them, or write them into NOT_FROM_THE_START")
    return f"`{label}`: {', '.join(known)}"


def daemon_metrics() -> list[MetricRow]:
    """What a real daemon's /metrics holds, ours only."""
    with running_daemon() as text:
        return [
            MetricRow(
                name=family.name + ("_total" if family.type == "counter" else ""),
                kind=family.type,
                labels={label: values_of(family, label) for label in LABELS.get(family.name, ())},
                help=family.documentation,
            )
            for family in text_string_to_metric_families(text)
            if family.name.startswith("kvoffload_")
        ]


def values_of(family: Metric, label: str) -> tuple[str, ...]:
    """The values that a label has, in the order of the series."""
    return tuple(dict.fromkeys(sample.labels[label] for sample in family.samples if label in sample.labels))


def write_host(root: Path, page_bytes: int) -> Path:
    """This host, but for huge pages of one size, of which it has some; returns its root, for `KVOFFLOAD_HOST_ROOT`."""
    folder = root / f"sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB"
    folder.mkdir(parents=True)
    for number, name in enumerate(("nr", "free", "resv", "surplus")):
        (folder / f"{name}_hugepages").write_text(f"{40 >> number}\n")
    (root / "proc").symlink_to("/proc")
    return root


@contextlib.contextmanager
def running_daemon() -> Iterator[str]:
    """Start a daemon on /dev/shm, on a host that has huge pages of the same size, and give its /metrics."""
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
            "KVOFFLOAD_HOST_ROOT": str(write_host(folder / "host", os.statvfs("/dev/shm").f_bsize)),
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
        with contextlib.suppress(OSError):  # not there yet, or busy
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = str(answer.read().decode())
            if "kvoffload_pool_capacity_bytes" in text:
                return text
        time.sleep(0.1)
    raise RuntimeError(f"the daemon shows no metrics after {START_SECONDS} s:\n{log.read_text()[-2000:]}")


def operator_rows() -> list[MetricRow]:
    """The operator's own families, with what operator and webhook show at their start."""
    operator_metrics.begin_injections()
    operator_metrics.begin_reconciliations()
    rows = []
    for metric in vars(operator_metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.collect()
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {
                label: tuple(NOT_FROM_THE_START.get((name, label), values_of(family, label)))
                for label in metric._labelnames
            }
            rows.append(MetricRow(name=name, kind=family.type, labels=labels, help=family.documentation))
    return rows
