"""What operator and webhook expose: names and labels pinned, and series that alerts look at there before an event."""

import subprocess

import pytest
from prometheus_client.metrics import MetricWrapperBase

from golden_files import assert_golden
from kvoffload.api.conditions import Condition, RegionReason
from kvoffload.api.keys import SkipReason
from kvoffload.api.pool import KVOffloadPoolStatus
from kvoffload.api.region import KVOffloadRegion
from kvoffload_operator import metrics
from kvoffload_operator.resources.region import build_region, build_region_spec
from kvoffload_operator.status import count_degradations
from operator_builders import NOW, spec_of


def test_names_types_and_labels_are_those_of_the_golden_file() -> None:
    lines = []
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            name = family.name + ("_total" if family.type == "counter" else "")
            lines.append(f"{name}{{{','.join(metric._labelnames)}}} {family.type}: {family.documentation}")
    assert_golden("\n".join(sorted(lines)) + "\n", "operator-metrics.txt")


def test_promtool_finds_no_fault() -> None:
    metrics.begin_injections()
    metrics.begin_reconciliations()
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_alerts_count_is_there_before_the_first_event() -> None:
    metrics.begin_injections()
    metrics.begin_reconciliations()
    shown = {line.rpartition(" ")[0] for line in metrics.render().decode().splitlines()}
    name = "kvoffload_operator_injections_total"
    assert {
        f'{name}{{reason="",result="{result}"}}' for result in ("injected", "unchanged", "error", "invalid")
    } <= shown
    assert {f'{name}{{reason="{reason}",result="skipped"}}' for reason in SkipReason} <= shown
    tasks = ("pool", "pod", "resync", "webhook", "sweep")
    assert {f'kvoffload_operator_reconcile_errors_total{{kind="{task}"}}' for task in tasks} <= shown


def degraded(status: str, reason: str) -> dict[str, object]:
    condition = Condition(
        type="Degraded", status=status, observed_generation=1, last_transition_time=NOW, reason=reason, message="m"
    )
    return {"conditions": [condition.to_manifest()]}


def region(node: str, status: str, reason: str) -> KVOffloadRegion:
    manifest = build_region("main", "uid-main", build_region_spec("main", node, spec_of()))
    manifest["metadata"] |= {"uid": node, "generation": 1}
    return KVOffloadRegion.from_manifest({**manifest, "status": degraded(status, reason)})


@pytest.mark.parametrize(
    ("condition", "counts"),
    [
        (("True", "RegionsDegraded"), {RegionReason.ATTACHER_MISSING: 2, RegionReason.SHRINK_WAITS: 1}),
        (("True", "OverlapsAnotherPool"), {"OverlapsAnotherPool": 1}),
        (("False", "AsAsked"), {}),
    ],
)
def test_degradations_are_counted_by_the_reason_that_an_alert_can_tell_apart(
    condition: tuple[str, str], counts: dict[str, int]
) -> None:
    regions = [
        region("n1", "True", RegionReason.ATTACHER_MISSING),
        region("n2", "True", RegionReason.SHRINK_WAITS),
        region("n3", "True", RegionReason.ATTACHER_MISSING),
        region("n4", "False", RegionReason.AS_ASKED),
    ]
    assert count_degradations(KVOffloadPoolStatus.model_validate(degraded(*condition)), regions) == counts
    assert count_degradations(KVOffloadPoolStatus(), regions) == {}
