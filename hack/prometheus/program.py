"""Prometheus with its discovery of Kubernetes' pods, and what the Prometheus operator makes of a PodMonitor.

Built by the long test tests/e2e/test_discovery.py, which holds the demo's stand-ins against them: Debian's Prometheus
is built without that discovery. Together the builds take 5 min on two cores.
"""

from pathlib import Path

from hack.cluster.programs import GoProgram
from hack.foreign_crds import PROMETHEUS_OPERATOR

PROMETHEUS = GoProgram(
    name="prometheus",
    version="0.316.0",
    module="github.com/prometheus/prometheus",
    packages=("github.com/prometheus/prometheus/cmd/prometheus",),
    binaries=("prometheus",),
    tags="remove_all_sd enable_kubernetes_sd",
)
SCRAPE_CONFIGURATION = GoProgram(
    name="scrape-configuration",
    version=PROMETHEUS_OPERATOR[1],
    module=PROMETHEUS_OPERATOR[0],
    packages=(),
    binaries=("scrape-configuration",),
    main=Path(__file__).with_name("main.go"),
)
