"""`kubectl kvoffload top`: what every node of the pools holds and does, live.

Reads each daemon's /metrics through the API server's proxy, so it needs `get` on `pods/proxy` in the operator's
namespace; a node whose metrics cannot be read shows why.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvoffload.api import keys
from kvoffload.api.region import ConfirmedLayout
from kvoffload_cli.facts import DaemonPod
from kvoffload_cli.kube import ClusterReader, ClusterUnavailable, Denied, Reader
from kvoffload_cli.observe_pods import daemon_pod
from kvoffload_cli.options import Context, Kubeconfig
from kvoffload_cli.output import make_console, make_table, show_bytes

COLUMNS = (
    "NODE",
    "POOL",
    "USED",
    "CAPACITY",
    "FULL",
    "ENGINES",
    "HITS",
    "LOOKUPS/s",
    "STORE/s",
    "LOAD/s",
    "EVICT/s",
    "SAVED",
)


@dataclass(frozen=True, slots=True)
class NodeSample:
    """One daemon's figures at one time; `problem` says why there are none."""

    pod: DaemonPod
    at_seconds: float
    values: Mapping[str, float] = field(default_factory=dict)
    """Sums by name, and by `name{label=value}` for the labels in `KEPT_LABELS`."""
    problem: str = ""


KEPT_LABELS = {"kvoffload_lookups_total": "result", "kvoffload_engines": "layout"}


def command(
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two readings.")] = 2.0,
    iterations: Annotated[int, typer.Option(min=0, help="Readings to show; 0: until interrupted.")] = 0,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Watch use, hits and rates of every node.

    Refreshed until interrupted.
    """
    reader = ClusterReader(kubeconfig=kubeconfig, context=context)
    console = make_console()
    frames = watch(reader, interval_seconds=interval, iterations=iterations)
    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for frame in frames:
                    live.update(frame, refresh=True)
        else:
            for frame in frames:
                console.print(frame)


def watch(reader: Reader, *, interval_seconds: float, iterations: int) -> Iterator[Group]:
    """A table every interval, with the rates of that interval; 0 iterations: without end."""
    before = observe_samples(reader)
    for _ in itertools.count() if iterations == 0 else range(iterations):
        time.sleep(interval_seconds)
        after = observe_samples(reader)
        yield render(before, after, now=datetime.now(UTC))
        before = after


def observe_samples(reader: Reader) -> list[NodeSample]:
    """One sample of each running daemon, in order of node and pool."""
    manifests = reader.list_objects("/api/v1/pods", labels=keys.DAEMON_OF_LABEL)
    pods = sorted((daemon_pod(one) for one in manifests), key=lambda pod: (pod.node, pod.pool))
    return [observe_sample(reader, pod) for pod in pods]


def observe_sample(reader: Reader, pod: DaemonPod) -> NodeSample:
    """Read one daemon's metrics."""
    path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}:{keys.DAEMON_METRICS_PORT}/proxy/metrics"
    try:
        values = parse_metrics(reader.text(path))
    except (Denied, ClusterUnavailable) as error:
        return NodeSample(pod=pod, at_seconds=time.monotonic(), problem=pod.waiting or str(error))
    return NodeSample(pod=pod, at_seconds=time.monotonic(), values=values)


def parse_metrics(text: str) -> dict[str, float]:
    """Sum every kvoffload metric over its labels; keep apart the labels that the table needs."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("kvoffload_"):
                continue
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
            label = KEPT_LABELS.get(sample.name)
            if label:
                name = f"{sample.name}{{{label}={sample.labels.get(label, '')}}}"
                sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def render(before: list[NodeSample], after: list[NodeSample], *, now: datetime) -> Group:
    """The table of one moment, with rates since the reading before."""
    previous = {sample.pod.name: sample for sample in before}
    table: Table = make_table(*COLUMNS, rows=[row(previous.get(sample.pod.name), sample) for sample in after])
    head = f"{now:%H:%M:%S} UTC, {len(after)} daemons"
    problems = [f"{one.pod.node} ({one.pod.pool}): {one.problem}" for one in after if one.problem]
    return Group(Text(head), table, *(Text(problem) for problem in problems))


def row(before: NodeSample | None, after: NodeSample) -> list[str]:
    """One node: gauges as they are, counters as rates."""
    if after.problem:
        return [after.pod.node, after.pod.pool, *["-"] * (len(COLUMNS) - 2)]
    values = after.values
    used, capacity = (values.get(f"kvoffload_pool_{name}_bytes", 0.0) for name in ("used", "capacity"))
    hits = rate(before, after, "kvoffload_lookups_total{result=hit}")
    lookups = rate(before, after, "kvoffload_lookups_total")
    # those that run without offload attached only to say why
    left_alone = values.get(f"kvoffload_engines{{layout={ConfirmedLayout.LEFT_ALONE}}}", 0.0)
    engines = values.get("kvoffload_engines", 0.0) - left_alone
    return [
        after.pod.node,
        after.pod.pool,
        show_bytes(int(used)),
        show_bytes(int(capacity)),
        f"{used / capacity:.0%}" if capacity else "-",
        f"{engines:.0f}",
        f"{hits / lookups:.0%}" if hits is not None and lookups else "-",
        "-" if lookups is None else f"{lookups:.0f}",
        *(
            _per_second(rate(before, after, f"kvoffload_{name}_bytes_total"))
            for name in ("stored", "loaded", "evicted")
        ),
        show_bytes(int(values.get("kvoffload_deduplicated_bytes_total", 0.0))),
    ]


def rate(before: NodeSample | None, after: NodeSample, name: str) -> float | None:
    """A counter's increase per second; None at the first reading; from zero where the daemon restarted between."""
    if before is None or before.problem or after.at_seconds <= before.at_seconds:
        return None
    now, then = after.values.get(name, 0.0), before.values.get(name, 0.0)
    return (now - then if now >= then else now) / (after.at_seconds - before.at_seconds)


def _per_second(value: float | None) -> str:
    return "-" if value is None else show_bytes(int(value))
