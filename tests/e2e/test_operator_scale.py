"""1,000 fake nodes (kwok) on a real API server: how long a pool takes, with how much memory, and the quiet afterwards.

The daemons' reports are written by this script. The figures are printed and written to `build/operator-scale.json`.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.control_plane import ControlPlane, install_chart, region_report, running_control_plane, wait_until
from e2e.operator_pools import pool_manifest
from e2e.operator_process import OperatorProcess, running_operator
from hack.cache import REPOSITORY
from hack.cluster.programs import GoProgram, build_program
from kvoffload_operator.kube import NODES, REGIONS, KubeClient

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM_NODES = 1000
KWOK = GoProgram(
    name="kwok", version="0.8.0", module="sigs.k8s.io/kwok", packages=("sigs.k8s.io/kwok/cmd/kwok",), binaries=("kwok",)
)
STAGES = """\
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: node-initialize}
spec:
  # kwok manages pods only where it has a stage for their nodes; ours are Ready when they are made
  resourceRef: {apiGroup: v1, kind: Node}
  selector:
    matchExpressions:
    - {key: '.status.conditions.[] | select( .type == "Ready" ) | .status', operator: NotIn, values: ["True"]}
  next:
    statusTemplate: |
      phase: Running
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-ready}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: DoesNotExist}
    - {key: .status.podIP, operator: DoesNotExist}
  next:
    statusTemplate: |
      {{ $now := Now }}
      conditions:
      - {lastTransitionTime: {{ $now | Quote }}, status: "True", type: Initialized}
      - {lastTransitionTime: {{ $now | Quote }}, status: "True", type: Ready}
      - {lastTransitionTime: {{ $now | Quote }}, status: "True", type: ContainersReady}
      containerStatuses:
      {{ range .spec.containers }}
      - {image: {{ .image | Quote }}, name: {{ .name | Quote }}, ready: true, restartCount: 0, imageID: "", state: {running: {startedAt: {{ $now | Quote }}}}}
      {{ end }}
      phase: Running
      startTime: {{ $now | Quote }}
      podIP: 10.0.0.1
---
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {name: pod-delete}
spec:
  resourceRef: {apiGroup: v1, kind: Pod}
  selector:
    matchExpressions:
    - {key: .metadata.deletionTimestamp, operator: Exists}
  next: {delete: true}
"""  # noqa: E501 -- one container status a line


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("scale")
    if not KWOK.is_built:
        build_program(KWOK, log=folder / "kwok-build.log")
    with running_control_plane(folder) as running:
        install_chart(running)
        (folder / "stages.yaml").write_text(STAGES)
        with (folder / "kwok.log").open("wb") as log:
            kwok = subprocess.Popen(
                [
                    KWOK.folder / "kwok",
                    f"--kubeconfig={running.kubeconfig}",
                    f"--config={folder}/stages.yaml",
                    "--manage-all-nodes=false",
                    "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                    "--node-lease-duration-seconds=0",
                ],
                stdout=log,
                stderr=log,
            )
        running.processes.append(kwok)
        yield running


async def client(plane: ControlPlane) -> KubeClient:
    return await KubeClient.connect(user_agent="scale-test", kubeconfig=str(plane.kubeconfig), connections=16)


async def add_nodes(plane: ControlPlane) -> None:
    kube = await client(plane)
    resources = {"hugepages-2Mi": "256Mi", "cpu": "8", "memory": "64Gi", "pods": "110"}
    slots = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        name = f"fake-{number:04}"
        manifest: dict[str, Any] = {
            "metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}, "labels": {"gpu": "yes"}},
            "spec": {},
        }
        async with slots:
            await kube.create(NODES, manifest)
            status = {
                "allocatable": resources,
                "capacity": resources,
                "conditions": [{"type": "Ready", "status": "True"}],
            }
            await kube.merge_patch(NODES, name, {"status": status}, subresource="status")
            # admission taints new nodes, and the controller that would take that away does not run here
            await kube.merge_patch(NODES, name, {"spec": {"taints": None}})

    try:
        await asyncio.gather(*(one(number) for number in range(NUM_NODES)))
    finally:
        await kube.close()


async def report(plane: ControlPlane, reported: set[str], **status: Any) -> None:
    """Be the daemons: report every region that has not reported yet."""
    kube = await client(plane)
    slots = asyncio.Semaphore(16)

    async def one(region: dict[str, Any]) -> None:
        async with slots:
            manifest = region_report(plane, region, **status)
            await kube.apply(REGIONS, manifest, field_manager="kvoffload-node", subresource="status")
            reported.add(region["metadata"]["name"])

    try:
        regions = await kube.list_all(REGIONS)
        await asyncio.gather(*(one(region) for region in regions if region["metadata"]["name"] not in reported))
    finally:
        await kube.close()


def resident_bytes(operator: OperatorProcess) -> int:
    status = Path(f"/proc/{operator.process.pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def test_a_thousand_nodes_become_ready_within_a_minute_and_then_it_is_quiet(plane: ControlPlane) -> None:
    asyncio.run(add_nodes(plane))
    with running_operator(plane, resync_seconds="3600") as operator:
        started = time.time()
        plane.apply(pool_manifest("scale", nodeSelector={"gpu": "yes"}))
        reported: set[str] = set()
        provisioned = 0.0

        def is_ready() -> bool:
            nonlocal provisioned
            asyncio.run(report(plane, reported))
            if len(reported) == NUM_NODES and not provisioned:
                provisioned = time.time() - started
            pool = plane.get("kvpool", "scale")
            return bool(pool.get("status", {}).get("nodes", {}).get("ready") == NUM_NODES)

        took = wait_until(is_ready, f"{NUM_NODES} nodes to be ready", seconds=600)
        settled_at = time.time()
        time.sleep(75)  # a minute of nothing is what is measured
        calls = plane.audit(user="kvoffload-operator", since=settled_at + 15)
        writes = [event["requestURI"] for event in calls if "/leases/" not in event["requestURI"]]
        changed_at = time.time()
        asyncio.run(report(plane, set(), usedBytes=1 << 20, enginesAttached=1))
        reports_took = time.time() - changed_at
        wait_until(
            lambda: plane.get("kvpool", "scale")["status"]["usedBytes"] == NUM_NODES << 20, "the sums", seconds=120
        )
        figures = {
            "nodes": NUM_NODES,
            "regions_made_seconds": round(provisioned, 1),
            "ready_seconds": round(took, 1),
            "operator_peak_resident_mib": resident_bytes(operator) >> 20,
            "writes_in_a_quiet_minute": len(writes),
            "all_reports_changed_seconds": round(reports_took, 1),
            "sums_after_reports_seconds": round(time.time() - changed_at - reports_took, 1),
            "reconcile_errors": operator.log.read_text().count("again in"),
        }
    print(json.dumps(figures, indent=1))
    target = REPOSITORY / "build" / "operator-scale.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(figures, indent=1) + "\n")
    assert writes == []
    assert figures["ready_seconds"] <= 60
    assert figures["operator_peak_resident_mib"] <= 512
