"""Pools and pods that go wrong on purpose: what doctor, explain, completion and the alerts are shown."""

from collections.abc import Iterator

import pytest

from e2e.light_pod import is_injected, light_pod
from hack.demo.installation import create_pool, delete_pool
from hack.demo.kubernetes import Kubernetes
from hack.demo.run import Stage

TOO_LARGE = """\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {name: too-large}
spec: {capacity: 64Gi, pageSize: 2Mi}
"""
NOWHERE = """\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {name: nowhere}
spec: {capacity: 64Mi, nodeSelector: {zone: nowhere}}
"""
ALONE = """\
apiVersion: kvoffload.io/v1alpha1
kind: KVOffloadPool
metadata: {name: alone}
spec: {capacity: 16Mi, pageSize: 2Mi}
"""
STRAY_POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: stray
  namespace: demo
  labels: {kvoffload.io/pool: never-made}
spec:
  containers:
  - {name: vllm, image: stray, imagePullPolicy: Never, command: [vllm, serve, x]}
"""


@pytest.fixture
def troubled(release: Stage) -> Iterator[Kubernetes]:
    """A pool that no node can hold, one that no node matches, and a pod that names a pool that nobody made."""
    kubernetes = release.kubernetes
    for manifest in (TOO_LARGE, NOWHERE, STRAY_POD):
        kubernetes.apply(manifest)
    yield kubernetes
    kubernetes.delete("pod", "stray", namespace="demo")
    for name in ("too-large", "nowhere"):
        delete_pool(kubernetes, name=name)


@pytest.fixture
def alone(release: Stage) -> Iterator[Kubernetes]:
    """A pool that serves, and an injected pod that is ready and has no engine, as where the plugin was not imported."""
    kubernetes = release.kubernetes
    annotations = {"kvoffload.io/container": "main"}
    try:
        create_pool(kubernetes, ALONE, name="alone")
        kubernetes.apply(light_pod("alone", pool="alone", image=release.images.python, annotations=annotations))
        pod = kubernetes.wait_ready_pod(namespace="demo", selector="app=alone", timeout_seconds=120)
        assert is_injected(pod)
        yield kubernetes
    finally:
        kubernetes.delete("pod", "alone", namespace="demo")
        delete_pool(kubernetes, name="alone")
