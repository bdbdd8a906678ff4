"""The chart grants what is used and nothing else: its roles beside the audit log of this very run. Runs last."""

import re
from pathlib import Path

import pytest

from e2e.control_plane import render_chart
from e2e.rbac_use import (
    CLUSTER,
    RELEASE_NAMESPACE,
    Event,
    Permission,
    find_granted,
    find_refused,
    find_used,
    read_events,
)
from hack.demo.installation import NAMESPACE
from hack.demo.run import Stage
from kvoffload.api.keys import GROUP, REGION_PLURAL

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.runs_last]

USED_ELSEWHERE = {
    Permission("kvoffload-operator", CLUSTER, GROUP, REGION_PLURAL, "delete"): (
        "a node that goes takes its region along: test_operator_reconcile.py, for the cluster has one node"
    ),
    Permission("kvoffload-operator", RELEASE_NAMESPACE, "", "secrets", "patch", "kvoffload-webhook-tls"): (
        "certificates are renewed after two thirds of their days: test_operator_webhook.py"
    ),
    Permission("kvoffload-node", CLUSTER, "", "namespaces", "get"): (
        "pools with a namespaceSelector: test_node_api.py, with the daemon's token"
    ),
}
"""What no test on this cluster uses, and what does, on a control plane of its own and with the chart's roles."""
ON_THE_CLUSTER = re.compile(r"^pytestmark = .*\bcluster\b(?!.*\blong\b)", flags=re.MULTILINE)
SIBLINGS = {path.name for path in Path(__file__).parent.glob("test_*.py") if ON_THE_CLUSTER.search(path.read_text())}


@pytest.fixture(scope="module")
def events(release: Stage, release_asked_at: float) -> list[Event]:
    """What our service accounts asked the API server for in this run."""
    found = read_events(release.kubernetes.settings.audit_log, namespace=NAMESPACE, since=release_asked_at)
    assert found, f"{release.kubernetes.settings.audit_log} has requests of ours"
    return found


def test_no_request_of_ours_was_refused(events: list[Event]) -> None:
    assert find_refused(events, namespace=NAMESPACE) == []


def test_every_verb_that_the_chart_grants_was_used(request: pytest.FixtureRequest, events: list[Event]) -> None:
    missing = SIBLINGS - {item.path.name for item in request.session.items}
    if missing:
        pytest.skip(f"needs a whole `make test-e2e`; this run leaves out {', '.join(sorted(missing))}")
    granted, used = find_granted(render_chart()), find_used(events, namespace=NAMESPACE)
    assert sorted(map(str, granted - used - set(USED_ELSEWHERE))) == []
    assert set(USED_ELSEWHERE) <= granted, "what is not granted needs no reason"
