"""Our connector: vLLM's OffloadingConnector, with failed loads recomputed, one look-up for a request, and no way to
hurt.

Runs in vLLM's engine core (scheduler role) and in each worker (worker role); vLLM makes it from
`kv_transfer_config`, which `kvoffload_engine.plugin` sets.

    worker     register_kv_caches -> gate, layout, identity -> KVOffloadWorker (attaches to the daemon)
               get_handshake_metadata -> the identity, to the scheduler
    scheduler  set_xfer_handshake_metadata_pp_aware -> KVOffloadManager.connect
               get_num_new_matched_tokens -> begin_lookup, then vLLM's own look-ups, which find their answer there

Whatever is raised while it is built makes it inert: vLLM then has a connector that finds and stores nothing. A worker
tells the scheduler why, in place of its identity; the scheduler alone tells the daemon, once.
"""

import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvoffload.errors import UnsupportedEngine
from kvoffload.layout.gate import LayoutDecision, LayoutVerdict
from kvoffload_engine import compat
from kvoffload_engine.environment import SOCKET_VARIABLE
from kvoffload_engine.facts import observe_worker
from kvoffload_engine.hello import engine_digest, scheduler_hello, worker_hello
from kvoffload_engine.identity import seed_of_keys
from kvoffload_engine.log import logger
from kvoffload_engine.manager import KVOffloadManager
from kvoffload_engine.plugin import leave_alone
from kvoffload_engine.preflight import PreflightReason
from kvoffload_engine.transfer.checksums import PageChecksums
from kvoffload_engine.worker import KVOffloadWorker
from kvoffload_engine.worker_reports import KVOffloadWorkerMetadata, WorkerIdentity, WorkersDisagree, agree


class LayoutRefused(UnsupportedEngine):
    """The gate says that this engine gets no offload."""

    def __init__(self, verdict: LayoutVerdict) -> None:
        super().__init__(verdict.message)
        self.reason = verdict.reason


class KVOffloadConnector(OffloadingConnector):
    """See the module's docstring."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._config = vllm_config
        self._is_scheduler = role is KVConnectorRole.SCHEDULER
        self._inert_reason = self._inert_because = ""
        self._process = os.urandom(16)  # names this process in every `Hello`
        self._identity: WorkerIdentity | None = None
        self._failed_loads: dict[str, bool] = {}
        self._invalid_blocks: set[int] = set()
        self._load_blocks: dict[int, list[int]] = {}
        self.connector_worker: Any = None
        self.connector_scheduler: Any = None
        try:
            super().__init__(vllm_config, role, kv_cache_config)
            if self.connector_scheduler is not None:
                compat.watch_weight_updates(KVOffloadConnector)
            if self.connector_worker is not None:
                self.connector_worker.spec.build_worker = functools.partial(self._build_worker, kv_cache_config)
        except Exception as error:  # noqa: BLE001 - vLLM must start without us
            self._become_inert(*explain(error))

    def _become_inert(self, reason: str, because: str) -> None:
        """From now on every method does nothing."""
        self._inert_reason, self._inert_because = reason, because
        if self._is_scheduler:
            leave_alone(reason, because, self._config, socket_path(self._config))
        else:
            logger.warning("kvoffload: this engine runs without offload: %s: %s", reason, because)

    @property
    def _manager(self) -> KVOffloadManager:
        manager = self.scheduler_side.manager
        assert isinstance(manager, KVOffloadManager)
        return manager

    @property
    def scheduler_side(self) -> Any:
        """vLLM's own scheduler half."""
        return self.connector_scheduler

    # --- worker -----------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM finds each layer's pages in its tensors; then our worker is built."""
        self._register(super().register_kv_caches, kv_caches)

    def register_cross_layers_kv_cache(self, *arguments: Any) -> None:
        """As above, where vLLM keeps all layers of a block together (0.28)."""
        self._register(super().register_cross_layers_kv_cache, *arguments)

    def _register(self, register: Callable[..., None], *arguments: Any) -> None:
        if self._inert_because:
            return
        try:
            register(*arguments)
        except Exception as error:  # noqa: BLE001 - as in __init__
            self._become_inert(*explain(error))

    def _build_worker(self, kv_cache_config: Any, kv_caches: CanonicalKVCaches) -> KVOffloadWorker:
        facts = observe_worker(self._config, kv_cache_config, kv_caches)
        verdict = facts.verdict
        logger.info(
            "kvoffload rank %d: %s (%s): %s", facts.rank, verdict.decision.value, verdict.reason.value, verdict.message
        )
        if verdict.decision is LayoutDecision.NO_OFFLOAD:
            raise LayoutRefused(verdict)
        self._identity = WorkerIdentity(engine_digest(self._config, facts), facts.identity.digest)
        worker = KVOffloadWorker(
            rank=facts.rank,
            socket_path=socket_path(self._config),
            make_hello=functools.partial(worker_hello, self._config, self._process, facts),
            layout=facts.layout,
            tensors=facts.tensors,
            transfer=facts.build_transfer(),
            checksums=PageChecksums(facts.checksums) if facts.layout.has_checksums else None,
        )
        worker.start()
        return worker

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The identity, for the scheduler, or why this worker runs without offload."""
        if self._inert_because:
            return WorkerIdentity(b"", inert_reason=self._inert_reason, inert_because=self._inert_because)
        return self._identity

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks are about to be reused: what still reads them is finished first."""
        if not self._inert_because:
            super().handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Submit the step's loads and the last step's stores."""
        if self._inert_because:
            return
        for job_id, job in self._connector_metadata.load_jobs.items():
            self._load_blocks[job_id] = job.dst_spec.block_ids
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """vLLM queues the step's stores here (0.30 and newer)."""
        if not self._inert_because:
            super().wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose loads are done here; failed ones are kept for the report that follows."""
        if self._inert_because:
            return set(), set()
        requests = dict(self.connector_worker._load_jobs)
        finished: tuple[set[str], set[str]] = super().get_finished(finished_req_ids)
        for job_id, wrong in self.connector_worker.worker.take_failed_loads().items():
            self._failed_loads[requests[job_id]] = wrong
            self._invalid_blocks.update(int(block) for block in self._load_blocks[job_id])
        for job_id in requests.keys() - self.connector_worker._load_jobs.keys():
            self._load_blocks.pop(job_id, None)
        return finished

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same, with the failed requests named (0.30 and newer)."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = set(self._failed_loads)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, where vLLM has no other way to hear of them (0.28, 0.29)."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return set() if compat.reports_failed_receives() else blocks

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """vLLM's report of finished jobs, with the failed loads."""
        if self._inert_because:
            return None
        report = super().build_connector_worker_meta()
        if report is None:
            return None
        failed, self._failed_loads = self._failed_loads, {}
        pageable = bool(self.connector_worker.worker.registration_refused)
        return KVOffloadWorkerMetadata(**compat.copy_fields(report), failed_loads=failed, pageable=pageable)

    # --- scheduler --------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The workers' identities: one for all, or no offload."""
        if self._inert_because:
            return
        try:
            digest, stages = agree(metadata, self._config.parallel_config)
        except WorkersDisagree as error:
            self._become_inert(error.reason, str(error))
            return
        self._manager.connect(
            socket_path(self._config),
            make_hello=functools.partial(scheduler_hello, self._config, self._process, digest),
            none_hash=lambda: seed_of_keys(compat.none_hash(), stages),
            chunks_per_step=chunks_per_step(self._config, self.scheduler_side),
        )

    def on_new_request(self, request: Any) -> None:
        """Requests whose keys mean something in this engine alone are told apart here."""
        if self._inert_because:
            return
        is_private = request.lora_request is not None or bool(request.mm_features)
        self._manager.begin_request(request.request_id, is_private=is_private)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask for all keys of the request at once, then let vLLM look them up one by one."""
        if self._inert_because:
            return 0, False
        state = self.scheduler_side._req_status[request.request_id]
        if not state.transfer_jobs and not request.skip_reading_prefix_cache:
            self._manager.begin_lookup(request.request_id, compat.request_keys(state))
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """vLLM's count of what was found, by tier (0.32 and newer)."""
        if self._inert_because:
            return {}
        sources: dict[Any, int] = super().get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM plans the load of what was found."""
        if not self._inert_because:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's jobs; its end for the manager's budget."""
        if self._inert_because:
            return OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set())
        metadata = super().build_connector_meta(scheduler_output)
        self._manager.end_step()
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """Workers' reports: failed loads first, so that their keys are a miss before the next look-up."""
        if self._inert_because:
            return
        report = connector_output.kv_connector_worker_meta
        for req_id, wrong in getattr(report, "failed_loads", {}).items():
            self._manager.load_failed(req_id, bytes_are_wrong=wrong)
        if getattr(report, "pageable", False):
            self._manager.pageable = True
        super().update_connector_output(connector_output)
        self._manager.receives_finished(connector_output.finished_recving or ())

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must go on stepping for jobs under way."""
        return False if self._inert_because else super().has_pending_push_work()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing holds a finished request's blocks."""
        return (False, None) if self._inert_because else super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return (False, None) if self._inert_because else super().request_finished_all_groups(request, block_ids)

    def take_events(self) -> Any:
        """vLLM's KV events."""
        return () if self._inert_because else super().take_events()

    def reset_cache(self) -> bool | None:
        """The engine's cache is reset: a new generation for us."""
        return True if self._inert_because else super().reset_cache()

    def weights_changed(self) -> None:
        """The weights were, or are about to be, updated in place: keys no longer mean what they mean elsewhere."""
        if not self._inert_because:
            self._manager.weights_changed()

    def get_kv_connector_stats(self) -> Any:
        """vLLM's own transfer statistics."""
        return None if self._inert_because else super().get_kv_connector_stats()


def explain(error: Exception) -> tuple[str, str]:
    """Reason and message of what was raised while the connector was built; an error that says nothing is told by its
    place."""
    if isinstance(error, LayoutRefused):
        return error.reason.value, str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    raised = f"{type(error).__name__} in {place.name}, {Path(place.filename).name} line {place.lineno}"
    return PreflightReason.CONNECTOR_FAILED.value, f"{raised}: {error}" if str(error) else raised


def socket_path(vllm_config: Any) -> str:
    """Where the daemon listens: the connector's extra config, which reaches every process, or the environment."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return str(extra.get("kvoffload_socket") or os.environ.get(SOCKET_VARIABLE, ""))


def chunks_per_step(vllm_config: Any, scheduler_side: Any) -> int:
    """How many chunks one step of the scheduler can compute at most, all groups together."""
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return sum(-(-tokens // group.tokens_per_chunk) for group in scheduler_side.config.kv_group_configs)
