"""Builders of the objects that operator and webhook look at; every test names only what it is about."""

from datetime import UTC, datetime
from typing import Any

from kvoffload.api.pool import KVOffloadPoolSpec, PageSize
from kvoffload_operator.resources.daemonset import DaemonSetOptions

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)


def spec_of(**fields: Any) -> KVOffloadPoolSpec:
    """A pool's spec of 1Gi, with these fields as in a manifest."""
    return KVOffloadPoolSpec.model_validate({"capacity": "1Gi", **fields})


def pool_manifest(name: str = "main", *, generation: int = 1, **spec: Any) -> dict[str, Any]:
    """A pool as the API server sends it, with the fields that the CRD defaults."""
    full = spec_of(**spec).to_manifest()
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "generation": generation, "resourceVersion": "1"},
        "spec": {**full, **spec},
    }


def node_manifest(name: str, *, pages: str = "1Gi", labels: dict[str, str] | None = None) -> dict[str, Any]:
    """A node with that many bytes of 2Mi pages."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels or {}, "resourceVersion": "1"},
        "status": {"allocatable": {"hugepages-2Mi": pages}, "capacity": {"hugepages-2Mi": pages}},
    }


def pod_manifest(
    *,
    command: list[str] | None = None,
    args: list[str] | None = None,
    image: str = "vllm/vllm-openai:v0.32.0",
    pool: str = "main",
    annotations: dict[str, str] | None = None,
    container: dict[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """An opted-in pod with one vLLM container, as admission sees it: no volumes, no env, no resources."""
    vllm: dict[str, Any] = {"name": "vllm", "image": image, **(container or {})}
    if command is not None:
        vllm["command"] = command
    if args is not None:
        vllm["args"] = args
    metadata: dict[str, Any] = {"generateName": "server-", "labels": {"kvoffload.io/pool": pool}}
    if annotations is not None:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": {"containers": [vllm], **spec}}


def daemonset_options(**changes: Any) -> DaemonSetOptions:
    """What the chart decides, for tests."""
    fields: dict[str, Any] = {
        "namespace": "kvoffload-system",
        "image": "kvoffload/node:0.1.0",
        "image_pull_policy": "IfNotPresent",
        "image_pull_secrets": (),
        "kubelet_root_dir": "/var/lib/kubelet",
        "hugetlbfs_paths": {PageSize.MI_2: "/dev/hugepages", PageSize.GI_1: "/dev/hugepages-1Gi"},
        "service_account": "kvoffload-node",
        "priority_class": "kvoffload-node",
        "labels": {},
        "pod_annotations": {},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "log_level": "INFO",
        "owner": {"name": "kvoffload-operator", "uid": "uid-operator"},
        **changes,
    }
    return DaemonSetOptions(**fields)
