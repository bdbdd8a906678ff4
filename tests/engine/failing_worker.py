"""Loaded in vLLM's workers in a test (`worker_extension_cls`): the model's KV caches are of a kind that vLLM's own
connector does not know, and says so as it does.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker


def register_kv_caches(self: OffloadingConnectorWorker, kv_caches: Any) -> None:
    raise NotImplementedError


OffloadingConnectorWorker.register_kv_caches = register_kv_caches


class Extension:
    """Nothing; importing this module is what counts."""
