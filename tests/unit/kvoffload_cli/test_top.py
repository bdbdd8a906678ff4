"""`kubectl kvoffload top`: gauges as they are, counters as rates between two readings."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from fixtures.cli.cluster import healthy
from fixtures.cli.reader import FixtureReader
from fixtures.cli.scene import NOW, SYSTEM
from kvoffload_cli import top
from kvoffload_cli.top import NodeSample, observe_samples, parse_metrics, rate

METRICS = """\
# HELP kvoffload_pool_capacity_bytes Bytes reserved.
# TYPE kvoffload_pool_capacity_bytes gauge
kvoffload_pool_capacity_bytes 6.8719476736e+010
# TYPE kvoffload_pool_used_bytes gauge
kvoffload_pool_used_bytes{tenant="namespace/team-a"} 1.0e+010
kvoffload_pool_used_bytes{tenant="namespace/team-b"} 2.0e+010
# TYPE kvoffload_engines gauge
kvoffload_engines{layout="replicated"} 2
kvoffload_engines{layout="left-alone"} 3
# TYPE kvoffload_lookups_total counter
kvoffload_lookups_total{result="hit"} %(hits)d
kvoffload_lookups_total{result="miss"} %(misses)d
# TYPE kvoffload_stored_bytes_total counter
kvoffload_stored_bytes_total %(stored)d
# TYPE kvoffload_deduplicated_bytes_total counter
kvoffload_deduplicated_bytes_total 7.0e+010
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 12
"""


def proxied(node: str) -> str:
    return f"/api/v1/namespaces/{SYSTEM}/pods/kvoffload-llm-{node}:9420/proxy/metrics"


def at(seconds: float, samples: list[NodeSample]) -> list[NodeSample]:
    return [replace(sample, at_seconds=seconds) for sample in samples]


def test_table_shows_rates_between_two_readings(golden: Callable[[str, str], None]) -> None:
    objects = healthy()
    objects[proxied("gpu-1")] = METRICS % {"hits": 100, "misses": 50, "stored": 0}
    reader = FixtureReader(objects, denied=(proxied("gpu-2"),))
    before = at(0.0, observe_samples(reader))
    objects[proxied("gpu-1")] = METRICS % {"hits": 1000, "misses": 150, "stored": 4 << 30}
    after = at(2.0, observe_samples(reader))
    console = Console(width=160, highlight=False)
    with console.capture() as capture:
        console.print(top.render(before, after, now=NOW))
    golden("top.txt", capture.get())


def test_labels_are_summed_and_foreign_metrics_left_out() -> None:
    values = parse_metrics(METRICS % {"hits": 3, "misses": 4, "stored": 5})
    assert values["kvoffload_pool_used_bytes"] == 3.0e10
    assert values["kvoffload_lookups_total"] == 7
    assert values["kvoffload_lookups_total{result=hit}"] == 3
    assert "process_cpu_seconds_total" not in values


def sample(seconds: float, value: float) -> NodeSample:
    (pod,) = observe_samples(FixtureReader({"/api/v1/pods": healthy()["/api/v1/pods"][:1], proxied("gpu-1"): ""}))
    return replace(pod, at_seconds=seconds, values={"x": value})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, sample(2, 10), None),
        (sample(0, 4), sample(2, 10), 3.0),
        (sample(0, 10), sample(2, 4), 2.0),
        (sample(2, 1), sample(2, 4), None),
        (replace(sample(0, 4), problem="gone"), sample(2, 10), None),
    ],
)
def test_rate_needs_two_readings_and_survives_a_restart(
    before: NodeSample | None, after: NodeSample, expected: float | None
) -> None:
    assert rate(before, after, "x") == expected
