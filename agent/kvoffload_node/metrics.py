"""The daemon's metrics, read from its live objects at each scrape; `docs/reference/metrics.md` is made from the table
here.

Runs in the node daemon, called by `health.py`. A leaf: lower layers count, this module translates. `pool` and `node`
come as target labels from Prometheus.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvoffload import __version__
from kvoffload.api.region import ConfirmedLayout, is_mispredicted
from kvoffload_node.host.hugepages import read_hugepages
from kvoffload_node.session.engines import Engine
from kvoffload_node.session.timing import BUCKETS_SECONDS

if TYPE_CHECKING:
    from kvoffload_node.daemon import Daemon

HELP = {
    "kvoffload_pool_capacity_bytes": "Bytes that the pool keeps on this node.",
    "kvoffload_pool_used_bytes": "Bytes of slots that hold blocks; those reserved or being written are not counted.",
    "kvoffload_pool_free_bytes": "Bytes that can be stored to without evicting.",
    "kvoffload_hugepages": "Huge pages of the pool's size on the node.",
    "kvoffload_slots": "Slots by state; leased: those of the ready and orphaned ones that somebody may read.",
    "kvoffload_engines": "Engines attached, by confirmed layout; left-alone: without offload, the status says why.",
    "kvoffload_engines_mispredicted": "Engines predicted replicated whose ranks found another layout.",
    "kvoffload_sessions": "Sessions, by whether their process is connected.",
    "kvoffload_session_held_bytes": "Bytes of the daemon's own memory in unfinished messages and in answers not read.",
    "kvoffload_lookups": "Keys looked up, by result.",
    "kvoffload_stored_bytes": "Bytes of slots that became ready.",
    "kvoffload_rank_stored_bytes": "Bytes that engines' ranks say they copied in; one copy is shared by all its ranks.",
    "kvoffload_loaded_bytes": "Bytes that ranks say they loaded.",
    "kvoffload_deduplicated_bytes": "Bytes that a plain layout would have stored beside those that were.",
    "kvoffload_cross_engine_hits": "Hits on slots that another engine stored.",
    "kvoffload_evicted_bytes": "Bytes evicted, by reason.",
    "kvoffload_failed_transfers": "Loads and stores that engines say failed, by direction.",
    "kvoffload_scheduler_steps": "Scheduler steps that engines say they made.",
    "kvoffload_missed_deadlines": "Scheduler steps that went on without an answer, which came too late.",
    "kvoffload_request_duration_seconds": "Time the daemon takes for one message.",
    "kvoffload_prefault_ratio": "Share of the capacity that has pages allocated.",
    "kvoffload_numa_extents": "Extents placed since the daemon's start on hosts of several NUMA nodes, by numa_node.",
    "kvoffload_short_reservations": "Requests for slots that brought fewer than were asked for, by reason.",
    "kvoffload_slab_waste_bytes": "Bytes at the ends of extents that hold no slot.",
    "kvoffload_refusals": "Refused sessions and requests, by reason.",
    "kvoffload_sessions_closed": "Connections that ended, by reason.",
    "kvoffload_attachers": "Attachers connected; 0: no new pod is attached.",
    "kvoffload_daemon_failures": "What failed in the daemon and was gone on from, by part; the log says what.",
    "kvoffload_endpoint_connections_ended": "Connections to this port that were ended before their answer, by reason.",
    "kvoffload_build_info": "Version of this daemon.",
}
LABELS: dict[str, tuple[str, ...]] = {
    "kvoffload_build_info": ("version",),
    "kvoffload_pool_used_bytes": ("tenant",),
    "kvoffload_hugepages": ("state",),
    "kvoffload_slots": ("state",),
    "kvoffload_engines": ("layout",),
    "kvoffload_sessions": ("state",),
    "kvoffload_lookups": ("result",),
    "kvoffload_rank_stored_bytes": ("rank",),
    "kvoffload_evicted_bytes": ("reason",),
    "kvoffload_failed_transfers": ("direction",),
    "kvoffload_request_duration_seconds": ("operation",),
    "kvoffload_numa_extents": ("numa_node",),
    "kvoffload_refusals": ("reason",),
    "kvoffload_short_reservations": ("reason",),
    "kvoffload_sessions_closed": ("reason",),
    "kvoffload_daemon_failures": ("part",),
    "kvoffload_endpoint_connections_ended": ("reason",),
}
"""Of the metrics that have some."""


class NodeCollector(Collector):
    """All metrics of one daemon."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon

    def describe(self) -> Iterable[Metric]:
        """Nothing: families are told at collection, so that registering does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Everything as it is now."""
        yield _gauge("kvoffload_build_info", {(__version__,): 1})
        yield _counted("kvoffload_daemon_failures", self._daemon.failures.counts)
        if self._daemon.endpoints is not None:
            yield _counted("kvoffload_endpoint_connections_ended", self._daemon.endpoints.ended)
        running = self._daemon.running
        if running is None:
            return
        region, registry = running.region, running.registry
        figures = region.figures()
        yield _gauge("kvoffload_pool_capacity_bytes", {(): figures.capacity_bytes})
        yield _gauge("kvoffload_pool_used_bytes", {(name,): used for name, used in figures.used_by_tenant.items()})
        yield _gauge("kvoffload_pool_free_bytes", {(): figures.free_bytes})
        counts = read_hugepages(self._daemon.paths, region.mount.page_bytes)
        if counts is not None:
            states = {"total": counts.total, "free": counts.free, "reserved": counts.reserved}
            yield _gauge("kvoffload_hugepages", {(state,): value for state, value in states.items()})
        yield _gauge("kvoffload_slots", {(state,): value for state, value in figures.slots.items()})
        yield _gauge("kvoffload_prefault_ratio", {(): figures.allocated_bytes / max(1, figures.capacity_bytes)})
        placed = sorted(region.extents.num_by_node.items())
        yield _gauge("kvoffload_numa_extents", {(str(node),): count for node, count in placed})
        yield _gauge("kvoffload_slab_waste_bytes", {(): figures.waste_bytes})
        engines = Counter(engine.layout or "pending" for engine in registry.engines.values() if engine.is_attached)
        layouts = (*ConfirmedLayout, "pending")
        yield _gauge("kvoffload_engines", {(layout,): engines[layout] for layout in layouts})
        yield _gauge("kvoffload_engines_mispredicted", {(): sum(map(_is_mispredicted, registry.engines.values()))})
        sessions = Counter(
            "connected" if session.connection else "disconnected"
            for engine in registry.engines.values()
            for session in engine.sessions.values()
        )
        states_of_sessions = ("connected", "disconnected")
        yield _gauge("kvoffload_sessions", {(state,): sessions[state] for state in states_of_sessions})
        yield _gauge("kvoffload_session_held_bytes", {(): registry.byte_budget.total})
        yield _gauge("kvoffload_attachers", {(): running.server.attachers})
        counters = registry.traffic.counters
        yield _counter("kvoffload_lookups", {("hit",): counters.hits, ("miss",): counters.misses})
        yield _counter("kvoffload_stored_bytes", {(): counters.stored_bytes})
        copied = sorted(counters.copied_by_rank.items())
        yield _counter("kvoffload_rank_stored_bytes", {(str(rank),): value for rank, value in copied})
        yield _counter("kvoffload_loaded_bytes", {(): counters.loaded_bytes})
        yield _counter("kvoffload_deduplicated_bytes", {(): counters.deduplicated_bytes})
        yield _counter("kvoffload_cross_engine_hits", {(): counters.cross_engine_hits})
        yield _counter("kvoffload_scheduler_steps", {(): counters.steps})
        yield _counter("kvoffload_missed_deadlines", {(): counters.missed_deadlines})
        yield _counter(
            "kvoffload_failed_transfers",
            {("load",): counters.failed_loads, ("store",): counters.failed_stores},
        )
        yield _counted("kvoffload_evicted_bytes", figures.evicted_bytes)
        yield _counted("kvoffload_short_reservations", registry.traffic.short_reservations)
        yield _counted("kvoffload_refusals", registry.refusals)
        yield _counted("kvoffload_sessions_closed", registry.closed)
        yield self._durations()

    def _durations(self) -> Metric:
        name = "kvoffload_request_duration_seconds"
        family = HistogramMetricFamily(name, HELP[name], labels=LABELS[name])
        assert self._daemon.running is not None
        durations = self._daemon.running.registry.durations
        for operation, histogram in sorted((kind.__name__.lower(), found) for kind, found in durations.items()):
            total, buckets = 0, []
            for bound, count in zip((*BUCKETS_SECONDS, float("inf")), histogram.counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
            family.add_metric([operation], buckets, histogram.sum_seconds)
        return family


def _is_mispredicted(engine: Engine) -> bool:
    """Whether the engine takes a part of the pool for each rank where one for all of them was promised."""
    return engine.is_attached and is_mispredicted(engine.pod.predicted_layout, engine.layout)


Samples = dict[tuple[str, ...], float]
"""Values by those of the labels."""


def _gauge(name: str, samples: Samples) -> Metric:
    return _with_samples(GaugeMetricFamily(name, HELP[name], labels=LABELS.get(name, ())), samples)


def _counter(name: str, samples: Samples) -> Metric:
    return _with_samples(CounterMetricFamily(name, HELP[name], labels=LABELS.get(name, ())), samples)


def _with_samples(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family


def _counted(name: str, counts: dict[str, int]) -> Metric:
    return _counter(name, {(label,): count for label, count in sorted(counts.items())})
