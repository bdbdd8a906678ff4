"""What of each object goes into the bundle. Pure: an object in, what is kept of it out.

Everything is named that is kept, so that what others put into our objects or their own stays at home: no environment
variable but ours, no argument, no annotation of others, no Secret, no key in a certificate bundle.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import Certificate

from kvoffload.api import keys
from kvoffload.api.pool import KVOffloadPool
from kvoffload_cli.facts import NodeFacts
from kvoffload_cli.observe_pods import opted_in_pod
from kvoffload_cli.observe_release import trusted_authorities

Manifest = Mapping[str, Any]
Kept = dict[str, Any]

OF_RELEASE = ("app.kubernetes.io", "helm.sh", "meta.helm.sh")
OF_CONTROLLERS = ("controller-revision-hash", "pod-template-generation", "pod-template-hash")
METADATA = (
    *("name", "namespace", "uid", "generation", "creationTimestamp", "deletionTimestamp", "finalizers"),
    "ownerReferences",
)
CONTAINER = (
    *("name", "image", "imagePullPolicy", "resources", "ports", "securityContext", "volumeMounts"),
    *("readinessProbe", "livenessProbe", "startupProbe"),
)
POD = (
    *("nodeName", "nodeSelector", "tolerations", "affinity", "priorityClassName", "serviceAccountName"),
    *("securityContext", "terminationGracePeriodSeconds"),
)
POD_STATUS = (
    *("phase", "reason", "message", "conditions", "startTime", "qosClass"),
    *("initContainerStatuses", "containerStatuses"),
)
WORKLOAD = ("replicas", "selector", "strategy", "updateStrategy", "minReadySeconds")
WEBHOOK = (
    *("name", "failurePolicy", "timeoutSeconds", "sideEffects", "reinvocationPolicy", "matchPolicy", "rules"),
    *("namespaceSelector", "objectSelector", "matchConditions"),
)
EVENT = (
    *("involvedObject", "type", "reason", "message", "count", "series", "firstTimestamp", "lastTimestamp"),
    *("eventTime", "source", "reportingComponent"),
)
OF_SITE = "KVOFFLOAD_NODE_POD_ANNOTATIONS"
"""Our variable with others' annotations in it."""


def keep(source: Manifest, fields: Iterable[str]) -> Kept:
    """These fields of an object, as far as it has them."""
    return {field: source[field] for field in fields if field in source}


def is_ours(key: str) -> bool:
    """Whether a label or annotation is ours, the release's or a controller's."""
    return is_of_group(key) or key.partition("/")[0] in (*OF_RELEASE, *OF_CONTROLLERS)


def is_of_group(key: str) -> bool:
    """Whether a label or annotation is in our API group, or below it."""
    return f".{key.partition('/')[0]}".endswith(f".{keys.GROUP}")


def kept_metadata(metadata: Manifest) -> Kept:
    """Who it is, whose it is, and our labels and annotations."""
    kept = keep(metadata, METADATA)
    for field in ("labels", "annotations"):
        kept[field] = {key: value for key, value in (metadata.get(field) or {}).items() if is_ours(key)}
    return kept


def kept_resource(manifest: Manifest) -> Kept:
    """A pool or region: all of it is ours."""
    return {"metadata": kept_metadata(manifest["metadata"]), **keep(manifest, ("spec", "status"))}


def kept_workload(manifest: Manifest) -> Kept:
    """A Deployment or DaemonSet of the release."""
    spec, template = manifest["spec"], manifest["spec"].get("template", {})
    return {
        "metadata": kept_metadata(manifest["metadata"]),
        "spec": keep(spec, WORKLOAD) | {"template": kept_pod_spec(template.get("spec", {}))},
        "status": manifest.get("status", {}),
    }


def kept_pod(manifest: Manifest) -> Kept:
    """A pod of the release."""
    return {
        "metadata": kept_metadata(manifest["metadata"]),
        "spec": kept_pod_spec(manifest["spec"]),
        "status": keep(manifest.get("status", {}), POD_STATUS),
    }


def kept_pod_spec(spec: Manifest) -> Kept:
    """Containers without arguments and others' variables, volumes without what others' drivers are told."""
    kept = keep(spec, POD)
    for field in ("initContainers", "containers"):
        if field in spec:
            kept[field] = [
                keep(container, CONTAINER) | {"env": kept_environment(container)} for container in spec[field]
            ]
    kept["volumes"] = [keep(volume, ("name", "hostPath", "emptyDir")) for volume in spec.get("volumes", [])]
    return kept


def kept_environment(container: Manifest) -> dict[str, str]:
    """Our variables that have a literal value."""
    return {
        variable["name"]: variable["value"]
        for variable in container.get("env", [])
        if variable["name"].startswith("KVOFFLOAD_") and "value" in variable and variable["name"] != OF_SITE
    }


def kept_engine_pod(manifest: Manifest) -> Kept:
    """A user's labelled pod: what doctor asks of it, our annotations and our variables, and nothing else of theirs."""
    annotations = manifest["metadata"].get("annotations") or {}
    return asdict(opted_in_pod(manifest)) | {
        "annotations": {key: value for key, value in annotations.items() if key.startswith(f"{keys.GROUP}/")},
        "environment": {
            container["name"]: found
            for container in manifest["spec"].get("containers", [])
            if (found := kept_environment(container))
        },
    }


def kept_configuration(manifest: Manifest) -> Kept:
    """A webhook configuration; of its certificates who they are, not the bundle."""
    return {
        "metadata": kept_metadata(manifest["metadata"]),
        "webhooks": [
            keep(webhook, WEBHOOK)
            | {
                "service": webhook["clientConfig"].get("service", {}),
                "authorities": kept_certificates(trusted_authorities(webhook)),
            }
            for webhook in manifest.get("webhooks", [])
        ],
    }


def kept_certificates(certificates: Iterable[Certificate]) -> list[Kept]:
    """Name, validity and fingerprint of each certificate."""
    return [
        {
            "subject": one.subject.rfc4514_string(),
            "notBefore": one.not_valid_before_utc,
            "notAfter": one.not_valid_after_utc,
            "sha256": hashlib.sha256(one.public_bytes(Encoding.DER)).hexdigest(),
        }
        for one in certificates
    ]


def kept_crd(manifest: Manifest) -> Kept:
    """Which versions a CRD serves and stores."""
    versions = manifest["spec"].get("versions", [])
    return {
        "metadata": kept_metadata(manifest["metadata"]),
        "versions": [keep(version, ("name", "served", "storage")) for version in versions],
        "status": keep(manifest.get("status", {}), ("conditions", "storedVersions")),
    }


def kept_event(manifest: Manifest) -> Kept:
    """What happened to which object."""
    return keep(manifest, EVENT)


def kept_node(node: NodeFacts, pools: Iterable[KVOffloadPool]) -> Kept:
    """What doctor asks of a node: its pages, whether it is ready, and the labels that pools select by or are ours."""
    asked = {key for pool in pools for key in pool.spec.node_selector}
    labels = {key: value for key, value in node.labels.items() if key in asked or is_of_group(key)}
    return asdict(node) | {"labels": labels}
