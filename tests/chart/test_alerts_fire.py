"""The chart's rules and the dashboard's queries in a real Prometheus, which scrapes what this test shows it."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_rendering import render
from hack.console import wait_until
from hack.demo.discovery import pod_monitor_job
from hack.demo.prometheus import Prometheus, running_prometheus
from hack.docs.panels import dashboard_queries
from kvoffload_operator import metrics

TIMEOUT_SECONDS = 60
ERRORS = 'kvoffload_operator_injections_total{result="error"}'


class Target:
    """A pod that is operator and webhook at once: it shows what our own registry renders, or nothing."""

    def __init__(self) -> None:
        target = self
        self.is_up = True

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if target.is_up else 503)
                self.end_headers()
                self.wfile.write(metrics.render() if target.is_up else b"")

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def pods(self, **_: str) -> list[dict[str, Any]]:
        """As `Kubernetes.pods` gives them."""
        labels = {"app.kubernetes.io/name": "kvoffload", "app.kubernetes.io/component": "operator"}
        container = {"name": "operator", "ports": [{"name": "metrics", "containerPort": self.server.server_port}]}
        return [
            {
                "metadata": {"name": "operator-0", "namespace": "ns", "uid": "u", "labels": labels},
                "spec": {"nodeName": "n", "containers": [container]},
                "status": {"phase": "Running", "podIP": "127.0.0.1", "hostIP": "127.0.0.1"},
            }
        ]


@pytest.fixture
def target() -> Iterator[Target]:
    metrics.begin_injections()
    metrics.is_leader.set(1)
    metrics.injection_ready.set(1)
    found = Target()
    yield found
    found.server.shutdown()
    found.server.server_close()
    for gauge in (metrics.is_leader, metrics.injection_ready):
        gauge.set(0)
    metrics.pool_nodes.clear()
    metrics.pool_active.clear()


@pytest.fixture
def prometheus(helm: str, target: Target, tmp_path: Path) -> Iterator[Prometheus]:
    rules = yaml.safe_load((Path(__file__).parents[2] / "charts/kvoffload/rules/kvoffload.yaml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    short = [f"monitoring.prometheusRule.alerts.{alert}.for=1s" for alert in alerts]
    rendered = render(helm, "monitoring.prometheusRule.enabled=true", "monitoring.podMonitor.enabled=true", *short)
    (rule,), (monitor,) = rendered["PrometheusRule"], rendered["PodMonitor"]
    rules, job = yaml.safe_dump(rule["spec"]), pod_monitor_job(monitor)
    with running_prometheus(target, tmp_path, rules=rules, job=job) as running:  # type: ignore[arg-type]
        wait_until("the first scrape", lambda: running.query(ERRORS) != [], timeout_seconds=TIMEOUT_SECONDS)
        yield running


def test_alerts_fire_on_short_nodes_the_webhooks_first_error_and_an_operator_that_is_gone(
    prometheus: Prometheus, target: Target
) -> None:
    def wait_firing(alert: str) -> list[dict[str, str]]:
        wait_until(
            f"{alert} to fire",
            lambda: prometheus.firing(alert) != [],
            timeout_seconds=TIMEOUT_SECONDS,
            explain=lambda: f"alerts: {prometheus.query('ALERTS')}",
            log=prometheus.log,
        )
        return prometheus.firing(alert)

    assert not prometheus.firing("KVOffloadInjectionErrors")
    metrics.pool_active.labels(pool="p").set(1)
    for state, count in {"matching": 2, "ready": 0, "short_of_pages": 2}.items():
        metrics.pool_nodes.labels(pool="p", state=state).set(count)
    metrics.injections_total.labels(result="error", reason="").inc()
    (short,) = wait_firing("KVOffloadNodesShortOfPages")
    assert short["pool"] == "p"
    wait_firing("KVOffloadPoolNotReady")
    wait_firing("KVOffloadInjectionErrors")
    assert not prometheus.firing("KVOffloadOperatorDown")
    metrics.injection_ready.set(0)
    wait_firing("KVOffloadWebhookDown")
    target.is_up = False
    wait_firing("KVOffloadOperatorDown")
    assert not prometheus.firing("KVOffloadWebhookDown")


def test_prometheus_understands_every_query_of_the_dashboard(prometheus: Prometheus) -> None:
    """That they return data is the end-to-end test's; here those of the operator do."""
    answers = {query: prometheus.query(query) for _, query in dashboard_queries()}
    assert answers["sum(kvoffload_operator_leader)"] == [({}, 1.0)]
