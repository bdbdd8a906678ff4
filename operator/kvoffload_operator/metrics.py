"""Prometheus metrics of operator and webhook; a leaf: nobody below imports it, the edges count here.

A series that begins with the first event shows no increase to Prometheus: what alerts look at is there from the start,
as 0 (`begin_injections`, `begin_reconciliations`).
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvoffload import __version__
from kvoffload.api.keys import SkipReason

registry = CollectorRegistry()

_build_info = Gauge("kvoffload_operator_build_info", "1, with the version as label", ["version"], registry=registry)
_build_info.labels(version=__version__).set(1)

injections_total = Counter(
    "kvoffload_operator_injections",
    "Admission requests about pods by result (injected, unchanged, skipped, error, invalid), the skipped by reason",
    ["result", "reason"],
    registry=registry,
)
unread_command_lines_total = Counter(
    "kvoffload_operator_unread_command_lines",
    "Pods whose command lines, with variables put in, are too long to be read to their end: the engine decides alone",
    registry=registry,
)
pool_validations_total = Counter(
    "kvoffload_operator_pool_validations",
    "Admission requests about pools by result (allowed, refused, error, invalid)",
    ["result"],
    registry=registry,
)
admission_duration_seconds = Histogram(
    "kvoffload_operator_admission_duration_seconds",
    "Time to answer an admission request",
    ["webhook"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    registry=registry,
)
reconcile_duration_seconds = Histogram(
    "kvoffload_operator_reconcile_duration_seconds",
    "Time of one reconciliation",
    ["kind"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0),
    registry=registry,
)
reconcile_errors_total = Counter(
    "kvoffload_operator_reconcile_errors",
    "Passes that failed and are tried again, of a pool or pod, or of a task for all",
    ["kind"],
    registry=registry,
)
unexpected_errors_total = Counter(
    "kvoffload_operator_unexpected_errors",
    "Errors that no task of the operator expects (pool, pod, resync, webhook, sweep): each is logged and tried again",
    ["task"],
    registry=registry,
)
unattached_pods = Gauge(
    "kvoffload_operator_unattached_pods",
    "Running opted-in pods that were not injected, or none of whose engines has spoken to a daemon, by reason",
    ["reason"],
    registry=registry,
)
pool_nodes = Gauge(
    "kvoffload_operator_pool_nodes",
    "Nodes of a pool by state, as in its status: matching, and of these ready, short_of_pages, pending ...",
    ["pool", "state"],
    registry=registry,
)
pool_active = Gauge(
    "kvoffload_operator_pool_active",
    "1 where the pool's mode is Active; 0: Observe or Paused, it serves nobody because it was told so",
    ["pool"],
    registry=registry,
)
pool_degraded = Gauge(
    "kvoffload_operator_pool_degraded",
    "Why a pool's condition Degraded is True: nodes whose regions are, by their reason, or 1 for the pool's own reason",
    ["pool", "reason"],
    registry=registry,
)
injection_ready = Gauge(
    "kvoffload_operator_injection_ready",
    "1 where this replica is the leader and finds that new pods are injected, as in the condition InjectionReady",
    registry=registry,
)
api_writes_total = Counter(
    "kvoffload_operator_api_writes", "Writes that the API server accepted since the start", registry=registry
)
is_leader = Gauge("kvoffload_operator_leader", "1 where this replica reconciles", registry=registry)
certificate_expiry_timestamp_seconds = Gauge(
    "kvoffload_operator_certificate_expiry_timestamp_seconds",
    "End of the validity of the certificate that this webhook serves; 0 where it serves none",
    registry=registry,
)
certificate_validity_seconds = Gauge(
    "kvoffload_operator_certificate_validity_seconds",
    "How long that certificate is valid in all; 0 where it serves none",
    registry=registry,
)


def begin_injections() -> None:
    """Show every result as 0; for the webhook, at its start."""
    for result in ("allowed", "refused", "error", "invalid"):
        pool_validations_total.labels(result=result)
    for result in ("injected", "unchanged", "error", "invalid"):
        injections_total.labels(result=result, reason="")
    for reason in SkipReason:
        injections_total.labels(result="skipped", reason=reason)


def begin_reconciliations() -> None:
    """Show every kind's errors as 0; for the operator, at its start."""
    for task in ("pool", "pod", "resync", "webhook", "sweep"):
        unexpected_errors_total.labels(task=task)
        reconcile_errors_total.labels(kind=task)


def render() -> bytes:
    """The text of /metrics."""
    return generate_latest(registry)
