"""The dashboard's panels: title, queries, unit.

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


def gauge(name: str, by: str = "pool, node") -> str:
    """A gauge summed by labels."""
    return f"sum by ({by}) ({name}{SELECTOR})"


def rate(name: str, by: str = "pool, node", extra: str = "") -> str:
    """A counter's rate summed by labels."""
    selector = SELECTOR if not extra else SELECTOR[:-1] + f",{extra}}}"
    return f"sum by ({by}) (rate({name}{selector}[$__rate_interval]))"


PANELS: tuple[Panel, ...] = (
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
        "Engines attached.",
        Unit.COUNT,
        (Query(f"sum(kvoffload_engines{SELECTOR})", "engines"),),
        is_figure=True,
    ),
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
        (Query(f"{rate('kvoffload_evicted_bytes_total', by='reason')} or vector(0)", "{{reason}}"),),
    ),
    Panel(
        "Engines by layout",
        "Replicated: one copy for all ranks. Pending: not all ranks have attached.",
        Unit.COUNT,
        (Query(gauge("kvoffload_engines", by="layout"), "{{layout}}"),),
        stacked=True,
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
        "Huge pages of the node",
        "Pages of the pool's size, as the kernel counts them.",
        Unit.COUNT,
        (Query(gauge("kvoffload_hugepages", by="node, state"), "{{node}} {{state}}"),),
    ),
    Panel(
        "Slots",
        "Slots by state.",
        Unit.COUNT,
        (Query(gauge("kvoffload_slots", by="state"), "{{state}}"),),
        stacked=True,
    ),
    Panel(
        "Admission",
        "Pods that the webhook looked at, by what it did.",
        Unit.PER_SECOND,
        (
            Query(
                "sum by (result) (rate(kvoffload_operator_injections_total[$__rate_interval])) or vector(0)",
                "{{result}}",
            ),
        ),
    ),
    Panel(
        "Labelled pods without offload",
        "`kubectl kvoffload doctor` names them.",
        Unit.COUNT,
        (Query("sum by (reason) (kvoffload_operator_unattached_pods) or vector(0)", "{{reason}}"),),
    ),
    Panel(
        "Nodes by state",
        "Nodes that match a pool's selector.",
        Unit.COUNT,
        (Query('sum by (pool, state) (kvoffload_operator_pool_nodes{pool=~"$pool"})', "{{pool}} {{state}}"),),
    ),
)


def dashboard_queries() -> list[tuple[str, str]]:
    """Every query of the dashboard as (panel's title, PromQL that a Prometheus can run as it is)."""
    return [(panel.title, query.resolved()) for panel in PANELS for query in panel.queries]
