"""Pure builder of a KVOffloadRegion: what a pool asks of one node. Called by the region's reconciler."""

from typing import Any

from kvoffload.api.keys import API_VERSION, DAEMON_OF_LABEL
from kvoffload.api.pool import KVOffloadPoolSpec
from kvoffload.api.region import KVOffloadRegionSpec, RegionQuota, region_name

Manifest = dict[str, Any]


def build_region_spec(pool: str, node: str, spec: KVOffloadPoolSpec) -> KVOffloadRegionSpec:
    """The pool's wishes in bytes, with every default spelled out: no missing limit ever means "no limit"."""
    return KVOffloadRegionSpec(
        pool_name=pool,
        node_name=node,
        capacity_bytes=spec.capacity,
        page_size_bytes=spec.page_size.num_bytes,
        fallback=spec.fallback,
        numa_policy=spec.numa_policy,
        replicated_layout=spec.replicated_layout,
        sharing=spec.sharing,
        namespace_selector=spec.namespace_selector,
        quotas=[
            RegionQuota(
                namespace=quota.namespace,
                guaranteed_bytes=quota.guaranteed,
                limit_bytes=spec.capacity if quota.limit is None else min(quota.limit, spec.capacity),
            )
            for quota in spec.quotas
        ],
        eviction_policy=spec.eviction_policy,
        max_engines=spec.max_engines_per_node,
        mode=spec.mode,
        reclaim_policy=spec.reclaim_policy,
    )


def build_region(pool: str, pool_uid: str, spec: KVOffloadRegionSpec) -> Manifest:
    """The region object, owned by its pool: it goes when the pool goes."""
    return {
        "metadata": {
            "name": region_name(pool, spec.node_name),
            "labels": {"app.kubernetes.io/name": "kvoffload", DAEMON_OF_LABEL: pool},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": "KVOffloadPool",
                    "name": pool,
                    "uid": pool_uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "spec": spec.to_manifest(),
    }
