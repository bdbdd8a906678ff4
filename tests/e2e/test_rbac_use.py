"""The chart grants what is used and nothing else: its roles beside the audit logs of this very run. Runs last.

The logs are the local cluster's, where pods run under these roles, and the one of the operator tests' API server, where
processes do (nodes that go, certificates that rotate, leaders that die).
"""

from pathlib import Path

import pytest

from e2e.control_plane import ControlPlane, render_chart
from e2e.rbac_use import Permission, find_granted, find_refused, find_used, read_events
from hack.demo.installation import NAMESPACE
from hack.demo.run import Bench

pytestmark = [pytest.mark.e2e, pytest.mark.runs_last]

UNUSED: dict[Permission, str] = {}
"""What is granted and not used in a run, with the reason."""
SIBLINGS = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {"test_operator_scale.py"}
"""Test files that every whole run has; a thousand nodes are only in the long form."""


def test_no_request_of_ours_was_refused_on_the_cluster(release: Bench, release_asked_at: float) -> None:
    events = read_events(release.kubernetes.settings.audit_log, namespace=NAMESPACE, since=release_asked_at)
    assert events, "the log has requests of ours"
    assert find_refused(events, namespace=NAMESPACE) == []


def test_every_verb_that_the_chart_grants_was_used(
    request: pytest.FixtureRequest, release: Bench, release_asked_at: float, control_plane: ControlPlane
) -> None:
    missing = SIBLINGS - {item.path.name for item in request.session.items}
    if missing:
        pytest.skip(f"needs a whole `make test-e2e`; this run leaves out {', '.join(sorted(missing))}")
    events = read_events(release.kubernetes.settings.audit_log, namespace=NAMESPACE, since=release_asked_at)
    events += read_events(control_plane.folder / "audit.log", namespace=NAMESPACE)
    granted = find_granted(render_chart())
    unused = granted - find_used(events, namespace=NAMESPACE) - set(UNUSED)
    assert sorted(map(str, unused)) == []
    assert set(UNUSED) <= granted, "the list of reasons names what is not granted any more"
