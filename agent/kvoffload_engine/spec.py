"""Our offloading spec: what vLLM's factory makes, in the engine core (for its manager) and in each worker (for its
worker).

Named in `kv_connector_extra_config` as `spec_name` and `spec_module_path`; made by `kvoffload_engine.connector`'s
parent class. The spec itself decides nothing: the connector gives the worker's side its facts, because they need
vLLM's whole configuration, which a spec is not given.
"""

import os
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig

from kvoffload_engine.budget import step_seconds_from
from kvoffload_engine.manager import KVOffloadManager


class KVOffloadSpec(OffloadingSpec):
    """Makes the two sides. `replicated_layout` stays False towards vLLM: every rank gets every store job (it writes
    its stripe), and a job is complete when all have reported it."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.build_worker: Callable[[CanonicalKVCaches], OffloadingWorker] | None = None
        """Set by the connector before vLLM registers the KV caches."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003 - vLLM's signature
        """None: the node daemon has the metrics of all engines."""
        return {}

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side."""
        return KVOffloadManager(step_seconds=step_seconds_from(os.environ))

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker's side."""
        if self.build_worker is None:
            raise RuntimeError("KVOffloadSpec works with KVOffloadConnector only: set kv_connector_module_path")
        return self.build_worker(kv_caches)
