"""LeaderWorkerSet's own manager, built for the long test of its example, tests/e2e/test_leader_worker_set.py.

Its chart is in the same Go module; the build takes 2 to 5 min on two cores.
"""

from pathlib import Path

from hack.cluster.programs import GoProgram, download_module
from hack.foreign_crds import LEADER_WORKER_SET

PROGRAM = GoProgram(
    name="leader-worker-set",
    version=LEADER_WORKER_SET[1],
    module=LEADER_WORKER_SET[0],
    packages=(f"{LEADER_WORKER_SET[0]}/cmd",),
    binaries=("lws-manager",),
)


def leader_worker_set_chart() -> Path:
    """Its helm chart: CRDs, roles, webhook configurations."""
    return download_module(*LEADER_WORKER_SET) / "charts" / "lws"
