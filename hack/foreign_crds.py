"""Other projects' CustomResourceDefinitions of the kinds in our chart and examples, from those projects' Go modules.

Used by hack/chart.py, which writes JSON schemas of them, and by the end-to-end tests, which apply them. The largest
module, KServe's, is 40 MB to download and 220 MB in Go's cache, once for each version.
"""

from pathlib import Path

from hack.cluster.programs import download_module

CERT_MANAGER = ("github.com/cert-manager/cert-manager", "1.21.2")
PROMETHEUS_OPERATOR = ("github.com/prometheus-operator/prometheus-operator", "0.85.0")
LEADER_WORKER_SET = ("sigs.k8s.io/lws", "0.9.0")
KSERVE = ("github.com/kserve/kserve", "0.17.0")
"""Module and version."""
FOREIGN_CRDS = {
    "Certificate": (CERT_MANAGER, "deploy/crds/cert-manager.io_certificates.yaml"),
    "PodMonitor": (PROMETHEUS_OPERATOR, "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"),
    "PrometheusRule": (
        PROMETHEUS_OPERATOR,
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
    "LeaderWorkerSet": (LEADER_WORKER_SET, "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"),
    "InferenceService": (KSERVE, "config/crd/full/serving.kserve.io_inferenceservices.yaml"),
}
"""Of each kind the module, and the file in it."""
VERSIONS = "-".join(dict.fromkeys(module[1] for module, _ in FOREIGN_CRDS.values()))
"""Part of the name of what is made of all of them."""


def find_foreign_crd(kind: str) -> Path:
    """Return the file of a kind's CustomResourceDefinition; its module is downloaded once, into Go's own cache."""
    module, file = FOREIGN_CRDS[kind]
    return download_module(*module) / file
