"""Pure builder of a pool's DaemonSet: daemon and attacher on each node that may give pages.

Called by the pool's reconciler. Paths, environment and ports are the contract of `docs/design/0001-contracts.md`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffload.api.keys import (
    ATTACHER_PORT,
    DAEMON_METRICS_PORT,
    DAEMON_NODE_LABEL_VALUE,
    DAEMON_OF_LABEL,
    daemon_node_label,
    daemonset_name,
)
from kvoffload.api.pool import Fallback, HugetlbfsMount, KVOffloadPoolSpec, PageSize
from kvoffload.units import parse_quantity

Manifest = dict[str, Any]

SPEC_HASH_ANNOTATION = "kvoffload.io/spec-hash"
"""Digest of what was applied: equal means that nothing needs to be written."""

STATE_ROOT = "/var/lib/kvoffload/pools"
MANAGED_MOUNT_ROOT = "/var/lib/kvoffload/mounts"
TERMINATION_GRACE_SECONDS = 60


@dataclass(frozen=True, slots=True)
class DaemonSetOptions:
    """What the chart decides about the DaemonSets."""

    namespace: str
    image: str
    image_pull_policy: str
    image_pull_secrets: tuple[str, ...]
    kubelet_root_dir: str
    hugetlbfs_paths: Mapping[PageSize, str]
    service_account: str
    priority_class: str
    labels: Mapping[str, str]
    """Besides ours, which win."""
    pod_annotations: Mapping[str, str]
    resources: Mapping[str, Mapping[str, str]]
    log_level: str
    owner: Mapping[str, str]
    """The operator's Deployment: `name` and `uid`."""


def build_daemonset(pool: str, spec: KVOffloadPoolSpec, *, capacity_bytes: int, options: DaemonSetOptions) -> Manifest:
    """The DaemonSet of a pool.

    `capacity_bytes` is the pages that each pod asks for: the spec's, or more while a shrinking region still holds them.
    """
    labels = {
        **options.labels,
        "app.kubernetes.io/name": "kvoffload",
        "app.kubernetes.io/component": "node",
        DAEMON_OF_LABEL: pool,
    }
    manifest: Manifest = {
        "metadata": {
            "name": daemonset_name(pool),
            "namespace": options.namespace,
            "labels": labels,
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "name": options.owner["name"],
                    "uid": options.owner["uid"],
                    "controller": False,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "spec": {
            "selector": {"matchLabels": {DAEMON_OF_LABEL: pool}},
            "updateStrategy": {
                "type": "RollingUpdate",
                # a second daemon beside the first would find the pages taken
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "10%"},
            },
            # engines reconnect within seconds; the next node waits for them
            "minReadySeconds": 10,
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod_spec(pool, spec, capacity_bytes=capacity_bytes, options=options),
            },
        },
    }
    if options.pod_annotations:
        manifest["spec"]["template"]["metadata"]["annotations"] = dict(options.pod_annotations)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]
    manifest["metadata"]["annotations"] = {SPEC_HASH_ANNOTATION: digest}
    return manifest


def _pod_spec(pool: str, spec: KVOffloadPoolSpec, *, capacity_bytes: int, options: DaemonSetOptions) -> Manifest:
    on_hugetlbfs = spec.fallback is Fallback.NONE
    managed = on_hugetlbfs and spec.hugetlbfs_mount is HugetlbfsMount.MANAGED
    mount = f"{MANAGED_MOUNT_ROOT}/{spec.page_size.value}" if managed else options.hugetlbfs_paths[spec.page_size]
    hugepages: Manifest
    if on_hugetlbfs:
        hugepages = {"name": "hugepages", "hostPath": {"path": mount, "type": ""}}
    else:
        hugepages = {"name": "hugepages", "emptyDir": {"medium": "Memory", "sizeLimit": str(capacity_bytes)}}
    daemon_resources: Manifest = {kind: dict(values) for kind, values in options.resources.items()}
    if on_hugetlbfs:
        for kind in ("requests", "limits"):
            daemon_resources.setdefault(kind, {})[spec.page_size.resource_name] = str(capacity_bytes)
    else:
        for values in daemon_resources.values():  # tmpfs is charged as the pod's memory
            if "memory" in values:
                values["memory"] = str(parse_quantity(values["memory"]) + capacity_bytes)
    environment = [
        {"name": "KVOFFLOAD_POOL", "value": pool},
        {"name": "KVOFFLOAD_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "KVOFFLOAD_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "KVOFFLOAD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "KVOFFLOAD_DAEMONSET", "value": daemonset_name(pool)},
        {"name": "KVOFFLOAD_LOG_LEVEL", "value": options.log_level},
    ]
    pod: Manifest = {
        "serviceAccountName": options.service_account,
        # a Service of ours would otherwise become variables that look like our settings
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": TERMINATION_GRACE_SECONDS,
        "nodeSelector": {**spec.node_selector, daemon_node_label(pool): DAEMON_NODE_LABEL_VALUE},
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "seccompProfile": {"type": "RuntimeDefault"},
            # the daemon writes into pods' folders and hugetlbfs, which confined types may not
            "seLinuxOptions": {"type": "spc_t"},
        },
        "containers": [
            {
                "name": "daemon",
                "image": options.image,
                "imagePullPolicy": options.image_pull_policy,
                "args": ["daemon"],
                "env": environment,
                "ports": [{"name": "metrics", "containerPort": DAEMON_METRICS_PORT, "protocol": "TCP"}],
                "resources": daemon_resources,
                "securityContext": _hardened(),
                "volumeMounts": [
                    {
                        "name": "hugepages",
                        "mountPath": "/hugepages",
                        **({"mountPropagation": "HostToContainer"} if managed else {}),
                    },
                    {"name": "state", "mountPath": "/state"},
                    {"name": "handoff", "mountPath": "/handoff"},
                ],
                "readinessProbe": _probe("/readyz", DAEMON_METRICS_PORT, period=5, failures=3),
                # long: a daemon that is busy reserving pages, or whose journal is being read, is alive
                "livenessProbe": _probe("/healthz", DAEMON_METRICS_PORT, period=10, failures=6),
                "startupProbe": _probe("/healthz", DAEMON_METRICS_PORT, period=2, failures=150),
                "terminationMessagePolicy": "FallbackToLogsOnError",
            },
            {
                "name": "attacher",
                "image": options.image,
                "imagePullPolicy": options.image_pull_policy,
                "args": ["attacher"],
                "env": environment,
                "ports": [{"name": "health", "containerPort": ATTACHER_PORT, "protocol": "TCP"}],
                "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
                "securityContext": _hardened(),
                "volumeMounts": [
                    {"name": "handoff", "mountPath": "/handoff"},
                    {"name": "kubelet-pods", "mountPath": "/kubelet-pods", "mountPropagation": "HostToContainer"},
                ],
                "livenessProbe": _probe("/healthz", ATTACHER_PORT, period=10, failures=6),
                "terminationMessagePolicy": "FallbackToLogsOnError",
            },
        ],
        "volumes": [
            hugepages,
            {"name": "state", "hostPath": {"path": f"{STATE_ROOT}/{pool}", "type": "DirectoryOrCreate"}},
            {"name": "handoff", "emptyDir": {}},
            {"name": "kubelet-pods", "hostPath": {"path": f"{options.kubelet_root_dir}/pods", "type": "Directory"}},
        ],
    }
    if spec.tolerations:
        pod["tolerations"] = [
            {key: value for key, value in toleration.to_manifest().items() if value != ""}
            for toleration in spec.tolerations
        ]
    if options.priority_class:
        pod["priorityClassName"] = options.priority_class
    if options.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
    if managed:
        pod["initContainers"] = [_mounter(mount, spec.page_size, options)]
        pod["volumes"].append({"name": "mounts", "hostPath": {"path": MANAGED_MOUNT_ROOT, "type": "DirectoryOrCreate"}})
        hugepages["hostPath"]["type"] = "DirectoryOrCreate"
    return pod


def _hardened() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _probe(path: str, port: int, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": 3,
    }


def _mounter(mount: str, page_size: PageSize, options: DaemonSetOptions) -> Manifest:
    """Init container that mounts a hugetlbfs on the host, once; privileged, and only where the pool asks for it."""
    script = (
        f"set -eu; mkdir -p {mount}; "
        f"grep -q ' {mount} hugetlbfs ' /proc/mounts || "
        f"mount -t hugetlbfs -o pagesize={page_size.value[:-1]},mode=0700 kvoffload {mount}"
    )
    return {
        "name": "mount-hugetlbfs",
        "image": options.image,
        "imagePullPolicy": options.image_pull_policy,
        "command": ["sh", "-c", script],
        "securityContext": {"privileged": True},
        "volumeMounts": [
            {"name": "mounts", "mountPath": MANAGED_MOUNT_ROOT, "mountPropagation": "Bidirectional"},
        ],
    }
