"""The dashboard's panels in their rows: title, queries, unit.

One table, from which the Grafana dashboard, the list of queries that the end-to-end test runs, and the screenshot in
the docs are made.
"""

from dataclasses import dataclass
from enum import Enum

SELECTOR = '{pool=~"$pool",node=~"$node"}'


class Unit(str, Enum):
    """Grafana's name of a unit."""

    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"
    PER_SECOND = "ops"
    SECONDS = "s"
    RATIO = "percentunit"
    COUNT = "short"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression with the dashboard's variables, and the legend of its series."""

    expression: str
    legend: str

    def resolved(self) -> str:
        """The expression with every pool and node, and Grafana's rate interval as two minutes."""
        text = self.expression.replace("$pool", ".*").replace("$node", ".*")
        return text.replace("$__rate_interval", "2m")


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph or figure."""

    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    is_figure: bool = False
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading; its figures stand before its graphs."""

    title: str
    panels: tuple[Panel, ...]


def selector(extra: str = "") -> str:
    """The dashboard's pools and nodes, and one label more."""
    return SELECTOR[:-1] + f",{extra}}}" if extra else SELECTOR


def gauge(name: str, by: str = "pool, node", extra: str = "") -> str:
    """A gauge summed by labels."""
    return f"sum by ({by}) ({name}{selector(extra)})"


def rate(name: str, by: str = "pool, node", extra: str = "") -> str:
    """A counter's rate summed by labels."""
    return f"sum by ({by}) (rate({name}{selector(extra)}[$__rate_interval]))"


ROWS: tuple[Row, ...] = (
    Row(
        "Overview",
        (
            Panel(
                "Capacity",
                "Bytes of huge pages that the pools hold.",
                Unit.BYTES,
                (Query(f"sum(kvoffload_pool_capacity_bytes{SELECTOR})", "capacity"),),
                is_figure=True,
            ),
            Panel(
                "Used",
                "Bytes of blocks in the pools.",
                Unit.BYTES,
                (Query(f"sum(kvoffload_pool_used_bytes{SELECTOR})", "used"),),
                is_figure=True,
            ),
            Panel(
                "Saved by sharing one copy",
                "Bytes that one part for each rank would have stored beside those that were.",
                Unit.BYTES,
                (Query(f"sum(kvoffload_deduplicated_bytes_total{SELECTOR})", "saved"),),
                is_figure=True,
            ),
            Panel(
                "Engines",
                "Engines attached, without those that declined offload.",
                Unit.COUNT,
                (Query("sum(kvoffload_engines" + selector('layout!="left-alone"') + ")", "engines"),),
                is_figure=True,
            ),
        ),
    ),
    Row(
        "Hits",
        (
            Panel(
                "Hit ratio",
                "Share of the looked-up keys that were there.",
                Unit.RATIO,
                (
                    Query(
                        rate("kvoffload_lookups_total", extra='result="hit"') + " / " + rate("kvoffload_lookups_total"),
                        "{{pool}} {{node}}",
                    ),
                ),
            ),
            Panel(
                "Look-ups",
                "Keys looked up.",
                Unit.PER_SECOND,
                (Query(rate("kvoffload_lookups_total", by="result"), "{{result}}"),),
                stacked=True,
            ),
            Panel(
                "Stored and loaded",
                "Bytes that engines stored in the pools and loaded from them.",
                Unit.BYTES_PER_SECOND,
                (
                    Query(rate("kvoffload_stored_bytes_total"), "stored {{pool}} {{node}}"),
                    Query(rate("kvoffload_loaded_bytes_total"), "loaded {{pool}} {{node}}"),
                ),
            ),
            Panel(
                "Hits on what another engine stored",
                "What sharing between engines is worth.",
                Unit.PER_SECOND,
                (Query(rate("kvoffload_cross_engine_hits_total"), "{{pool}} {{node}}"),),
            ),
        ),
    ),
    Row(
        "Memory",
        (
            Panel(
                "Used by tenant",
                "Bytes of each sharing scope.",
                Unit.BYTES,
                (Query(gauge("kvoffload_pool_used_bytes", by="tenant"), "{{tenant}}"),),
                stacked=True,
            ),
            Panel(
                "Free",
                "Bytes that can be stored to without evicting.",
                Unit.BYTES,
                (Query(gauge("kvoffload_pool_free_bytes"), "{{pool}} {{node}}"),),
            ),
            Panel(
                "Evicted",
                "Bytes given up for others.",
                Unit.BYTES_PER_SECOND,
                (Query(rate("kvoffload_evicted_bytes_total", by="reason"), "{{reason}}"),),
            ),
            Panel(
                "Slots",
                "Slots by state.",
                Unit.COUNT,
                (Query(gauge("kvoffload_slots", by="state", extra='state!="leased"'), "{{state}}"),),
                stacked=True,
            ),
            Panel(
                "Leased slots",
                "Ready slots that engines are reading, which are not evicted meanwhile.",
                Unit.COUNT,
                (Query(gauge("kvoffload_slots", extra='state="leased"'), "{{pool}} {{node}}"),),
            ),
            Panel(
                "Huge pages of the node",
                "Pages of the pool's size, as the kernel counts them.",
                Unit.COUNT,
                (Query(gauge("kvoffload_hugepages", by="node, state"), "{{node}} {{state}}"),),
            ),
        ),
    ),
    Row(
        "Engines",
        (
            Panel(
                "Engines by layout",
                "Replicated: one copy for all ranks. Pending: not all have attached. Left-alone: declined offload.",
                Unit.COUNT,
                (Query(gauge("kvoffload_engines", by="layout"), "{{layout}}"),),
                stacked=True,
            ),
            Panel(
                "Attachers",
                "1 on every node; 0: no new pod is attached there.",
                Unit.COUNT,
                (Query(gauge("kvoffload_attachers"), "{{pool}} {{node}}"),),
            ),
            Panel(
                "Time for one message",
                "99 of 100 messages of engines are answered within it.",
                Unit.SECONDS,
                (
                    Query(
                        "histogram_quantile(0.99, "
                        + rate("kvoffload_request_duration_seconds_bucket", by="operation, le")
                        + ")",
                        "{{operation}}",
                    ),
                ),
            ),
            Panel(
                "Missed deadlines",
                "Share of the schedulers' steps that went on without the daemon's answer.",
                Unit.RATIO,
                (
                    Query(
                        rate("kvoffload_missed_deadlines_total") + " / " + rate("kvoffload_scheduler_steps_total"),
                        "{{pool}} {{node}}",
                    ),
                ),
            ),
            Panel(
                "Failed transfers",
                "Loads and stores that failed; a failed load is computed instead.",
                Unit.PER_SECOND,
                (Query(rate("kvoffload_failed_transfers_total", by="direction"), "{{direction}}"),),
            ),
            Panel(
                "Refusals",
                "Engines and requests that daemons refused, by reason.",
                Unit.PER_SECOND,
                (Query(rate("kvoffload_refusals_total", by="reason"), "{{reason}}"),),
            ),
        ),
    ),
    Row(
        "Cluster",
        (
            Panel(
                "Nodes by state",
                "Nodes that match a pool's selector.",
                Unit.COUNT,
                (Query('sum by (pool, state) (kvoffload_operator_pool_nodes{pool=~"$pool"})', "{{pool}} {{state}}"),),
            ),
            Panel(
                "Operator and webhook",
                "1: a replica of the operator leads; new pods are injected.",
                Unit.COUNT,
                (
                    Query("sum(kvoffload_operator_leader)", "leads"),
                    Query("max(kvoffload_operator_injection_ready)", "injects"),
                ),
            ),
            Panel(
                "Admission",
                "Pods that the webhook looked at, by what it did.",
                Unit.PER_SECOND,
                (
                    Query(
                        "sum by (result) (rate(kvoffload_operator_injections_total[$__rate_interval]))",
                        "{{result}}",
                    ),
                ),
            ),
            Panel(
                "Labelled pods without offload",
                "`kubectl kvoffload doctor` names them.",
                Unit.COUNT,
                (Query("sum by (reason) (kvoffload_operator_unattached_pods)", "{{reason}}"),),
            ),
        ),
    ),
)
PANELS: tuple[Panel, ...] = tuple(panel for row in ROWS for panel in row.panels)


def dashboard_queries() -> list[tuple[str, str]]:
    """Every query of the dashboard as (panel's title, PromQL that a Prometheus can run as it is)."""
    return [(panel.title, query.resolved()) for panel in PANELS for query in panel.queries]
