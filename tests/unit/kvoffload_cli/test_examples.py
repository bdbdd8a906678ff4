"""The examples: every file parses, every pool is one that the API takes, every workload names a pool that is there."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.examples import EXAMPLES, example_files, objects_in, pods_of
from kvoffload.api.keys import CONTAINER_ANNOTATION, POOL_LABEL, PredictedLayout
from kvoffload.api.pool import KVOffloadPool
from kvoffload_operator.webhook.injection import PoolFacts, inject

FILES = example_files()
WORKLOADS = {"Deployment", "StatefulSet", "LeaderWorkerSet", "InferenceService"}


def pools_in(path: Path) -> dict[str, KVOffloadPool]:
    pools = [KVOffloadPool.from_manifest(one) for one in objects_in(path) if one["kind"] == "KVOffloadPool"]
    return {pool.name: pool for pool in pools}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_workload_opts_in_to_a_pool_of_the_examples(path: Path) -> None:
    known = pools_in(path) | pools_in(EXAMPLES / "pool.yaml")
    for one in objects_in(path):
        pods = list(pods_of(one))
        assert bool(pods) == (one["kind"] in WORKLOADS)
        for pod in pods:
            assert pod["metadata"]["labels"][POOL_LABEL] in known
            named = pod["metadata"].get("annotations", {}).get(CONTAINER_ANNOTATION)
            assert named in (None, *(container["name"] for container in pod["spec"]["containers"]))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_pools_are_whole_pages_and_quotas_fit(path: Path) -> None:
    for pool in pools_in(path).values():
        assert pool.spec.capacity % pool.spec.page_size.num_bytes == 0
        assert sum(quota.guaranteed for quota in pool.spec.quotas) <= pool.spec.capacity


def test_the_two_tenants_share_no_block_and_both_may_attach() -> None:
    objects = objects_in(EXAMPLES / "two-tenants.yaml")
    (pool,) = pools_in(EXAMPLES / "two-tenants.yaml").values()
    assert pool.spec.sharing.value == "Namespace"
    assert pool.spec.namespace_selector is not None
    selected = {
        one["metadata"]["name"]
        for one in objects
        if one["kind"] == "Namespace"
        and pool.spec.namespace_selector.match_labels.items() <= one["metadata"]["labels"].items()
    }
    assert selected == {quota.namespace for quota in pool.spec.quotas} == {"team-a", "team-b"}


WORKLOADS_BY_FILE = [(path, pod) for path in FILES for one in objects_in(path) for pod in pods_of(one)]


@pytest.mark.parametrize(
    ("path", "pod"),
    WORKLOADS_BY_FILE,
    ids=[f"{path.name}-{pod['metadata']['name']}" for path, pod in WORKLOADS_BY_FILE],
)
def test_the_webhook_injects_every_workload_with_the_layout_of_its_model(path: Path, pod: dict[str, Any]) -> None:
    pools = pools_in(EXAMPLES / "pool.yaml") | pools_in(path)
    name, namespace = pod["metadata"]["labels"][POOL_LABEL], pod["metadata"]["namespace"]
    labels = {
        key: value
        for one in objects_in(path)
        if (one["kind"], one["metadata"]["name"]) == ("Namespace", namespace)
        for key, value in one["metadata"]["labels"].items()
    }
    facts = PoolFacts(
        name=name,
        spec=pools[name].spec,
        namespace=namespace,
        namespace_labels=labels,
        operator_namespace="kvoffload-system",
    )
    outcome = inject(pod, facts)
    assert outcome.skip_reason is None, outcome.message
    assert outcome.operations
    text = yaml.safe_dump(pod)
    divides_heads = "llama" in text.lower() or "Qwen" in text
    assert outcome.prediction is not None
    assert outcome.prediction.layout is (PredictedLayout.PER_RANK if divides_heads else PredictedLayout.REPLICATED)
