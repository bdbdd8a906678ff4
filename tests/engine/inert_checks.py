"""The connector, made as vLLM makes it, on real configurations and KV cache tensors: what it observes, and that it does
nothing and says why where it cannot be built. Run by `check_runner.py`; `Control` tells the region's status.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from bare_engine import NUM_BLOCKS, TOKENS, cache_config, cache_tensors, engine_config, full_attention
from check_runner import Control, check, run_checks
from toy_engine import wait_until
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.sampling_params import SamplingParams
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvoffload_engine import compat, connector, plugin
from kvoffload_engine.connector import KVOffloadConnector
from kvoffload_engine.spec import KVOffloadSpec
from kvoffload_engine.worker_reports import WorkerIdentity

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
REQUEST = Request("r", [1, 2, 3, 4], SamplingParams(max_tokens=1), None)
ANY = object()
METHODS: dict[str, tuple[tuple[Any, ...], object]] = {
    # vLLM's workers call these
    "register_kv_caches": (({},), None),
    "register_cross_layers_kv_cache": ((torch.zeros(1), object), None),
    "unregister_kv_caches": ((), None),
    "restore_kv_caches": ((), None),
    "set_host_xfer_buffer_ops": ((None,), None),
    "get_mem_pool_context": ((), None),
    "bind_connector_metadata": ((None,), None),
    "has_connector_metadata": ((), ANY),
    "handle_preemptions": ((None,), None),
    "start_load_kv": ((None,), None),
    "wait_for_layer_load": (("layer",), None),
    "save_kv_layer": (("layer", None, None), None),
    "wait_for_save": ((), None),
    "finish_forward": ((), None),
    "reset_capture_state": ((), None),
    "get_finished": ((set(),), (set(), set())),
    "get_transfer_results": ((set(),), ANY),
    "get_block_ids_with_load_errors": ((), set()),
    "build_connector_worker_meta": ((), None),
    "get_kv_connector_kv_cache_events": ((), None),
    "clear_connector_metadata": ((), None),
    "get_handshake_metadata": ((), ANY),
    "get_finished_count": ((), None),
    # its scheduler and engine core these
    "set_xfer_handshake_metadata": (({},), None),
    "set_xfer_handshake_metadata_pp_aware": (({},), None),
    "bind_gpu_block_pool": ((None,), None),
    "bind_kv_cache_manager": ((SimpleNamespace(block_pool=None),), None),
    "on_new_request": ((REQUEST,), None),
    "get_num_new_matched_tokens": ((REQUEST, 0), (0, False)),
    "get_loaded_kv_cache_group_ids": ((REQUEST,), ANY),
    "get_external_cache_hit_sources": ((REQUEST, 0), {}),
    "update_state_after_alloc": ((REQUEST, KVCacheBlocks(([],)), 0), None),
    "build_connector_meta": ((SchedulerOutput.make_empty(),), ANY),
    "update_connector_output": ((KVConnectorOutput(),), None),
    "has_pending_push_work": ((), False),
    "has_pending_block_frees": ((), False),
    "request_finished": ((REQUEST, []), (False, None)),
    "request_finished_all_groups": ((REQUEST, ([],)), (False, None)),
    "register_finished_partial_tail": ((REQUEST, ([],), []), False),
    "take_events": ((), ()),
    "reset_cache": ((), True),
    # and both these
    "get_kv_connector_stats": ((), None),
    "shutdown": ((), None),
}
"""Every public method of every supported vLLM's connector: arguments, and what an inert one returns."""
OF_THE_CLASS = {
    "get_required_kvcache_layout",
    "requires_piecewise_for_cudagraph",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "supports_sleep_mode",
}
"""Class methods, which know of no instance."""
PROPERTIES = {"prefer_cross_layer_blocks", "requires_kv_delivery", "role", "supports_divergent_local_hybrid_hits"}
ONLY_INSIDE = {"scheduler"}
"""vLLM's own short name for its scheduler half, of which nothing else asks."""


class Tomorrow(KVCacheSpec):
    """A kind of layer that this vLLM's offloading does not know."""

    page_size_bytes = 4096

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        raise NotImplementedError


@dataclass
class Made:
    """A connector that became inert, and why."""

    connector: KVOffloadConnector
    reason: str
    words: str

    def check(self) -> None:
        made = self.connector
        assert made._inert_reason == self.reason, (made._inert_reason, made._inert_because)
        assert self.words in made._inert_because, made._inert_because
        for name, (arguments, expected) in METHODS.items():
            if not hasattr(OffloadingConnector, name):
                continue  # of another version
            answer = getattr(made, name)(*arguments)
            assert expected is ANY or answer == expected, f"{name} returned {answer!r}"
        for name in PROPERTIES:
            getattr(made, name, None)
        metadata = made.build_connector_meta(SchedulerOutput.make_empty())
        assert not metadata.load_jobs
        assert not metadata.store_jobs


@contextlib.contextmanager
def reports_end() -> Iterator[None]:
    """What is told in it is told until its end."""
    try:
        yield
    finally:
        while plugin._telling:
            plugin._telling.pop().close()


def make(socket_path: str, role: KVConnectorRole, *specs: KVCacheSpec, ranks: int = 2) -> KVOffloadConnector:
    return KVOffloadConnector(engine_config(socket_path, ranks=ranks), role, cache_config(specs or [full_attention()]))


def raising(error: Exception) -> Callable[..., Any]:
    def function(*_: object, **__: object) -> Any:
        raise error

    return function


def register(made: KVOffloadConnector) -> None:
    made.register_kv_caches(cache_tensors(made.connector_worker.kv_cache_config))


@check
def the_table_of_methods_is_that_of_this_vllm(socket_path: str, control: Control) -> None:
    public = {name for name in dir(OffloadingConnector) if not name.startswith("_")}
    known = METHODS.keys() | OF_THE_CLASS | PROPERTIES | ONLY_INSIDE
    assert public <= known, f"say what an inert connector does in {sorted(public - known)}"


@check
def a_spec_that_raises_leaves_both_roles_inert(socket_path: str, control: Control) -> None:
    with reports_end(), mock.patch.object(KVOffloadSpec, "__init__", raising(AssertionError("a test"))):
        for role in (SCHEDULER, WORKER):
            Made(make(socket_path, role), "ConnectorFailed", "AssertionError in ").check()


@check
def caches_that_vllm_does_not_know_leave_the_worker_inert_and_the_scheduler_hears_it(
    socket_path: str, control: Control
) -> None:
    worker = make(socket_path, WORKER)
    worker.connector_worker.kv_cache_config.kv_cache_groups[0].kv_cache_spec = Tomorrow(block_size=TOKENS)
    register(worker)
    Made(worker, "ConnectorFailed", "NotImplementedError in register_kv_caches, worker.py line ").check()
    check_scheduler_says(socket_path, worker, "in 2 of 2 workers")


@check
def a_fault_of_ours_leaves_the_worker_inert_and_the_scheduler_hears_it(socket_path: str, control: Control) -> None:
    worker = make(socket_path, WORKER)
    with mock.patch.object(connector, "observe_worker", raising(ZeroDivisionError("a test's"))):
        register(worker)
    Made(worker, "ConnectorFailed", "ZeroDivisionError in ").check()
    check_scheduler_says(socket_path, worker, "a test's (in 2 of 2 workers)")


def check_scheduler_says(socket_path: str, worker: KVOffloadConnector, words: str) -> None:
    """A scheduler that is well hears of two such workers."""
    scheduler = make(socket_path, SCHEDULER)
    assert not scheduler._inert_because
    told = worker.get_handshake_metadata()
    with reports_end():
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): told, (0, 1): told})
        assert len(plugin._telling) == 1
        Made(scheduler, worker._inert_reason, words).check()
        assert len(plugin._telling) == 1, "told once"


@check
def workers_that_differ_or_are_missing_leave_the_scheduler_inert(socket_path: str, control: Control) -> None:
    one, other = WorkerIdentity(b"1" * 32), WorkerIdentity(b"2" * 32)
    lost = WorkerIdentity(b"", inert_reason="NoKVBytes", inert_because="this rank has no KV cache layer")
    for workers, reason, words in (
        ({(0, 0): one, (0, 1): other}, "WorkersDiffer", "2 of 2 workers attached, with 2 different identities"),
        ({(0, 0): one}, "WorkersDiffer", "1 of 2 workers attached"),
        ({}, "WorkersDiffer", "0 of 2 workers attached"),
        ({(0, 0): one, (0, 1): lost}, "NoKVBytes", "this rank has no KV cache layer (in 1 of 2 workers)"),
    ):
        scheduler = make(socket_path, SCHEDULER)
        with reports_end():
            scheduler.set_xfer_handshake_metadata_pp_aware(workers)
            Made(scheduler, reason, words).check()
            assert len(plugin._telling) == 1


@check
def nobody_at_the_socket_and_no_socket_at_all_hold_nothing_up(socket_path: str, control: Control) -> None:
    for path in (f"{socket_path}.nobody", ""):
        with reports_end(), mock.patch.object(KVOffloadSpec, "__init__", raising(ValueError("a test"))):
            Made(make(path, SCHEDULER), "ConnectorFailed", "ValueError").check()


@check
def the_regions_status_shows_why_an_engine_is_left_alone_once(socket_path: str, control: Control) -> None:
    def told() -> list[tuple[str, str, str]]:
        return [
            (engine["confirmedLayout"], engine["reason"], engine["message"])
            for engine in json.loads(control.say("engines"))
        ]

    lost = WorkerIdentity(b"", inert_reason="SeveralGroups", inert_because="the model has 2 KV cache groups, needed 1")
    scheduler = make(socket_path, SCHEDULER)
    with reports_end():
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): lost, (0, 1): lost})
        message = f"SeveralGroups: {lost.inert_because} (in 2 of 2 workers)"
        wait_until(lambda: ("left-alone", "SeveralGroups", message) in told(), 60)
        assert [one for one in told() if one[1] == "SeveralGroups"] == [("left-alone", "SeveralGroups", message)]


@check
def two_groups_are_declined_where_a_failed_load_would_end_the_engine(socket_path: str, control: Control) -> None:
    window = kv_cache_interface.SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
    )
    worker = make(socket_path, WORKER, full_attention(), window)
    register(worker)
    try:
        if compat.reports_failed_receives():
            assert not worker._inert_because
        else:
            Made(worker, "SeveralGroups", "2 KV cache groups, needed 1").check()
    finally:
        worker.shutdown()


@check
def a_group_that_vllm_does_not_offload_is_left_out_of_layers_and_identity(socket_path: str, control: Control) -> None:
    if compat.require_supported_version(compat.installed_version()) < (0, 31):
        return  # every group is offloaded
    plain, seen = full_attention(), []
    ring = kv_cache_interface.CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=16, dtype=torch.float32)
    specs = [plain, ring, plain]
    observe = connector.observe_worker

    def observed(*arguments: Any) -> Any:
        seen.append(observe(*arguments))
        return seen[-1]

    worker = make(socket_path, WORKER, *specs)
    with mock.patch.object(connector, "observe_worker", observed):
        register(worker)
    try:
        assert not worker._inert_because, worker._inert_because
        (facts,) = seen
        layers = ["model.layers.0.attn", "model.layers.9.attn", "model.layers.2.attn"]
        assert [one[0] for one in facts.identity.fields["layers"]] == layers
        assert facts.identity.fields["groups"] == [[TOKENS, layers[:2]], [TOKENS, layers[2:]]]
        assert facts.layout.part_bytes == 2 * plain.page_size_bytes
        assert facts.tensors.num_blocks == NUM_BLOCKS
    finally:
        worker.shutdown()


if __name__ == "__main__":
    run_checks(with_control=True)
