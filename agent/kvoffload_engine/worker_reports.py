"""What workers tell the scheduler through vLLM: once who they are, and in each step what failed.

Made in vLLM's workers and read in its engine core, both by `kvoffload_engine.connector`; pickled by vLLM between them.

    WorkerIdentity            once, when the KV caches are registered: `agree` makes one of all, or says why not
    KVOffloadWorkerMetadata   with vLLM's report of finished jobs
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from kvoffload.errors import UnsupportedEngine
from kvoffload_engine import compat
from kvoffload_engine.preflight import PreflightReason


@dataclass
class WorkerIdentity(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once: the identity of the engine's bytes, the same for every worker, and that
    of its pipeline stage's; or why it runs without offload."""

    digest: bytes
    stage: bytes = b""
    inert_reason: str = ""
    inert_because: str = ""


@dataclass
class KVOffloadWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's worker report; the requests whose load failed here (request id -> whether the bytes were wrong); and
    whether a device registers no pages."""

    failed_loads: dict[str, bool] = field(default_factory=dict)
    pageable: bool = False

    def aggregate(self, other: Any) -> "KVOffloadWorkerMetadata":
        """Both workers' reports as one."""
        merged = dict(self.failed_loads)
        for req_id, wrong in getattr(other, "failed_loads", {}).items():
            merged[req_id] = merged.get(req_id, False) or wrong
        pageable = self.pageable or getattr(other, "pageable", False)
        theirs = compat.copy_fields(super().aggregate(other))
        return KVOffloadWorkerMetadata(**theirs, failed_loads=merged, pageable=pageable)


class WorkersDisagree(UnsupportedEngine):
    """No offload for this engine: a worker runs without, or they are not of one engine."""

    def __init__(self, reason: str, because: str) -> None:
        super().__init__(because)
        self.reason = reason


def agree(identities: Mapping[tuple[int, int], WorkerIdentity], parallel_config: Any) -> tuple[bytes, list[bytes]]:
    """What the workers, by vLLM's keys (stage, rank), have in common: the engine's digest, and each stage's in order.

    Raises WorkersDisagree.
    """
    inert = [one for one in identities.values() if one.inert_because]
    if inert:
        says_so = f"{inert[0].inert_because} (in {len(inert)} of {parallel_config.world_size} workers)"
        raise WorkersDisagree(inert[0].inert_reason, says_so)
    num_stages = parallel_config.pipeline_parallel_size
    num_expected = num_stages * parallel_config.tensor_parallel_size
    stages = sorted({(stage, one.stage) for (stage, _), one in identities.items()})
    digests = {one.digest for one in identities.values()}
    if len(identities) < num_expected or len(digests) != 1 or len(stages) != num_stages:
        raise WorkersDisagree(
            PreflightReason.WORKERS_DIFFER.value,
            f"{len(identities)} of {num_expected} workers attached, with {len(digests)} different identities, and "
            f"{len(stages)} of their {num_stages} pipeline stages",
        )
    return digests.pop(), [digest for _, digest in stages]
